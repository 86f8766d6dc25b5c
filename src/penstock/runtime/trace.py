"""Traces every step of a pipeline at next to no cost: when each action ran, for the last steps.

A trace reads the clock twice per action, and writes into a buffer: no rank waits for another one, no device is
synchronized, and nothing is sent. With a folder the buffer is a file that is mapped into memory: what it holds stays if
the process is killed. ``penstock.simulation.traces`` makes timelines of it.
"""

from __future__ import annotations

import os
from array import array
from mmap import mmap
from pathlib import Path
from secrets import token_hex
from time import perf_counter
from typing import TYPE_CHECKING, Final

from penstock.errors import RunError
from penstock.ir.actions import OVERLAP_F_B
from penstock.runtime.clocks import Alignment, read_clocks
from penstock.runtime.custom_functions import Custom
from penstock.simulation.traces import EACH, HEAD, pack_header, timeline_of, unpack_trace

if TYPE_CHECKING:
    from penstock.execution.channel import Progress
    from penstock.execution.native_operations import NativeOperations
    from penstock.execution.step import Operation, Step
    from penstock.ir.actions import Action
    from penstock.ir.schedule import Schedule
    from penstock.runtime.engine import Engine, Runnable
    from penstock.simulation.timeline import Timeline

#: The folder in which all pipelines keep their traces, if this variable is set. ``penstock run --trace`` sets it.
VARIABLE: Final = "PENSTOCK_TRACE"
#: How many numbers, steps and fewest steps a buffer holds.
_NUMBERS: Final = 1 << 20
_MOST_STEPS: Final = 64
_FEWEST_STEPS: Final = 4
#: Of how many steps ``timeline`` shares the times with the other ranks.
_SHARED_STEPS: Final = 16


def wants_trace(trace: bool | None) -> bool:
    """Return whether a pipeline traces its steps: as it was asked to, or else if there is a folder for all."""
    return bool(os.environ.get(VARIABLE)) if trace is None else bool(trace)


class Trace:
    """The trace of a pipeline on this rank; every rank has one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        transport = engine.transport
        folder = os.environ.get(VARIABLE)
        self._folder = Path(folder) if folder else None
        self._token = transport.exchange(token_hex(4).encode())[0].decode()
        self._clock = read_clocks(transport, perf_counter)
        self._compiled: _Buffer | None = None
        self._buffers: dict[Runnable, _Buffer] = {}
        self._newest: _Buffer | None = None

    def timeline(self) -> Timeline:
        """Return the timeline of the step of median length, of the last steps with the current schedule.

        All ranks call it, between two steps. Its ``costs`` are those of these steps.

        Raises:
            RunError: no step was run.
        """
        transport, newest = self._engine.transport, self._newest
        transport.progress.call = "trace.timeline()"
        clocks = Alignment(self._clock, read_clocks(transport, perf_counter))
        mine = b"" if newest is None else newest.pack(transport.rank, transport.ranks, clocks)
        ranks = transport.exchange(mine)
        if not all(ranks):
            raise RunError("no step was traced; call pipe.step() on all ranks first")
        traces = []
        for data in ranks:
            header, _, numbers = data.partition(b"\n")
            traces.append(unpack_trace(header.decode(), numbers))
        return timeline_of(traces)

    # As a recorder of the engine --------------------------------------------------------------------------------------

    def customize(self, operations: NativeOperations) -> Custom:
        """Add the user's functions to the operations of a program, and trace all."""
        self._compiled = _Buffer(self._engine.schedule)
        return _TracedOperations(self._compiled, self._engine, operations)

    def record(self, program: Runnable) -> Runnable:
        """A program that is traced when it runs."""
        if program not in self._buffers:
            assert self._compiled is not None  # it has been compiled right before
            if self._newest is None or not self._compiled.go_on_from(self._newest):
                self._compiled.allocate(self._path(), self._clock.ahead, self._clock.error, self._engine)
            self._newest = self._compiled
            self._buffers = {program: self._newest}  # programs are replaced, never taken up again
        return _TracedProgram(program, self._buffers[program])

    def use(self, schedule: Schedule) -> None:
        """Go on with another schedule: its program will have its own buffer."""

    def _path(self) -> Path | None:
        if self._folder is None:
            return None
        number = len([*self._folder.glob(f"{self._token}.*-{self._engine.rank}.json")])
        return self._folder / f"{self._token}.{number:04}-{self._engine.rank}.json"


