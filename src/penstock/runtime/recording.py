"""Measures steps: how long every action takes, and how each rank spends its time.

The measurements become ``Costs``, with which any schedule of these stages can be simulated, and a timeline and figures
like those that a simulation predicts, so that the two can be compared.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch

from penstock.errors import RunError
from penstock.execution.stage import device_of
from penstock.ir.actions import OVERLAP_F_B, Action
from penstock.runtime.clocks import Alignment, ClockReading, read_clocks
from penstock.runtime.custom_functions import Custom
from penstock.runtime.link_probe import SMALL, probe_links
from penstock.runtime.sent_messages import SentMessages
from penstock.runtime.timed_transport import TimedTransport
from penstock.runtime.transfer_costs import edge_costs, find_delays, message_sizes, ranks_of
from penstock.simulation.costs import Costs
from penstock.simulation.measured import ActionTimes, measured_timeline
from penstock.simulation.recorded_times import TimedAction, busy_time, fields_of_costs, mean_times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from penstock.execution.channel import Pending, Progress
    from penstock.execution.native_operations import NativeOperations
    from penstock.execution.step import Operation, Step
    from penstock.ir.schedule import Schedule
    from penstock.runtime.engine import Engine, Runnable, StepRecorder
    from penstock.runtime.program_cache import ProgramCache
    from penstock.runtime.transport.protocol import Transport
    from penstock.simulation.timeline import Timeline

#: In how many steps, at most, messages are compared between ranks.
_MOST_STEPS: Final = 32


class Recording:
    """Records the steps inside ``with pipe.recording() as record:``; every rank has the results after the block.

    All ranks enter and leave the block together, and run the same steps in it. They start each step together, as in a
    simulation. Where actions only launch work on a device, the recording synchronizes after each one, so recorded
    steps take longer there.

    Times are in seconds. Those of a step are all of one step, the one of median length.

    Attributes:
        steps: every action of this rank with its times, in order, for each step.
        makespan: how long the step took, from its start to the end of the last rank.
        busy: how long each rank was busy with its own actions.
        ends: when each rank had run its last action.
        bytes_sent: how many bytes each rank sent to others.
        bytes_between: how many bytes each stage sent to each other one, by the two; nothing between stages of one rank.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps: list[list[TimedAction]] = []
        self.makespan = 0.0
        self.busy: tuple[float, ...] = ()
        self.ends: tuple[float, ...] = ()
        self.bytes_sent: tuple[int, ...] = ()
        self.bytes_between: Mapping[tuple[int, int], int] = {}
        self._messages = SentMessages(engine.schedule)
        self._engine = engine
        self._stages = engine.schedule.stages
        self._before: tuple[Transport, ProgramCache, StepRecorder | None] | None = None
        self._times: dict[tuple[str, int], float] = {}
        self._transfers: dict[str, Any] = {}
        #: For each action of each step, how long the rank took to get to it.
        self._starts: list[list[float]] = []
        #: When each step began, and with which schedule.
        self._beginnings: list[tuple[float, Schedule]] = []
        self._clock: ClockReading | None = None
        #: Of the step of median length: its schedule, the times of all ranks, and the error of their clocks.
        self._typical: tuple[Schedule, list[list[ActionTimes]], float] | None = None
        self._begun = 0.0
        self._ended = 0.0
        self._waited = 0.0
        self._ready = 0.0
        #: Whether to record the next action: a step is running, and it is not part of another action.
        self._open = False
        devices = {stage.device for stage in engine.stages.values() if stage.device.type != "cpu"}
        self._devices = sorted(devices, key=str)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank was not busy, up to the end of the last rank."""
        return tuple(self.makespan - busy for busy in self.busy)

    def costs(self) -> Costs:
        """How many seconds an action of each stage and type takes, and how long messages are in flight.

        An action costs what its rank is busy for: the action itself, posting the sends and receives that it needs, and
        starting them; not waiting. It is the median over steps of the mean over a step, because what slows down some
        actions of a step, e.g. a core that ranks or a transport's thread share, is part of that step. If a backward
        only ran whole, I and W get half of it each.

        ``latency`` and ``bandwidth`` are those of messages that a rank waited for, from when they had been posted;
        ``activation_bytes`` and ``gradient_bytes`` are what a microbatch sent. Edges between stages of one rank sent
        nothing; they get the latency of the others.

        Not modelled: what a call of ``step`` does before and after its actions (it splits the batch and merges the
        outputs); how actions slow each other down when ranks share cores or memory bandwidth, beyond what they did
        in these steps; links that messages share.
        """
        if not self._times:
            raise _nothing_recorded("costs")
        given = fields_of_costs(self._times, self._stages)
        return Costs.from_dict({**given, **self._transfers})

    def timeline(self) -> Timeline:
        """What happened, and when: the timeline of the step of median length, in seconds, with all ranks on one clock.

        It is of the same type as a predicted one: draw it, write it, and ask why a rank was idle. Between two actions a
        rank posts transfers and starts the next action: that is idle time with the cause *dispatch*, which the costs
        count as part of an action. ``timeline.measured.clock_error`` is how far the clocks of ranks may be apart.

        Not measured: memory, which is that of the costs; the optimizer; when a message arrived that no rank waited for.
        An OVERLAP_F_B is busy from its first part to its last one, even if it waits between them.
        """
        if self._typical is None:
            raise _nothing_recorded("timeline")
        schedule, ranks, error = self._typical
        return measured_timeline(schedule, ranks, self.costs(), clock_error=error)

    # While recording ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        engine = self._engine
        if isinstance(engine.recording, Recording):
            raise RunError("this pipeline is already being recorded")
        self._before = engine.transport, engine.programs, engine.recording
        # Programs and links refer to the transport, so a recording has its own, and negotiates shapes again.
        engine.transport = cast("Transport", TimedTransport(engine.transport, self))
        engine.programs = engine.new_programs()
        engine.recording = self
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        assert self._before is not None
        engine = self._engine
        engine.transport, engine.programs, engine.recording = self._before
        engine.programs.clear()  # they lack functions that were registered meanwhile
        if kind is None and self.steps:
            self._share()

    def use(self, schedule: Schedule) -> None:
        """Go on with another schedule of the same stages."""
        assert self._before is not None
        transport, programs, trace = self._before
        self._before = transport, programs.for_schedule(schedule), trace
        self._messages.use(schedule)

    def record(self, program: Runnable) -> Runnable:
        """A program that is recorded as one step when it runs."""
        return _TimedProgram(program, self)

    def run(self, program: Runnable, step: Step, progress: Progress) -> None:
        """Run a program, and record its actions as one step."""
        transport = self._engine.transport
        if self._clock is None:
            self._clock = read_clocks(transport, lambda: time.perf_counter())
        transport.exchange(b"")
        self.steps.append([])
        self._starts.append([])
        self._open = True
        try:
            with self._messages.step():
                self._begun = self._ended = time.perf_counter()
                self._beginnings.append((self._begun, self._engine.schedule))
                self._waited = 0.0
                program.run(step, progress)
        finally:
            self._open = False

    def customize(self, operations: NativeOperations) -> Custom:
        """Add the user's functions to the operations of a program, and record the times of all."""
        return _TimedOperations(self, self._engine, operations)

    def timed(self, action: Action, operation: Operation) -> Operation:
        """An operation that records its times."""

        def run(step: Step) -> None:
            if not self._open:  # an evaluation, or within a custom function, which is one action as a whole
                operation(step)
                return
            begin = time.perf_counter()
            held = self._waited
            start = begin - self._ended - held
            self._open, self._waited, self._ready = False, 0.0, begin
            try:
                operation(step)
                self.synchronize()
            finally:
                self._open = True
            self._ended = end = time.perf_counter()
            times = (begin - self._begun, end - self._begun, self._waited, self._ready - self._begun, held)
            self.steps[-1].append(TimedAction(action, *times))
            self._starts[-1].append(start)
            self._waited = 0.0

        return run

    def note_sent(self, tensor: torch.Tensor, tag: int) -> None:
        """Note a tensor that was sent."""
        self._messages.note_sent(tensor, tag, time.perf_counter())

    def wait(self, pending: Pending, tag: int | None) -> object:
        """Wait for a transfer, and record for how long; the tag is that of a receive."""
        begin = time.perf_counter()
        try:
            done = pending.wait()
            self.synchronize()
            return done
        finally:
            self._ready = end = time.perf_counter()
            self._waited += end - begin
            if tag is not None:
                self._messages.note_awaited(tag, begin, end)

    def synchronize(self) -> None:
        """Wait for the work that was launched on devices."""
        for device in self._devices:
            torch.accelerator.synchronize(device)

    # Afterwards -----------------------------------------------------------------------------------------------------

    def _share(self) -> None:
        """Exchange the measurements, so that every rank has those of all."""
        transport = self._engine.transport
        transport.progress.call = "recording()"
        ranks = [json.loads(data) for data in transport.exchange(json.dumps(self._mine()).encode())]
        if len({len(rank["ends"]) for rank in ranks}) > 1:
            counts = ", ".join(f"rank {number}: {len(rank['ends'])}" for number, rank in enumerate(ranks))
            raise RunError(f"all ranks must record the same number of steps, but they recorded {counts}")
        lengths = [max(ends) for ends in zip(*(rank["ends"] for rank in ranks), strict=True)]
        typical = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
        self.makespan = lengths[typical]
        self.busy = tuple(rank["busy"][typical] for rank in ranks)
        self.ends = tuple(rank["ends"][typical] for rank in ranks)
        sent = [rank["sent"][typical] for rank in ranks]
        self.bytes_sent = tuple(sum(size for *_, size in each) for each in sent)
        self.bytes_between = {(source, target): size for source, target, size in sorted(chain.from_iterable(sent))}
        self._times = {(field, stage): taken for rank in ranks for field, stage, taken in rank["times"]}
        sizes = message_sizes(self._engine.schedule, self.bytes_between, self._messages.steps[typical].tags // 2)
        self._transfers = self._transfer_costs(sizes, [rank["messages"] for rank in ranks])
        self._share_times(typical)

    def _share_times(self, typical: int) -> None:
        """Exchange the times of all actions of a step, on the clock of rank 0."""
        assert self._clock is not None
        transport = self._engine.transport
        clocks = Alignment(self._clock, read_clocks(transport, lambda: time.perf_counter()))
        begun, schedule = self._beginnings[typical]
        mine = [
            (
                str(timed.action),
                *(clocks.convert(begun + time) for time in (timed.begin, timed.start, timed.end)),
                timed.held,
            )
            for timed in self.steps[typical]
        ]
        ranks = [json.loads(data) for data in transport.exchange(json.dumps((clocks.error, mine)).encode())]
        times = [[ActionTimes(Action.from_str(text), *times) for text, *times in actions] for _, actions in ranks]
        errors = sorted(error for error, _ in ranks)
        self._typical = schedule, times, sum(errors[-2:])  # two ranks may be wrong in opposite directions

    def _transfer_costs(self, sizes: Mapping[tuple[int, int], tuple[int, int]], ranks: Sequence[Any]) -> dict[str, Any]:
        """Find what transfers cost, given when every rank has sent and awaited messages. All ranks call it."""
        engine = self._engine
        probed: dict[tuple[int, int], list[int]] = {}
        for link in engine.schedule.links:
            first, second = ranks_of(engine.schedule, link)
            if first != second:
                largest = max(2 * SMALL, *sizes[link.source, link.target], *probed.get((first, second), ()))
                probed[first, second] = [SMALL, largest]
        bounces = probe_links(engine.transport, probed, device_of(engine.stages), lambda: time.perf_counter())
        return edge_costs(engine.schedule, sizes, find_delays(engine.schedule, ranks, bounces), bounces)

    def _mine(self) -> dict[str, Any]:
        means: dict[tuple[str, int], list[float]] = defaultdict(list)
        for step, starts in zip(self.steps, self._starts, strict=True):
            for key, taken in mean_times(step, starts).items():
                means[key].append(taken)
        looked_at = self._messages.steps[:: max(1, len(self.steps) // _MOST_STEPS)]
        return {
            "times": [(field, stage, median(each)) for (field, stage), each in means.items()],
            "busy": [busy_time(step, starts) for step, starts in zip(self.steps, self._starts, strict=True)],
            "ends": [max((timed.end for timed in step), default=0.0) for step in self.steps],
            "sent": [[(*ends, size) for ends, size in step.size.items()] for step in self._messages.steps],
            "messages": [(step.tags, step.sent, step.awaited) for step in looked_at],
        }


def _nothing_recorded(what: str) -> RunError:
    return RunError(f"no step was recorded; call pipe.step() inside the with block, and read the {what} after it")


class _TimedOperations(Custom):
    """Makes operations that record their times; of an overlap, its parts do."""

    def __init__(self, record: Recording, engine: Engine, operations: NativeOperations) -> None:
        super().__init__(engine.pipe, operations, engine.custom_functions)
        self._record = record

    def default(self, action: Action) -> Operation | None:
        """What the runtime itself does for an action, timed."""
        return self._timed(action, super().default(action))

    def operation(self, action: Action) -> Operation | None:
        """What to do for an action, timed."""
        return self._timed(action, super().operation(action))

    def _timed(self, action: Action, operation: Operation | None) -> Operation | None:
        if operation is None or action.computation_type is OVERLAP_F_B:
            return operation
        return self._record.timed(action, operation)


class _TimedProgram:
    """A program that is recorded as one step."""

    def __init__(self, program: Runnable, record: Recording) -> None:
        self._program = program
        self._record = record

    def run(self, step: Step, progress: Progress) -> None:
        """Run it, when all ranks are ready."""
        self._record.run(self._program, step, progress)
