"""The native operations under the drop-in: edges over the user's own group, and ends that leave what torch leaves.

What goes over the wire is what the methods of a stage send, so each rank chooses for itself how it runs.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist

from penstock.execution.autograd import gradient_edge
from penstock.execution.edges import FirstEnd, LastEnd, keep
from penstock.execution.edges import fill_missing as fill_missing
from penstock.execution.edges.local import LocalEdge
from penstock.execution.edges.negotiated import NegotiatedEdge
from penstock.execution.edges.single_tensor import SingleTensorEdge
from penstock.execution.native import NativeOperations
from penstock.execution.stage import Stage
from penstock.execution.step import Step
from penstock.execution.transport import Progress
from penstock.execution.trees import TENSOR
from penstock.execution.value_spec import ValueSpec
from penstock.graph.comm_model import CommModel
from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    SHARDING,
    Action,
)
from penstock.pipelining._debug import map_debug_info
from penstock.pipelining._engine.methods import ScaleGradients
from penstock.pipelining._engine.operations import reduction, scaling
from penstock.pipelining._schedule.actions import _get_profiler_function_name
from penstock.pipelining._stage.compute import flat, kept_gradients
from penstock.pipelining._stage.transfers import _normalize_model_output_as_tuple, gloo_of, spec_of, to_wire
from penstock.pipelining._utils import InferenceMode, PipeliningMetadataError, _derive_grad_metas, _TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch.autograd.graph import GradientEdge

    from penstock.execution.edges import Give, GiveGradients, Inbound, Outbound, Take, TakeGradients
    from penstock.pipelining._engine.methods import CallConvention

_BACKWARDS: Final = frozenset({FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, SEND_B, RECV_B})


class NativeStep(Step):
    """The state of a step, with what the ends of the drop-in need.

    Attributes:
        schedule: the schedule that runs.
        return_outputs: whether the outputs are kept.
        loss_kwargs: more arguments of the loss.
    """

    __slots__ = ("loss_kwargs", "return_outputs", "schedule")

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
        self.training_check = cast("Any", _TrainingCheck(stages)) if trains else None

    @property
    def receives(self) -> list[Any]:
        """The receives that are in flight."""
        arriving = (*self.receiving.values(), *self.receiving_gradients.values())
        return [work for _, pending in arriving for work in (pending if isinstance(pending, list) else [pending])]


class GroupLink:
    """Moves tensors over the group of the stages, as ``dist.isend`` and ``dist.irecv`` do. It is open during a step."""

    def __init__(self, stage: Any) -> None:
        self.model = CommModel("rendezvous", lanes="message")
        self.progress = Progress()
        self._stage = stage
        self._group: Any = None
        self._send: Any = None
        self._receive: Any = None

    def open(self) -> None:
        """Look up the group, and what carries its tensors: a call of the group takes twice as long."""
        self._group = self._stage.group or dist.distributed_c10d._get_default_group()
        carrier = gloo_of(self._group, torch.device(self._stage.device)) or self._group
        self._send, self._receive = carrier.send, carrier.recv

    def close(self) -> None:
        """Let go of the group, which may end before the next step."""
        self._group = self._send = self._receive = None

    def send(self, tensor: torch.Tensor, peer: int, _tag: int) -> Any:
        """Post a send."""
        if tensor.is_complex():
            return dist.isend(tensor, group=self._group, group_dst=peer)
        return self._send([tensor], peer, 0)

    def receive(self, tensor: torch.Tensor, peer: int, _tag: int) -> Any:
        """Post a receive."""
        if tensor.is_complex():
            return dist.irecv(tensor, group=self._group, group_src=peer)
        return self._receive([tensor], peer, 0)


class _Output:
    """What goes over an edge from a stage of this rank: one tensor, as the stages agreed before the first step.

    An output may stop to require a gradient; one that starts to is refused, since the next stage sends none.
    """

    def __init__(self, stage: Any, *, trains: bool) -> None:
        self._stage = stage
        self._refuses_gradients = trains and stage._inference_mode == InferenceMode.DYNAMIC

    def only(self, output: Any, microbatch: int) -> torch.Tensor:
        """The tensor in what a module returned."""
        if type(output) is torch.Tensor:
            return output
        outputs = _normalize_model_output_as_tuple(output)
        if len(outputs) != 1 or not isinstance(outputs[0], torch.Tensor):
            found = ", ".join(type(one).__name__ for one in outputs)
            raise PipeliningMetadataError(f"{self._named(microbatch)} is ({found}), but one tensor was agreed")
        return outputs[0]

    def check(self, tensor: torch.Tensor, microbatch: int, *, returns: bool) -> None:
        """Refuse a tensor that is not what was agreed."""
        (meta,) = self._stage._metas_of(microbatch).outputs
        to_wire(tensor, spec_of(meta), self._named(microbatch))
        if tensor.requires_grad and not returns and self._refuses_gradients:
            raise self._stage._unagreed_gradient(microbatch, 0)

    def _named(self, microbatch: int) -> str:
        return f"stage {self._stage.stage_index} microbatch {microbatch} output 0"


class StageEdge(SingleTensorEdge):
    """An edge between ranks over which one tensor goes, and its gradient comes back."""

    def __init__(self, output: _Output, *given: Any) -> None:
        super().__init__(*given)
        self._output = output

    def give(self, microbatch: int) -> Give:
        """Keep an output for the next stage."""
        key, (spec,), agreed = self._base + microbatch, self._metas[microbatch].tensors, self._output

        def give(step: Step, output: Any) -> Sequence[GradientEdge]:
            tensor = output if type(output) is torch.Tensor else agreed.only(output, microbatch)
            if not spec.matches(tensor, gradients=False):
                agreed.check(tensor, microbatch, returns=True)
            dense = spec.to_layout(tensor)
            step.outgoing[key] = dense, dense._version
            return (gradient_edge(tensor),) if tensor.requires_grad else ()

        return give


class StageEdgeWithoutGradient(NegotiatedEdge):
    """An edge between ranks over which one tensor goes, and nothing comes back."""

    def __init__(self, output: _Output, *given: Any) -> None:
        super().__init__(*given)
        self._output = output

    def give(self, microbatch: int) -> Give:
        """Keep an output for the next stage."""
        key, (spec,), agreed = self._base + microbatch, self._metas[microbatch].tensors, self._output

        def give(step: Step, output: Any) -> Sequence[GradientEdge]:
            tensor = agreed.only(output, microbatch)
            if tensor.requires_grad or not spec.matches(tensor, gradients=False):
                agreed.check(tensor, microbatch, returns=False)
            step.outgoing[key] = [keep(spec.to_layout(tensor))]
            return ()

        return give


class StageLocalEdge(LocalEdge):
    """An edge between two stages of one rank over which one tensor goes."""

    def __init__(self, output: _Output, stage: int, microbatches: int) -> None:
        super().__init__(stage, microbatches)
        self._output = output

    def give(self, microbatch: int) -> Give:
        """Keep an output for the next stage."""
        give, agreed = super().give(microbatch), self._output
        return lambda step, output: give(step, agreed.only(output, microbatch))

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Keep the gradients of the inputs for the stage before; zeros for one that nothing depends on."""
        key = self._base + microbatch

        def give(step: Step, gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]) -> None:
            step.local_gradients[key] = fill_missing(gradients, inputs)

        return give


