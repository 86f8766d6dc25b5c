"""Steps with a clock: how long every action takes, and what a rank does with its time.

What is measured is turned into ``Costs``, with which any schedule of these stages can be simulated; and into the
figures that a simulation predicts, so that the two can be put side by side.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
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
from penstock.simulation.costs import Costs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from penstock.execution.native import Workplace
    from penstock.execution.program import Program
    from penstock.execution.step import Operation, Step
    from penstock.execution.transport import Pending
    from penstock.ir.actions import Action, ComputationType
    from penstock.runtime.custom_functions import CustomFunction
    from penstock.runtime.pipeline import Pipeline
    from penstock.runtime.program_cache import Programs
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
    """An action that has run on this rank.

    Attributes:
        action: the action; the parts of an overlap each for themselves.
        begin: when it began, in seconds after the step did.
        end: when it ended.
        waited: how long of that it waited for a transfer.
    """

    action: Action
    begin: float
    end: float
    waited: float

    @property
    def own(self) -> float:
        """How long it took, without the waiting."""
        return self.end - self.begin - self.waited


class Recording:
    """What ``with pipe.recording() as record:`` gives. The rest is known on every rank when the block has ended.

    All ranks enter and leave it together, and take the same steps in it. Ranks begin each of these steps together, as
    in a simulation. Where actions only start work on a device, it is waited for: so recorded steps take longer there.

    Times are in seconds. Those of a step are those of the one that took the median time, all of the same one.

    Attributes:
        steps: of each step, every action of this rank with its times, in order.
        makespan: how long the step took, from the beginning to the end of the last rank.
        busy: how long each rank was busy with actions of its own.
        ends: when each rank had run its last action.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self.steps: list[list[TimedAction]] = []
        self.makespan = 0.0
        self.busy: tuple[float, ...] = ()
        self.ends: tuple[float, ...] = ()
        self._pipe = pipe
        self._stages = pipe.schedule.stages
        self._before: tuple[Transport, Programs] | None = None
        self._times: dict[str, dict[int, float]] = {}
        self._begun = 0.0
        self._waited = 0.0
        #: Whether an action is to be recorded: a step is under way, and no other action.
        self._open = False
        devices = {stage.device for stage in pipe.stages.values() if stage.device.type != "cpu"}
        self._devices = sorted(devices, key=str)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank was not busy, until the end of the last."""
        return tuple(self.makespan - busy for busy in self.busy)

    def costs(self) -> Costs:
        """What an action of each stage and type took, in seconds: the mean over a step, and of these the median.

        A mean, because what disturbs some actions of a step belongs to it, e.g. ranks that share a core. The two halves
        of a backward that never ran in halves are each taken for one half. Transfers are not among them, a prediction
        takes them for free: give those of tiny stages, where they are much of the step, a ``latency`` of their own.
        """
        if not self._times:
            raise RunError("no step was recorded: call pipe.step inside of the with block, and ask when it has ended")
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

    # While it is under way ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        pipe = self._pipe
        if pipe._record is not None:
            raise RunError("this pipeline is being recorded already")
        self._before = pipe.transport, pipe._programs
        # Programs and edges hold on to the transport: those of a recording are its own, and so is what ranks agree on.
        pipe.transport = cast("Transport", _TimedTransport(pipe.transport, self))
        pipe._programs = pipe._new_programs()
        pipe._record = self
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        assert self._before is not None
        self._pipe.transport, self._pipe._programs = self._before
        self._pipe._programs.forget()  # they know nothing of functions that were registered in the meantime
        self._pipe._record = None
        if kind is None and self.steps:
            self._share()

    def run(self, program: Program[Step], step: Step) -> None:
        """Run a program by the clock."""
        transport = self._pipe.transport
        transport.exchange(b"")
        self.steps.append([])
        self._open = True
        self._begun = time.perf_counter()
        try:
            program.run(step, transport.progress)
        finally:
            self._open = False

    def custom(self, workplace: Workplace, functions: Mapping[ComputationType, CustomFunction]) -> Custom:
        """What makes the operations: each with a clock."""
        return _TimedOperations(self, self._pipe, workplace, functions)

    def timed(self, action: Action, operation: Operation) -> Operation:
        """An operation that takes its own time."""

        def run(step: Step) -> None:
            if not self._open:  # an evaluation; or a function of the user's, all of which is one action
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

    def wait(self, pending: Pending) -> object:
        """Wait by the clock."""
        begin = time.perf_counter()
        try:
            done = pending.wait()
            self.synchronize()
            return done
        finally:
            self._waited += time.perf_counter() - begin

    def synchronize(self) -> None:
        """Wait for what has been started on devices."""
        for device in self._devices:
            torch.accelerator.synchronize(device)

    # Afterwards -----------------------------------------------------------------------------------------------------

    def _share(self) -> None:
        """Let all ranks know the figures of all."""
        self._pipe.transport.progress.call = "recording()"
        found = self._pipe.transport.exchange(json.dumps(self._mine()).encode())
        ranks = [json.loads(data) for data in found]
        if len({len(rank["ends"]) for rank in ranks}) > 1:
            told = ", ".join(f"rank {number}: {len(rank['ends'])}" for number, rank in enumerate(ranks))
            raise RunError(f"every rank must record the same number of steps, but they have recorded {told}")
        lengths = [max(ends) for ends in zip(*(rank["ends"] for rank in ranks), strict=True)]
        typical = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
        self.makespan = lengths[typical]
        self.busy = tuple(rank["busy"][typical] for rank in ranks)
        self.ends = tuple(rank["ends"][typical] for rank in ranks)
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
        }

    def _per_stage(self, field: str) -> list[float]:
        return [max(0.0, self._times[field].get(stage, 0.0)) for stage in range(self._stages)]


class _TimedOperations(Custom):
    """Makes operations that take their own time; an overlap is left to its parts."""

    def __init__(
        self,
        record: Recording,
        pipe: Pipeline,
        workplace: Workplace,
        functions: Mapping[ComputationType, CustomFunction],
    ) -> None:
        super().__init__(pipe, workplace, functions)
        self._record = record

    def default(self, action: Action) -> Operation | None:
        """What the runtime itself does, by the clock."""
        return self._timed(action, super().default(action))

    def operation(self, action: Action) -> Operation | None:
        """What is to be done for an action, by the clock."""
        return self._timed(action, super().operation(action))

    def _timed(self, action: Action, operation: Operation | None) -> Operation | None:
        if operation is None or action.computation_type is OVERLAP_F_B:
            return operation
        return self._record.timed(action, operation)


class _TimedTransfer:
    """A transfer that knows how long it was waited for."""

    __slots__ = ("_pending", "_record")

    def __init__(self, pending: Pending, record: Recording) -> None:
        self._pending = pending
        self._record = record

    def wait(self) -> object:
        """Return when it is done."""
        return self._record.wait(self._pending)


class _TimedTransport:
    """A transport, with a clock at every wait for a transfer."""

    def __init__(self, transport: Transport, record: Recording) -> None:
        self._transport = transport
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send."""
        return self._posted(self._transport.send, tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive."""
        return self._posted(self._transport.receive, tensor, peer, tag)

    def _posted(
        self, post: Callable[[torch.Tensor, int, int], Pending], tensor: torch.Tensor, peer: int, tag: int
    ) -> Pending:
        return _TimedTransfer(post(tensor, peer, tag), self._record)
