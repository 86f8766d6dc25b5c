"""Links between the stages of the drop-in, over the user's own group: one plain tensor each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from penstock.execution.autograd import gradient_edge
from penstock.execution.links import Route, fill_missing, keep
from penstock.execution.links.local import LocalLink
from penstock.execution.links.negotiated import NegotiatedLink
from penstock.execution.links.single_tensor import SingleTensorLink
from penstock.execution.trees import TENSOR
from penstock.execution.value_spec import ValueSpec
from penstock.pipelining._stage.transfers import _normalize_model_output_as_tuple, spec_of, to_wire
from penstock.pipelining._utils import InferenceMode, PipeliningMetadataError, _TensorMeta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.autograd.graph import GradientEdge

    from penstock.execution.links import Give, GiveGradients
    from penstock.execution.step import Step
    from penstock.pipelining._stage.group_channel import GroupChannel


class _Output:
    """What goes over a link from a stage of this rank: one tensor, as the stages agreed before the first step.

    An output may stop to require a gradient; one that starts to is refused, since the next stage sends none.
    """

    def __init__(self, stage: Any, *, trains: bool) -> None:
        self._stage = stage
        self._refuses_gradients = trains and stage._inference_mode == InferenceMode.DYNAMIC

    def only(self, output: Any, microbatch: int) -> torch.Tensor:
        """Get the tensor in what a module returned."""
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


class StageLink(SingleTensorLink):
    """A link between ranks over which one tensor goes, and its gradient comes back."""

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


class StageLinkWithoutGradient(NegotiatedLink):
    """A link between ranks over which one tensor goes, and nothing comes back."""

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


class StageLocalLink(LocalLink):
    """A link between two stages of one rank over which one tensor goes."""

    def __init__(self, output: _Output, route: Route, microbatches: int) -> None:
        super().__init__(route, microbatches)
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


def links_of(
    stages: Mapping[int, Any], microbatches: int, channel: GroupChannel, *, trains: bool
) -> dict[tuple[int, int], Any]:
    """Make the links to and from the stages of a rank, by source and target."""
    touched = {source for index in stages for source in (index - 1, index)}
    last = next(iter(stages.values())).num_stages - 1
    return {
        (source, source + 1): _link(source, stages, microbatches, channel, trains=trains)
        for source in touched
        if 0 <= source < last
    }


def _link(source: int, stages: Mapping[int, Any], microbatches: int, channel: GroupChannel, *, trains: bool) -> Any:
    """Make the link from a stage to the next one, of which one at least is on this rank."""
    if source in stages and source + 1 in stages:
        return StageLocalLink(_Output(stages[source], trains=trains), Route.in_chain(source), microbatches)
    stage = stages[source] if source in stages else stages[source + 1]
    peer = stage.stage_index_to_group_rank[source + 1 if source in stages else source]
    metas = [_value_meta(stage, source in stages, microbatch) for microbatch in range(microbatches)]
    returns = trains and metas[0].requires_grad
    specs = [ValueSpec(TENSOR, (spec_of(meta, requires_grad=returns),)) for meta in metas]
    kind = StageLink if returns else StageLinkWithoutGradient
    return kind(_Output(stage, trains=trains), Route.in_chain(source), channel, peer, torch.device(stage.device), specs)


def _value_meta(stage: Any, is_source: bool, microbatch: int) -> _TensorMeta:
    metas = stage._metas_of(microbatch)
    ((meta,)) = metas.outputs if is_source else metas.inputs
    return cast("_TensorMeta", meta)