class StageInputs(FirstEnd):
    """The end of the first stage: the arguments of the step, whose gradients stay with the user's tensors."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""
        return lambda step: (step.args[microbatch], (), None)

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Show the gradients of the arguments in ``bwd_cache``."""
        stage = self._stage

        def give(step: Step, _gradients: object, _inputs: object) -> None:
            stage.bwd_cache[microbatch] = stage._agreed(kept_gradients(flat(step.args[microbatch], {})))

        return give


class StageLoss(LastEnd):
    """The end of the last stage: outputs and losses, where the schedule and the stage keep them.

    Args:
        stage: the last stage.
        calls: how the schedule calls it.
        trains: whether there are backwards.
        split: the microbatches whose backward is split: it may begin at a loss of any size.
    """

    def __init__(self, stage: Any, calls: CallConvention, *, trains: bool, split: Collection[int]) -> None:
        self._stage = stage
        self._calls = calls
        self._trains = trains
        self._split = split

    def give(self, microbatch: int) -> Give:
        """Keep an output, and compute its loss."""
        stage, trains = self._stage, self._trains
        keeps_all, computes_loss, is_only = not self._calls.saves_outputs, self._calls.computes_loss, stage.is_first

        def give(step: Any, output: Any) -> Sequence[GradientEdge]:
            schedule = step.schedule
            if keeps_all or step.return_outputs:
                # The output of an only stage keeps its history in torch.
                stage._keep_output(microbatch, output if is_only or not trains else _detached(output))
            if computes_loss:
                schedule._maybe_compute_loss(stage, output, step.targets, microbatch, step.loss_kwargs)
            return self._root(step, output, microbatch) if trains else ()

        return give

    def _root(self, step: Any, output: Any, microbatch: int) -> Sequence[GradientEdge]:
        schedule = step.schedule
        loss = schedule._maybe_get_loss(self._stage, microbatch)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            step.training_check.unrooted = loss, _normalize_model_output_as_tuple(output)
            return ()
        schedule._replace_loss(microbatch, loss.detach())  # a loss that is kept would keep its graph
        if loss.numel() != 1 and microbatch not in self._split:
            step.seeds[microbatch] = RuntimeError(
                f"the loss must be one number, not a tensor of shape {tuple(loss.shape)}"
            )
        else:
            step.seeds[microbatch] = (torch.ones_like(loss),)
        return (gradient_edge(loss),)

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradient of the loss."""

        def take(step: Step) -> Sequence[torch.Tensor | None]:
            seed: Any = step.seeds.pop(microbatch, ())
            if isinstance(seed, Exception):
                raise seed
            return cast("Sequence[torch.Tensor | None]", seed)

        return take


class NativeStageOperations(NativeOperations):
    """The native operations of stages, with the reductions and the scaling that the stages' methods do."""

    def __init__(
        self,
        pipeline_stages: Mapping[int, Any],
        inbound: Mapping[int, Inbound],
        outbound: Mapping[int, Outbound],
        *,
        microbatches: int,
        progress: Progress,
        trains: bool,
    ) -> None:
        works = {index: Stage(index, stage.submod, device=stage.device) for index, stage in pipeline_stages.items()}
        super().__init__(works, inbound, outbound, microbatches=microbatches, progress=progress)
        self._pipeline_stages = pipeline_stages
        self._trains = trains

    def operation(self, cell: Any) -> Callable[[Any], None] | None:
        """What to do for a cell of a row; None if there is nothing to do."""
        if isinstance(cell, ScaleGradients):
            return scaling(self._pipeline_stages[cell.stage_index], self.microbatches) if self._trains else None
        kind = cell.computation_type
        if kind is REDUCE_GRAD:
            return reduction(self._pipeline_stages[cell.stage_index], self.microbatches) if self._trains else None
        if kind in SHARDING or (kind in _BACKWARDS and not self._trains):
            return None
        return super().operation(cell)

    def label(self, cell: Any) -> str:
        """What a profiler shows for a cell."""
        return _get_profiler_function_name(cell)


