"""The program of one rank for a step: a flat list of operations, and the loop over it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from penstock.execution.channel import Progress

S = TypeVar("S")
#: Runs an action, given the state of the step.
Operation: TypeAlias = Callable[[S], None]
#: Opens a range that a profiler shows.
Range: TypeAlias = "Callable[[str], AbstractContextManager[object]]"


class Line(NamedTuple, Generic[S]):
    """One entry of a program.

    Attributes:
        operation: what is done; None for an action that needs nothing.
        label: what a profiler and a failure report show; None if there is nothing to show.
        cell: the cell of the row that it belongs to, as a rule an action; None for the last waits of a step.
        position: the place of that cell in the row.
        peer: the rank that it may have to wait for.
        awaits: the text of what it waits for then.
    """

    operation: Operation[S] | None
    label: str | None
    cell: Any
    position: int
    peer: int | None = None
    awaits: str | None = None


class Program(Generic[S]):
    """What one rank does in a step, in order.

    Attributes:
        lines: all of it, including actions that need nothing.
        running: the lines that have an operation; ``Progress.index`` counts these.
    """

    def __init__(self, lines: Sequence[Line[S]]) -> None:
        self.lines = lines
        self.running = [line for line in lines if line.operation is not None]
        self._operations = [line.operation for line in lines if line.operation is not None]
        self._labels = [line.label or "" for line in self.running]
        self._peers = [line.peer for line in self.running]
        self._waits = [line.awaits or line.label or "" for line in self.running]

    def run(self, step: S, progress: Progress, named: Range = torch.profiler.record_function) -> None:
        """Run all of it. If an operation raises, ``progress.index`` stays where it was."""
        progress.enter(self._labels, self._peers, self._waits)
        if torch._C._autograd._profiler_enabled():
            self._run_profiled(step, progress, named)
        else:
            for progress.index, operation in enumerate(self._operations):
                operation(step)
        progress.index = -1

    def line_at(self, progress: Progress) -> Line[S] | None:
        """Get the line that runs, or that raised; None between steps, or if another program runs."""
        return self.running[progress.index] if progress.labels is self._labels and progress.index >= 0 else None

    def _run_profiled(self, step: S, progress: Progress, named: Range) -> None:
        """Run it with a range for each label, which lines in a row share."""
        for label, lines in groupby(self.lines, attrgetter("label")):
            with nullcontext() if label is None else named(label):
                for line in lines:
                    if line.operation is not None:
                        progress.index += 1
                        line.operation(step)
