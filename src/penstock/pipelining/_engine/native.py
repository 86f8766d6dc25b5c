"""The native operations under the drop-in: links over the user's own group, and ends that leave what torch leaves.

What goes over the wire is what the methods of a stage send, so each rank chooses for itself how it runs.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from penstock.execution.native_operations import NativeOperations
from penstock.execution.stage import Stage
from penstock.execution.step import Step
from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    REDUCE_GRAD,
    SEND_B,
    SHARDING,
    Action,
)
from penstock.pipelining._debug import map_debug_info
from penstock.pipelining._engine.methods import ScaleGradients
from penstock.pipelining._engine.operations import reduction, scaling
from penstock.pipelining._engine.stage_ends import StageInputs, StageLoss
from penstock.pipelining._engine.stage_links import links_of
from penstock.pipelining._schedule.actions import _get_profiler_function_name
from penstock.pipelining._stage.gradients import detach_in_place
from penstock.pipelining._stage.group_channel import GroupChannel

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from penstock.execution.channel import Progress
    from penstock.execution.links import Inbound, LinkEnds, Outbound
    from penstock.pipelining._engine.methods import CallConvention


_BACKWARDS: Final = frozenset({FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, SEND_B, RECV_B})


class NativeStep(Step):
    """The state of a step, with what the ends of the drop-in need.

    Attributes:
        schedule: the schedule that runs.
        return_outputs: whether the outputs are kept.
        loss_kwargs: more arguments of the loss.
        living_losses: losses that the user may have kept.
    """

    __slots__ = ("living_losses", "loss_kwargs", "return_outputs", "schedule")

    def __init__(
        self,
        schedule: Any,
        microbatches: int,
        *,
        args: Sequence[Any],
        kwargs: Sequence[dict[str, Any] | None],
        targets: Any,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        stages: Mapping[int, Any],
        trains: bool,
    ) -> None:
        super().__init__(microbatches, args=args, kwargs=[each or {} for each in kwargs], targets=targets)
        self.schedule = schedule
        self.return_outputs = return_outputs
        self.loss_kwargs = loss_kwargs
        self.living_losses: list[weakref.ref[torch.Tensor]] = []
        self.training_check = cast("Any", _TrainingCheck(stages)) if trains else None

    def detach_losses(self) -> None:
        """Free the graphs of losses that live on, after the last backward."""
        detach_in_place([loss() for loss in self.living_losses])

    @property
    def receives(self) -> list[Any]:
        """The receives that are in flight."""
        arriving = (*self.receiving.values(), *self.receiving_gradients.values())
        return [work for _, pending in arriving for work in (pending if isinstance(pending, list) else [pending])]


class NativeStageOperations(NativeOperations):
    """The native operations of stages, with the reductions and the scaling that the stages' methods do."""

    def __init__(
        self,
        pipeline_stages: Mapping[int, Any],
        inbound: Mapping[int, Inbound],
        outbound: Mapping[int, Outbound],
        links: Mapping[tuple[int, int], LinkEnds],
        *,
        microbatches: int,
        progress: Progress,
        trains: bool,
    ) -> None:
        works = {index: Stage(index, stage.submod, device=stage.device) for index, stage in pipeline_stages.items()}
        super().__init__(works, inbound, outbound, links, microbatches=microbatches, progress=progress)
        self._pipeline_stages = pipeline_stages
        self._trains = trains

    def operation(self, cell: Any) -> Callable[[Any], None] | None:
        """Build the operation of a cell of a row; None if there is nothing to do."""
        if isinstance(cell, ScaleGradients):
            return scaling(self._pipeline_stages[cell.stage_index], self.microbatches) if self._trains else None
        kind = cell.computation_type
        if kind is REDUCE_GRAD:
            return reduction(self._pipeline_stages[cell.stage_index], self.microbatches) if self._trains else None
        if kind in SHARDING or (kind in _BACKWARDS and not self._trains):
            return None
        return super().operation(cell)

    def label(self, cell: Any) -> str:
        """Get what a profiler shows for a cell."""
        return _get_profiler_function_name(cell)


class Native(NamedTuple):
    """What a native program works with.

    Attributes:
        operations: its operations.
        channel: what its links talk through.
        stages: the stages of the rank by index.
        backwards: how many backwards of each stage a step completes.
    """

    operations: NativeStageOperations
    channel: GroupChannel
    stages: Mapping[int, Any]
    backwards: Counter[int]

    @classmethod
    def of(
        cls, row: Sequence[Any], stages: Mapping[int, Any], microbatches: int, *, calls: CallConvention, trains: bool
    ) -> Native:
        """Build the operations of stages for which ``can_run_natively`` holds."""
        channel = GroupChannel()
        links = links_of(stages, microbatches, channel, trains=trains)
        inbound = {
            index: StageInputs(one) if one.is_first else links[index - 1, index] for index, one in stages.items()
        }
        outbound = {
            index: StageLoss(one, calls, trains=trains, split=_split_microbatches(row, index))
            if one.is_last
            else links[index, index + 1]
            for index, one in stages.items()
        }
        operations = NativeStageOperations(
            stages, inbound, outbound, links, microbatches=microbatches, progress=channel.progress, trains=trains
        )
        return cls(operations, channel, stages, _count_backwards(row) if trains else Counter())

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Wrap a step."""
        works = self.operations.stages.values()
        self.channel.open(next(iter(self.stages.values())))
        for work in works:
            work.begin()
        try:
            yield
        finally:
            for work in works:
                work.end()
            self.channel.close()

    def describe_failure(self, step: NativeStep, error: Exception) -> RuntimeError | None:
        """Make the error that the methods of a stage raise for one in its module or backward; None for any other."""
        if step.operands is None or not step.computing:
            return None
        action, values = step.operands
        stage, microbatch = self.stages[action.stage_index], action.microbatch_index or 0
        if action.computation_type is FORWARD:
            failure: RuntimeError = stage._forward_failure(microbatch, values, step.kwargs[microbatch], error)
            return failure
        what = "backward" if action.computation_type is FULL_BACKWARD else "backward input"
        return RuntimeError(
            f"{stage.log_prefix} Failed to run stage {what}: {type(error).__name__}: {error}\n"
            f"Output gradient: {map_debug_info(values)}"
        )


class _TrainingCheck:
    """Checks, as the methods of a stage do, that a step trains what it should.

    Attributes:
        unrooted: the last loss that no backward can begin at, and the outputs that it is of.
    """

    def __init__(self, stages: Mapping[int, Any]) -> None:
        self.unrooted: tuple[Any, tuple[Any, ...]] = None, ()
        self._stages = stages

    def note(self, work: Stage, *, has_inputs: bool) -> None:
        """Note a forward that gave nothing that requires a gradient."""
        stage = self._stages[work.index]
        loss, outputs = self.unrooted if stage.is_last else (None, ())
        self.unrooted = None, ()
        stage._check_trained(loss, outputs, has_inputs)


def _split_microbatches(row: Sequence[Any], stage: int) -> set[int]:
    """Find the microbatches of a stage whose backward is split."""
    parts = (part for cell in row if isinstance(cell, Action) for part in cell.parts)
    return {part.microbatch_index or 0 for part in parts if part[:2] == (stage, BACKWARD_INPUT)}


def _count_backwards(row: Iterable[Any]) -> Counter[int]:
    """Count the backwards of each stage that a row completes."""
    return Counter(
        part.stage_index
        for cell in row
        if isinstance(cell, Action)
        for part in cell.parts
        if part.computation_type in (FULL_BACKWARD, BACKWARD_WEIGHT)
    )