class Native(NamedTuple):
    """What a native program works with.

    Attributes:
        operations: its operations.
        link: what its edges talk through.
        stages: the stages of the rank by index.
        backwards: how many backwards of each stage a step completes.
    """

    operations: NativeStageOperations
    link: GroupLink
    stages: Mapping[int, Any]
    backwards: Counter[int]

    @classmethod
    def of(
        cls, row: Sequence[Any], stages: Mapping[int, Any], microbatches: int, *, calls: CallConvention, trains: bool
    ) -> Native:
        """Build the operations of stages for which ``can_run_natively`` holds."""
        link = GroupLink(next(iter(stages.values())))
        edges = _edges(stages, microbatches, link, trains=trains)
        inbound = {index: StageInputs(one) if one.is_first else edges[index - 1] for index, one in stages.items()}
        outbound = {
            index: StageLoss(one, calls, trains=trains, split=_split_microbatches(row, index))
            if one.is_last
            else edges[index]
            for index, one in stages.items()
        }
        operations = NativeStageOperations(
            stages, inbound, outbound, microbatches=microbatches, progress=link.progress, trains=trains
        )
        return cls(operations, link, stages, _count_backwards(row) if trains else Counter())

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Around a step."""
        works = self.operations.stages.values()
        self.link.open()
        for work in works:
            work.begin()
        try:
            yield
        finally:
            for work in works:
                work.end()
            self.link.close()

    def describe_failure(self, step: NativeStep, error: Exception) -> RuntimeError | None:
        """The error that the methods of a stage raise for one in its module or its backward; None for any other."""
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
        """A forward gave nothing that requires a gradient."""
        stage = self._stages[work.index]
        loss, outputs = self.unrooted if stage.is_last else (None, ())
        self.unrooted = None, ()
        stage._check_trained(loss, outputs, has_inputs)


def _edges(stages: Mapping[int, Any], microbatches: int, link: GroupLink, *, trains: bool) -> dict[int, Any]:
    """The edges to and from the stages of a rank, by the stage that they come from."""
    touched = {source for index in stages for source in (index - 1, index)}
    last = next(iter(stages.values())).num_stages - 1
    return {
        source: _edge(source, stages, microbatches, link, trains=trains) for source in touched if 0 <= source < last
    }


def _split_microbatches(row: Sequence[Any], stage: int) -> set[int]:
    """The microbatches of a stage whose backward is split."""
    parts = (part for cell in row if isinstance(cell, Action) for part in cell.parts)
    return {part.microbatch_index or 0 for part in parts if part[:2] == (stage, BACKWARD_INPUT)}


def _edge(source: int, stages: Mapping[int, Any], microbatches: int, link: GroupLink, *, trains: bool) -> Any:
    """The edge from a stage to the next one, of which one at least is on this rank."""
    if source in stages and source + 1 in stages:
        return StageLocalEdge(_Output(stages[source], trains=trains), source, microbatches)
    stage = stages[source] if source in stages else stages[source + 1]
    peer = stage.stage_index_to_group_rank[source + 1 if source in stages else source]
    metas = [_value_meta(stage, source in stages, microbatch) for microbatch in range(microbatches)]
    returns = trains and metas[0].requires_grad
    specs = [ValueSpec(TENSOR, (spec_of(meta, requires_grad=returns),)) for meta in metas]
    kind = StageEdge if returns else StageEdgeWithoutGradient
    return kind(_Output(stage, trains=trains), source, link, peer, torch.device(stage.device), specs)


def _value_meta(stage: Any, is_source: bool, microbatch: int) -> _TensorMeta:
    metas = stage._metas_of(microbatch)
    ((meta,)) = metas.outputs if is_source else metas.inputs
    return cast("_TensorMeta", meta)


def _detached(output: Any) -> Any:
    """An output without its graph, where the methods of a stage cut it off: not in a dict, and not of a view."""
    if isinstance(output, torch.Tensor):
        return output if output.grad_fn is None or output._is_view() else output.detach()
    return type(output)(map(_detached, output)) if type(output) in (tuple, list) else output


# Whether stages can run natively -------------------------------------------------------------------------------------


def can_run_natively(row: Sequence[Action], stages: Mapping[int, Any], microbatches: int, *, trains: bool) -> bool:
    """Whether all that goes between these stages and others is one plain tensor, and a row has all that it needs."""
    return (
        (trains or not torch.is_grad_enabled())  # an evaluation with gradients leaves them in fwd_cache
        and is_self_contained(row, stages, microbatches, trains=trains)
        and all(
            isinstance(stage.submod, torch.nn.Module)
            and _has_plain_inputs(stage, microbatches, trains)
            and _has_plain_outputs(stage, microbatches, trains)
            for stage in stages.values()
        )
    )


def facts_of(stage: Any) -> tuple[Any, ...]:
    """What native operations of a stage are made from, besides the row; they are made again when it has changed."""
    return (
        stage.submod,
        stage._stage_meta,
        stage._other_metas,
        stage._kinds,
        stage._inference_mode,
        stage.stage_index_to_group_rank,
        torch.is_grad_enabled(),
    )


def _has_plain_inputs(stage: Any, microbatches: int, trains: bool) -> bool:
    if stage.is_first:
        return True
    infos = stage.args_recv_info.values()
    return (
        len(infos) == microbatches
        and all(
            len(each) == 1 and not each[0].is_root_arg and each[0].source == stage.stage_index - 1 for each in infos
        )
        and _are_plain(stage, "inputs", "input_grads", microbatches, trains)
    )


def _has_plain_outputs(stage: Any, microbatches: int, trains: bool) -> bool:
    if stage.is_last:
        return True
    return stage.act_send_info == {0: [stage.stage_index + 1]} and _are_plain(
        stage, "outputs", "output_grads", microbatches, trains
    )


def _are_plain(stage: Any, values: str, gradients: str, microbatches: int, trains: bool) -> bool:
    """Whether each microbatch has one value, and the gradient that follows from it."""
    known = [stage._metas_of(microbatch) for microbatch in range(microbatches)]
    metas = [getattr(each, values) for each in known]
    if not all(each is not None and len(each) == 1 and type(each[0]) is _TensorMeta for each in metas):
        return False
    if len({each[0].requires_grad for each in metas}) > 1:
        return False
    return not trains or all(
        (given := getattr(each, gradients)) is not None and _same(given, _derive_grad_metas(value))
        for each, value in zip(known, metas, strict=True)
    )


def _same(given: Sequence[Any], derived: Sequence[Any]) -> bool:
    if len(given) != len(derived):
        return False
    return all(
        (one is None) == (other is None) and (one is None or spec_of(one) == spec_of(other))
        for one, other in zip(given, derived, strict=True)
    )


def is_self_contained(row: Sequence[Action], stages: Mapping[int, Any], microbatches: int, *, trains: bool) -> bool:
    """Whether every action of a row finds what it needs in the row itself, and nothing is left over at its end."""
    place: dict[tuple[Any, ...], int] = {}
    for position, action in enumerate(row):
        for part in action.parts:
            if part[:3] in place or part.stage_index not in stages or part.computation_type is OVERLAP_F_B:
                return False
            if part.computation_type not in SHARDING and part.microbatch_index not in range(microbatches):
                return False
            place[part[:3]] = position
    return all(
        _is_complete(place, stage, microbatch, stages, trains=trains)
        for stage in stages.values()
        for microbatch in range(microbatches)
    )


def _is_complete(
    place: Mapping[tuple[Any, ...], int], stage: Any, microbatch: int, stages: Mapping[int, Any], *, trains: bool
) -> bool:
    index = stage.stage_index

    def are_in_order(*kinds: Any) -> bool:
        found = [place.get((index, kind, microbatch), -1) for kind in kinds]
        return found[0] >= 0 and found == sorted(found)

    before, after = index - 1, index + 1
    receives = [] if stage.is_first or before in stages else [RECV_F]
    sends = [] if stage.is_last or after in stages else [SEND_F]
    if not are_in_order(*receives, FORWARD, *sends):
        return False
    if not trains:
        return True
    gradient_receives = [] if stage.is_last or after in stages else [RECV_B]
    gradient_sends = [] if stage.is_first or before in stages else [SEND_B]
    if are_in_order(FORWARD, FULL_BACKWARD):
        return are_in_order(*gradient_receives, FULL_BACKWARD, *gradient_sends)
    return are_in_order(FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) and are_in_order(
        *gradient_receives, BACKWARD_INPUT, *gradient_sends
    )


def _count_backwards(row: Iterable[Any]) -> Counter[int]:
    """How many backwards of each stage a row completes."""
    return Counter(
        part.stage_index
        for cell in row
        if isinstance(cell, Action)
        for part in cell.parts
        if part.computation_type in (FULL_BACKWARD, BACKWARD_WEIGHT)
    )
