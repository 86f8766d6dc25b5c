"""Traces every block that torch's allocator allocates and frees, in order, with its profiler.

The profiler is independent of the measured runtime, so that all contestants are treated alike. Sizes are those of
tensor storages; allocations from before the trace are not included.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.autograd import profiler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MARK = "mark: "


class Block(NamedTuple):
    """Bytes that were allocated (or freed, if negative) at an address."""

    address: int
    size: int


#: Blocks, and between them the names of marks.
Trace = list["Block | str"]


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Add what happens inside to the trace."""
    with _silent(), profiler.profile(use_kineto=True, profile_memory=True) as profile:
        yield
    events = sorted(_all(profile.kineto_results.experimental_event_tree()), key=lambda event: event.start_time_ns)
    for event in events:
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            trace.append(Block(fields.ptr, fields.alloc_size))
        elif event.name.startswith(_MARK):
            trace.append(event.name.removeprefix(_MARK))


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress the messages that the profiler prints when it starts and stops."""
    terminal = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)


def mark(name: str) -> None:
    """Put a name into the trace."""
    with profiler.record_function(_MARK + name):
        pass


def _all(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


def between(trace: Trace, begin: str, end: str) -> Trace:
    """Return the part of a trace between two marks."""
    return trace[trace.index(begin) + 1 : trace.index(end)]


def level(trace: Trace) -> int:
    """Return the bytes in use at the end of a trace."""
    return sum(entry.size for entry in trace if isinstance(entry, Block))


def peak(trace: Trace, size: int | None = None) -> int:
    """Return the peak of bytes in use; only of blocks of one size, if given."""
    highest = now = 0
    for entry in trace:
        if isinstance(entry, Block) and size in (None, abs(entry.size)):
            now += entry.size
            highest = max(highest, now)
    return highest


def freed(before: Trace, after: Trace) -> int:
    """Return the bytes in use at the end of one trace that are freed in the other."""
    alive: dict[int, int] = {}
    for entry in before:
        if isinstance(entry, Block):
            if entry.size > 0:
                alive[entry.address] = entry.size
            else:
                alive.pop(entry.address, None)
    given = 0
    for entry in after:
        if isinstance(entry, Block) and entry.size < 0:
            given += alive.pop(entry.address, 0)
    return given
