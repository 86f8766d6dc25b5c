"""Measures steps: how long every action takes, and how each rank spends its time.

The measurements become ``Costs``, with which any schedule of these stages can be simulated, and the same figures that
a simulation predicts, so that the two can be compared.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from itertools import chain
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast

import torch

from penstock.errors import RunError
from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    REDUCE_GRAD,
    UNSHARD,
)
from penstock.runtime.custom_functions import Custom
from penstock.runtime.sent_bytes import SentBytes
from penstock.simulation.costs import Costs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from penstock.execution.channel import Pending, Progress
    from penstock.execution.native_operations import NativeOperations
    from penstock.execution.step import Operation, Step
    from penstock.ir.actions import Action, ComputationType
    from penstock.runtime.engine import Engine, Runnable
    from penstock.runtime.program_cache import ProgramCache
    from penstock.runtime.transport.protocol import Transport

#: The field of ``Costs`` for each type of action that a rank is busy with.
FIELDS: Final[Mapping[ComputationType, str]] = {
    FORWARD: "forward",
    FULL_BACKWARD: "backward",
    BACKWARD_INPUT: "backward_input",
    BACKWARD_WEIGHT: "backward_weight",
    UNSHARD: "unshard",
    REDUCE_GRAD: "reduce",
}


class TimedAction(NamedTuple):
    """An action as it ran on this rank.

    Attributes:
        action: the action; the parts of an overlap are separate.
        begin: when it began, in seconds from the start of the step.
        end: when it ended.
        waited: how many of these seconds it waited for transfers.
    """

    action: Action
    begin: float
    end: float
    waited: float

    @property
    def own(self) -> float:
        """How long it took, without waiting for transfers."""
        return self.end - self.begin - self.waited


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
        self._sent = SentBytes(engine.schedule)
        self._engine = engine
        self._stages = engine.schedule.stages
        self._before: tuple[Transport, ProgramCache] | None = None
        self._times: dict[str, dict[int, float]] = {}
        self._begun = 0.0
        self._waited = 0.0
        #: Whether to record the next action: a step is running, and it is not part of another action.
        self._open = False
        devices = {stage.device for stage in engine.stages.values() if stage.device.type != "cpu"}
        self._devices = sorted(devices, key=str)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank was not busy, up to the end of the last rank."""
        return tuple(self.makespan - busy for busy in self.busy)

    def costs(self) -> Costs:
        """How many seconds an action of each stage and type takes: the median over steps of the mean over a step.

        A mean, because what slows down some actions of a step, e.g. a core that ranks share, is part of that step. If a
        backward only ran whole, I and W get half of it each. Transfers are not included, so a prediction takes them as
        free: for tiny stages, where they are much of the step, set ``latency``.
        """
        if not self._times:
            raise RunError("no step was recorded; call pipe.step() inside the with block, and read the costs after it")
        given = {field: self._per_stage(field) for field in FIELDS.values() if self._times.get(field)}
        whole, inputs = given.get("backward"), given.get("backward_input")
        if inputs is None:
            half = [each / 2 for each in whole] if whole is not None else [0.0] * self._stages
            given.update(backward_input=half, backward_weight=half)
        elif whole is not None:
            given["backward"] = [
                self._times["backward"].get(stage, inputs[stage] + given["backward_weight"][stage])
                for stage in range(self._stages)
            ]
        return Costs.from_dict(given)

    # While recording ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        engine = self._engine
        if engine.recording is not None:
            raise RunError("this pipeline is already being recorded")
        self._before = engine.transport, engine.programs
        # Programs and links refer to the transport, so a recording has its own, and negotiates shapes again.
        engine.transport = cast("Transport", _TimedTransport(engine.transport, self))
        engine.programs = engine.new_programs()
        engine.recording = self
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        assert self._before is not None
        engine = self._engine
        engine.transport, engine.programs = self._before
        engine.programs.clear()  # they lack functions that were registered meanwhile
        engine.recording = None
        if kind is None and self.steps:
            self._share()

    def record(self, program: Runnable) -> Runnable:
        """A program that is recorded as one step when it runs."""
        return _TimedProgram(program, self)

    def run(self, program: Runnable, step: Step, progress: Progress) -> None:
        """Run a program, and record its actions as one step."""
        self._engine.transport.exchange(b"")
        self.steps.append([])
        self._open = True
        try:
            with self._sent.step():
                self._begun = time.perf_counter()
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
            self._open, self._waited = False, 0.0
            begin = time.perf_counter()
            try:
                operation(step)
                self.synchronize()
            finally:
                self._open = True
            end = time.perf_counter()
            self.steps[-1].append(TimedAction(action, begin - self._begun, end - self._begun, self._waited))

        return run

    def note_sent(self, tensor: torch.Tensor, tag: int) -> None:
        """Count the bytes of a tensor that is sent."""
        self._sent.note(tensor, tag)

    def wait(self, pending: Pending) -> object:
        """Wait for a transfer, and record for how long."""
        begin = time.perf_counter()
        try:
            done = pending.wait()
            self.synchronize()
            return done
        finally:
            self._waited += time.perf_counter() - begin

    def synchronize(self) -> None:
        """Wait for the work that was launched on devices."""
        for device in self._devices:
            torch.accelerator.synchronize(device)

    # Afterwards -----------------------------------------------------------------------------------------------------

    def _share(self) -> None:
        """Exchange the measurements, so that every rank has those of all."""
        self._engine.transport.progress.call = "recording()"
        found = self._engine.transport.exchange(json.dumps(self._mine()).encode())
        ranks = [json.loads(data) for data in found]
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
        self._times = defaultdict(dict)
        for rank in ranks:
            for field, stage, taken in rank["times"]:
                self._times[field][stage] = taken

    def _mine(self) -> dict[str, Any]:
        working = [[timed for timed in step if timed.action.computation_type in FIELDS] for step in self.steps]
        means: dict[tuple[str, int], list[float]] = defaultdict(list)
        for step in working:
            times: dict[tuple[str, int], list[float]] = defaultdict(list)
            for timed in step:
                times[FIELDS[timed.action.computation_type], timed.action.stage_index].append(timed.own)
            for key, taken in times.items():
                means[key].append(mean(taken))
        return {
            "times": [(field, stage, median(each)) for (field, stage), each in means.items()],
            "busy": [sum(timed.own for timed in step) for step in working],
            "ends": [max((timed.end for timed in step), default=0.0) for step in working],
            "sent": [[(*ends, size) for ends, size in sent.items()] for sent in self._sent.steps],
        }

    def _per_stage(self, field: str) -> list[float]:
        return [max(0.0, self._times[field].get(stage, 0.0)) for stage in range(self._stages)]


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


class _TimedTransfer:
    """A transfer that records how long it was waited for."""

    __slots__ = ("_pending", "_record")

    def __init__(self, pending: Pending, record: Recording) -> None:
        self._pending = pending
        self._record = record

    def wait(self) -> object:
        """Return when it is done."""
        return self._record.wait(self._pending)


class _TimedTransport:
    """A transport that records every wait for a transfer."""

    def __init__(self, transport: Transport, record: Recording) -> None:
        self._transport = transport
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send."""
        self._record.note_sent(tensor, tag)
        return self._post(self._transport.send, tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive."""
        return self._post(self._transport.receive, tensor, peer, tag)

    def _post(
        self, post: Callable[[torch.Tensor, int, int], Pending], tensor: torch.Tensor, peer: int, tag: int
    ) -> Pending:
        return _TimedTransfer(post(tensor, peer, tag), self._record)
