"""A stage that exchanges values with any other stages, not only with its neighbours."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from penstock.pipelining._stage.base import _PipelineStageBase
from penstock.pipelining._stage.transfers import _normalize_model_output_as_tuple
from penstock.pipelining._utils import to_local_if_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed import P2POp

    from penstock.execution.ties import Tie
    from penstock.ir.edges import Edge
    from penstock.models.tracing.wiring import Origin
    from penstock.pipelining._stage.transfers import _RecvInfo

    #: A tensor as it goes over the wire, and the stage that it goes to.
    Outgoing = list[tuple[torch.Tensor, int]]


class LinkedStage(_PipelineStageBase):
    """A stage whose inputs come from some stages, and whose outputs go to some.

    What goes to each other stage, and comes from it, can be posted on its own. An output that several stages use gets
    the sum of their gradients.

    Attributes:
        edges: which values go from which stage to which others, in the whole pipeline.
        origins: for each received input where it comes from.
        ties: the parameters of which several stages have a copy, and whose gradients a schedule sums.
        has_summed_replicas: whether the gradients of these that are there now are such sums.
    """

    edges: tuple[Edge, ...]
    origins: tuple[Origin, ...]
    ties: tuple[Tie, ...] = ()
    has_summed_replicas = False
    _takes_model_arguments = True
    #: What the gradients in ``grad_recv_info`` are those of: outputs by number.
    _gradient_outputs: tuple[int, ...] = ()

    def _begin_empty(self) -> None:
        super()._begin_empty()
        self._outputs_to_send: dict[int, dict[int, Outgoing]] = {}
        self._gradients_to_send: dict[int, dict[int, Outgoing]] = {}

    def clear_runtime_states(self) -> None:
        """Begin a step: forget the one before."""
        super().clear_runtime_states()
        self._outputs_to_send.clear()
        self._gradients_to_send.clear()

    # Over the wire ----------------------------------------------------------------------------------------------------

    def outputs_for(self, microbatch: int, target: int) -> Outgoing:
        """The outputs of a microbatch that go to a stage."""
        if microbatch not in self._outputs_to_send:
            self._outputs_to_send[microbatch] = _by_stage(self._outgoing_tensors(microbatch))
        return self._outputs_to_send[microbatch].pop(target, [])

    def gradients_for(self, microbatch: int, source: int) -> Outgoing:
        """The gradients of a microbatch's inputs that come from a stage; none in an evaluation."""
        if not self.has_backward:
            return []
        if microbatch not in self._gradients_to_send:
            self._gradients_to_send[microbatch] = _by_stage(self._outgoing_gradients(microbatch))
        return self._gradients_to_send[microbatch].pop(source, [])

    def inputs_from(self, microbatch: int, source: int) -> tuple[_RecvInfo, ...]:
        """The inputs of a microbatch that come from a stage, in the order of its outputs, in which it sends them."""
        received = (info for info in self.args_recv_info[microbatch] if not info.is_root_arg)
        found = {
            origin.output: info for origin, info in zip(self.origins, received, strict=True) if origin.stage == source
        }
        return tuple(found[output] for output in sorted(found))

    def gradients_from(self, microbatch: int, target: int) -> tuple[_RecvInfo, ...]:
        """The gradients that come from a stage; none in an evaluation."""
        if not self.has_backward:
            return ()
        return tuple(info for info in self.grad_recv_info[microbatch] if info.source == target)

    def _outgoing_gradients(self, microbatch: int) -> Outgoing:
        """List gradients in the order of the outputs of other stages that they are of, in which these receive them."""
        found = sorted(self._gradients_of_inputs(microbatch), key=lambda each: self.origins[each[0]])
        return [(tensor, stage) for _, tensor, stage in found]

    # On one rank ------------------------------------------------------------------------------------------------------

    def take_outputs(self, source: int, outputs: Sequence[Any], microbatch: int) -> None:
        """Take the outputs of another stage on this rank as inputs."""
        received = (info for info in self.args_recv_info[microbatch] if not info.is_root_arg)
        for info, origin in zip(received, self.origins, strict=True):
            if origin.stage == source:
                info.put(to_local_if_dtensor(outputs[origin.output], detach=True))

    def take_gradients(self, target: LinkedStage, gradients: Sequence[torch.Tensor | None], microbatch: int) -> None:
        """Take the gradients of another stage's inputs as those of outputs."""
        found = {
            origin.output: gradient
            for origin, gradient in zip(target.origins, gradients, strict=True)
            if origin.stage == self.stage_index
        }
        for info, output in zip(self.grad_recv_info[microbatch], self._gradient_outputs, strict=True):
            if info.source != target.stage_index or info.tensor_meta is None:
                continue
            gradient = found[output]
            if gradient is None:
                info.allocate(self.device).zero_()
            else:
                info.put(to_local_if_dtensor(gradient))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the outputs of the stage before, which is on the same rank, as inputs of a microbatch."""
        self.take_outputs(self.stage_index - 1, _normalize_model_output_as_tuple(prev_stage_outputs), mb_index)

    # What the neighbours are to other stages --------------------------------------------------------------------------

    def _is_next_local(self) -> bool:
        """Whether all stages that use the outputs are on this rank, and take them as they are."""
        rank_of = self.stage_index_to_group_rank
        return all(rank_of.get(stage) == self.group_rank for stages in self.act_send_info.values() for stage in stages)

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        """Operations with the neighbours on other ranks, by which connections come up."""
        own = self._resolve_peer_global_rank(self.stage_index)
        return [operation for operation in super()._get_init_p2p_neighbors_ops() if operation.peer != own]

    def _create_grad_send_info(self, args_recv_info: tuple[_RecvInfo, ...]) -> list[int | None]:
        """For every received input the stage that its gradient goes to. Those of the model's arguments stay."""
        return [info.source for info in args_recv_info if not info.is_root_arg]

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor | None, ...]:
        """The gradients of a microbatch's outputs: the sums of those from all stages that use them."""
        found = super()._retrieve_recv_grads(bwd_chunk_id)
        if len(set(self._gradient_outputs)) == len(found):
            return found
        sums: dict[int, torch.Tensor | None] = dict.fromkeys(self._gradient_outputs)
        for output, gradient in zip(self._gradient_outputs, found, strict=True):
            before = sums[output]
            sums[output] = gradient if before is None or gradient is None else before + gradient
        return tuple(sums.values())


def _by_stage(outgoing: Outgoing) -> dict[int, Outgoing]:
    found: dict[int, Outgoing] = defaultdict(list)
    for tensor, stage in outgoing:
        found[stage].append((tensor, stage))
    return found