class _Buffer:
    """The times of the last steps of one program."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.actions: list[str] = []
        self.is_open = False
        self._step = 0
        self._slots = 0
        self._waited = 0.0
        self._at = HEAD
        self._times = self._empty = memoryview(b"").cast("d")

    def allocate(self, path: Path | None, ahead: float, error: float, engine: Engine) -> None:
        """Make room for the times of the actions that were compiled, in a file if there is a path."""
        self._stride = HEAD + EACH * len(self.actions)
        self._slots = min(_MOST_STEPS, max(_FEWEST_STEPS, _NUMBERS // self._stride))
        size = 8 * self._stride * self._slots
        self._empty = memoryview(bytes(8 * self._stride)).cast("d")
        if path is None:
            self._times = memoryview(bytearray(size)).cast("d")
            return
        with path.with_suffix(".times").open("wb+") as file:
            file.truncate(size)
            self._times = memoryview(mmap(file.fileno(), size)).cast("d")
        names = (engine.rank, engine.transport.ranks, self.schedule, self.actions, self._slots)
        path.write_text(pack_header(*names, ahead=ahead, error=error))

    def go_on_from(self, other: _Buffer) -> bool:
        """Go on with the numbers of a program of the same schedule, e.g. after a recording; False for another one."""
        if (self.schedule, self.actions) != (other.schedule, other.actions):
            return False
        self._stride, self._slots, self._step = other._stride, other._slots, other._step
        self._times, self._empty = other._times, other._empty
        return True

    def begin(self, waited: float) -> None:
        """Begin a step: it replaces the oldest one. The rank has waited for so many seconds before."""
        self._waited = waited
        first = self._step % self._slots * self._stride
        self._times[first : first + self._stride] = self._empty
        self._step += 1
        self._times[first] = self._step
        self._at = first + HEAD
        self.is_open = True

    def complete(self) -> None:
        """Note that the step has been completed."""
        self._times[self._at - 1] = 1.0

    def traced(self, action: Action, operation: Operation, progress: Progress) -> Operation:
        """An operation that is traced."""
        parts = len(action.parts)
        place = EACH * len(self.actions)
        self.actions += map(str, action.parts)

        def run(step: Step) -> None:
            if not self.is_open:  # not within a step, as when check_parity replays one
                operation(step)
                return
            begin, held = perf_counter(), progress.waited - self._waited
            operation(step)
            end, received, times = perf_counter(), progress.received, self._times
            for at in range(self._at + place, self._at + place + EACH * parts, EACH):
                times[at] = begin
                times[at + 1] = received if received > begin else begin
                times[at + 2] = end
                times[at + 3], held = held, 0.0
            self._waited = progress.waited

        return run

    def pack(self, rank: int, ranks: int, clocks: Alignment) -> bytes:
        """Return the last steps on the clock of rank 0, with a header."""
        last = range(max(0, self._step - min(_SHARED_STEPS, self._slots)), self._step)
        numbers: list[float] = []
        for step in last:
            first = step % self._slots * self._stride
            slot = self._times[first : first + self._stride].tolist()
            numbers += slot[:HEAD]
            for at in range(HEAD, self._stride, EACH):
                ran = slot[at + 2] != 0
                numbers += [clocks.convert(time) if ran else 0.0 for time in slot[at : at + EACH - 1]]
                numbers.append(slot[at + EACH - 1])
        header = pack_header(rank, ranks, self.schedule, self.actions, len(last), ahead=0.0, error=clocks.error)
        return header.encode() + b"\n" + memoryview(array("d", numbers)).cast("B").tobytes()


class _TracedOperations(Custom):
    """Makes operations that are traced; of an overlap its parts are, unless the user runs it."""

    def __init__(self, buffer: _Buffer, engine: Engine, operations: NativeOperations) -> None:
        super().__init__(engine.pipe, operations, engine.custom_functions)
        self._buffer = buffer
        self._progress = operations.progress
        self._is_custom = OVERLAP_F_B in engine.custom_functions

    def operation(self, action: Action) -> Operation | None:
        """What to do for an action, traced."""
        operation = super().operation(action)
        if operation is None or (action.computation_type is OVERLAP_F_B and not self._is_custom):
            return operation
        return self._buffer.traced(action, operation, self._progress)


class _TracedProgram:
    """A program that is traced as one step."""

    def __init__(self, program: Runnable, buffer: _Buffer) -> None:
        self._program = program
        self._buffer = buffer

    def run(self, step: Step, progress: Progress) -> None:
        """Run it."""
        buffer = self._buffer
        buffer.begin(progress.waited)
        try:
            self._program.run(step, progress)
            buffer.complete()
        finally:
            buffer.is_open = False
