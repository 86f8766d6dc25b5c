"""Writes a timeline as a trace for Perfetto and ``chrome://tracing``, in the Trace Event Format as a JSON object.

A rank is a process. Its threads show what it computes, actions that take no time, why it is idle, and a lane for each
peer that it sends to or receives from. Arrows follow each transfer from the action that produces the tensor to the one
that needs it. The memory of a rank is a counter.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from penstock.errors import WriteError
from penstock.ir.actions import Action
from penstock.ir.dependencies import TRANSFERS
from penstock.ir.formats.files import atomic_file
from penstock.simulation.timeline import WRITERS
from penstock.view.trace_threads import COMPUTE, IDLE, INSTANTS, LANE, Thread, assign_lanes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.ir.actions import ComputationType
    from penstock.simulation.timeline import Span, Timeline
    from penstock.simulation.transfers import Transfer

    Event: TypeAlias = dict[str, Any]

#: The default number of seconds in a unit of time of the costs.
MILLISECOND: Final = 1e-3

_ENCODER: Final = json.JSONEncoder(allow_nan=False)
_NANOSECONDS: Final = 1e9
_LONGEST: Final = 2**53  # nanoseconds, which readers hold as a float
_ROUTE: Final = {transfer.send: transfer for transfer in TRANSFERS}


def write_trace(timeline: Timeline, path: Path, *, unit: float | None = None) -> None:
    """Write a trace, completely or not at all.

    Args:
        timeline: the timeline.
        path: the file, ``*.json``.
        unit: the number of seconds in a unit of time of the costs; by default a unit is a millisecond, and for a
            measured timeline a second. A trace has a resolution of nanoseconds.

    Raises:
        WriteError: the file cannot be written, or the times are too long or too short for a trace.
    """
    if unit is None:
        unit = MILLISECOND if timeline.measured is None else 1.0
    trace = Trace(timeline, unit)
    facts = {"schedule": timeline.schedule.summary, "seconds per unit of time": unit, "costs": timeline.costs.to_dict()}
    with atomic_file(path) as file:
        file.write(b'{"displayTimeUnit": "ns", "otherData": ' + _json(facts) + b', "traceEvents": [\n')
        for number, event in enumerate(trace.events()):
            file.write((b",\n" if number else b"") + _json(event))
        file.write(b"\n]}\n")


def _json(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


class _Bar(NamedTuple):
    """A bar on a thread, with its start and end in nanoseconds."""

    thread: Thread
    start: int
    end: int


#: By step, stage, type and microbatch.
_Runs: TypeAlias = dict[tuple[int, int, "ComputationType", int | None], _Bar]


class Trace:
    """The events of a timeline."""

    def __init__(self, timeline: Timeline, unit: float = MILLISECOND) -> None:
        self._timeline = timeline
        self._scale = unit * _NANOSECONDS
        length = timeline.makespan * self._scale
        if not (math.isfinite(unit) and unit > 0):
            raise WriteError(f"unit must be a positive number of seconds, got {unit!r}")
        if not (0.5 <= length <= _LONGEST or timeline.makespan == 0):
            side = "larger" if length < 1 else "smaller"
            raise WriteError(
                f"{timeline.makespan:g} units of {unit:g} seconds cannot be shown in a trace; choose a {side} unit"
            )
        spans = timeline.spans
        self._runs = [(spans[cell], self._run(spans[cell])) for cell in timeline.step_graph.blocking.tolist()]
        self._sends, self._receives = self._placed_transfers()
        threads = {bar.thread for _, bar in self._runs} | {bar.thread for bar in (*self._sends, *self._receives)}
        threads |= {Thread(rank, subject) for rank in range(timeline.step_graph.ranks) for subject in (COMPUTE, IDLE)}
        # Readers treat a thread with the number of its process as the main thread.
        self._number = dict(zip(sorted(threads), count(timeline.step_graph.ranks + 1), strict=False))

    def events(self) -> Iterator[Event]:
        """Yield all events: names first, then what they name, and an arrow after what it connects."""
        yield from self._names()
        yield from self._actions()
        yield from self._idle()
        for transfer, send, receive in zip(self._timeline.transfers, self._sends, self._receives, strict=True):
            way = {"step": transfer.step, "from": transfer.source, "to": transfer.target}
            for bar, action, category in ((send, transfer.action, "send"), (receive, _receive_of(transfer), "receive")):
                yield self._complete(bar, str(action), category, {**_action_facts(action), **way})
        yield from self._arrows()
        yield from self._memory()

    def _run(self, span: Span) -> _Bar:
        """Return the bar of an action. If it takes no time, it is on a separate thread, or readers would nest it."""
        start, end = self._time(span.start), self._time(span.end)
        return _Bar(Thread(span.rank, COMPUTE if end > start else INSTANTS), start, end)

    def _placed_transfers(self) -> tuple[list[_Bar], list[_Bar]]:
        """Return the bars of every transfer on the sending and on the receiving rank."""
        transfers = self._timeline.transfers
        times = [(self._time(transfer.start), self._time(transfer.end)) for transfer in transfers]
        pairs: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for place, transfer in enumerate(transfers):
            pairs[transfer.source, transfer.target].append(place)
        number = [0] * len(transfers)
        for places in pairs.values():
            for place, chosen in zip(places, assign_lanes(times[place] for place in places), strict=True):
                number[place] = chosen
        sends, receives = [], []
        for (source, target, *_), time, chosen in zip(transfers, times, number, strict=True):
            sends.append(_Bar(Thread(source, LANE, target, False, chosen), *time))
            receives.append(_Bar(Thread(target, LANE, source, True, chosen), *time))
        return sends, receives

    def _names(self) -> Iterator[Event]:
        for rank in range(self._timeline.step_graph.ranks):
            yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
            yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for thread, number in self._number.items():
            at = {"pid": thread.rank, "tid": number}
            yield {"ph": "M", **at, "name": "thread_name", "args": {"name": str(thread)}}
            yield {"ph": "M", **at, "name": "thread_sort_index", "args": {"sort_index": number}}

    def _actions(self) -> Iterator[Event]:
        waited = self._waited()
        for span, bar in self._runs:
            facts = {**_action_facts(span.action), "step": span.step}
            if causes := waited.get((span.rank, span.start, span.action)):
                facts["waited for"] = causes
            yield self._complete(bar, str(span.action), span.action.computation_type.value, facts)

    def _waited(self) -> dict[tuple[int, float, Action], str]:
        """Return why each action did not start earlier, by rank, start and action."""
        waits: dict[tuple[int, float, Action], str] = {}
        causes: list[str] = []
        for wait, following in pairwise([*self._timeline.waits, None]):
            assert wait is not None
            causes.append(f"{wait.why} ({wait.end - wait.start:g})")
            if following is None or (following.rank, following.start) != (wait.rank, wait.end):
                if wait.before is not None:
                    waits[wait.rank, wait.end, wait.before] = "; ".join(causes)
                causes = []
        return waits

    def _idle(self) -> Iterator[Event]:
        for wait in self._timeline.waits:
            bar = _Bar(Thread(wait.rank, IDLE), self._time(wait.start), self._time(wait.end))
            yield self._complete(bar, wait.cause, "idle", {"why": wait.why})

    def _arrows(self) -> Iterator[Event]:
        """Yield arrows between bars that take time: readers attach the ends of arrows to nothing else."""
        runs = self._runs_by_part()
        transfers = zip(self._timeline.transfers, self._sends, self._receives, strict=True)
        for number, (transfer, send, receive) in enumerate(transfers, start=1):
            through = _ends(runs, transfer, send, receive)
            bars = [bar for bar in through if bar is not None and bar.end > bar.start]
            if len(bars) < 2:
                continue
            for bar, phase in zip(bars, ["s", *"t" * (len(bars) - 2), "f"], strict=True):
                at = self._at(bar.thread, (bar.start + bar.end) // 2)
                binding = {"bp": "e"} if phase == "f" else {}
                yield {"ph": phase, "id": number, "name": "transfer", "cat": "transfer", **at, **binding}

    def _runs_by_part(self) -> _Runs:
        """Return the bar of every action; for a sub-action of an overlap, that of the overlap."""
        return {(span.step, *part[:3]): bar for span, bar in self._runs for part in span.action.parts}

    def _memory(self) -> Iterator[Event]:
        for rank, curve in enumerate(self._timeline.memory):
            for time, value in zip(curve.times.tolist(), curve.values.tolist(), strict=True):
                at = {"pid": rank, "ts": self._time(time) / 1000}
                yield {"ph": "C", "name": "memory", **at, "args": {"held": value}}

    def _complete(self, bar: _Bar, name: str, category: str, facts: Event) -> Event:
        at = self._at(bar.thread, bar.start)
        return {"ph": "X", "name": name, "cat": category, **at, "dur": (bar.end - bar.start) / 1000, "args": facts}

    def _at(self, thread: Thread, time: int) -> Event:
        return {"pid": thread.rank, "tid": self._number[thread], "ts": time / 1000}

    def _time(self, time: float) -> int:
        """Convert to whole nanoseconds, so that adjacent bars stay adjacent."""
        return round(time * self._scale)


def _ends(runs: _Runs, transfer: Transfer, *between: _Bar) -> Iterator[_Bar | None]:
    """Yield the bar that produces the tensor, the bars between, and the bar that needs it."""
    stage, kind, microbatch = transfer.action[:3]
    route, other = _ROUTE[kind], _other_stage(transfer)
    makers = (runs.get((transfer.step, stage, maker, microbatch)) for maker in route.made_by)
    users = (runs.get((transfer.step, other, user, microbatch)) for user in route.needed_by)
    yield next(filter(None, makers), None)
    yield from between
    yield next(filter(None, users), None)


def _action_facts(action: Action) -> Event:
    if action.sub_actions is not None:
        return {"type": action.computation_type.value, "parts": [_action_facts(part) for part in action.sub_actions]}
    facts = {"stage": action.stage_index, "type": action.computation_type.value, "microbatch": action.microbatch_index}
    facts["peer stage"] = action.peer_index
    return {name: value for name, value in facts.items() if value is not None}


def _receive_of(transfer: Transfer) -> Action:
    stage, kind, microbatch = transfer.action[:3]
    peer = None if transfer.action.peer_index is None else stage
    return Action(_other_stage(transfer), _ROUTE[kind].receive, microbatch, peer_index=peer)


def _other_stage(transfer: Transfer) -> int:
    """Return the stage that receives."""
    action = transfer.action
    offset = _ROUTE[action.computation_type].stage_offset
    return action.stage_index + offset if action.peer_index is None else action.peer_index


WRITERS[".json"] = write_trace
