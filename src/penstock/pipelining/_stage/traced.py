"""Stages of a traced model: what they exchange is in the graph of the pipeline."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from penstock.models.tracing.gradients import can_have_gradient
from penstock.models.tracing.wiring import Origin, Wiring, read_wiring
from penstock.pipelining._stage.links import LinkedStage
from penstock.pipelining._stage.state import logger
from penstock.pipelining._stage.transfers import _RecvInfo
from penstock.pipelining._utils import (
    PipeInfo,
    PipeliningMetadataError,
    TensorMeta,
    _derive_grad_metas,
    _TensorMeta,
    flatten_args,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch.distributed as dist

    from penstock.pipelining._utils import _StageBackwardMeta, _StageForwardMeta


class _PipelineStage(LinkedStage):
    """A stage of a traced model.

    Args:
        stage_module: the graph module of the stage.
        stage_index: which stage it is.
        pipe_info: the graph of the pipeline, which calls the modules of all stages.
        device: where it runs.
        group: the ranks of the pipeline; all of them by default.
    """

    def __init__(
        self,
        stage_module: torch.nn.Module,
        stage_index: int,
        pipe_info: PipeInfo,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(stage_module, stage_index, pipe_info.num_stages, device, group)
        self.pipe_info = pipe_info
        self.ties = getattr(pipe_info, "ties", ())  # that of torch has none
        calls = [node for node in pipe_info.graph.nodes if node.op == "call_module"]
        if len(calls) != self.num_stages:
            raise PipeliningMetadataError(
                f"the graph of the pipeline calls {len(calls)} modules, for {self.num_stages} stages"
            )
        self.node: fx.Node = calls[stage_index]
        self.name = self.node.name
        self.submod_to_stage_index: dict[str, int] = {}
        for index, node in enumerate(calls):
            self.submod_to_stage_index.setdefault(node.name, index)
        wiring = self._wiring()
        self._inputs = wiring.inputs[stage_index]
        self.origins = tuple(value for value in self._inputs if isinstance(value, Origin))
        self.edges = wiring.edges
        inside = _graph_of(stage_module).nodes
        #: Arguments of the model that this stage does not take.
        self._foreign = _placeholders(pipe_info.graph.nodes) - _placeholders(inside)
        logger.info("[%s] stage %s is %s", self.group_rank, stage_index, self.name)
        self._move_submod_to_device()

    def _move_submod_to_device(self) -> None:
        """Move the module; one without values stays where it is."""
        if not any(isinstance(one, FakeTensor) or one.is_meta for one in self.submod.parameters()):
            self.submod.to(self.device)

    def get_stage_index_of_submod(self, submod_name: str) -> int:
        """Find which stage a module of the graph is."""
        if submod_name not in self.submod_to_stage_index:
            known = ", ".join(self.submod_to_stage_index)
            raise PipeliningMetadataError(f"unknown stage {submod_name!r}; the stages are {known}")
        return self.submod_to_stage_index[submod_name]

    def _wiring(self) -> Wiring:
        """What goes between all stages, which every rank knows."""
        try:
            return read_wiring(self.pipe_info.graph, with_outputs=False)
        except KeyError as error:
            raise PipeliningMetadataError(
                f"an input of a stage comes from {error.args[0]}, which is not a stage"
            ) from None

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the module for a microbatch; keyword arguments of the model that it does not take are left out."""
        if self.has_backward:
            self.has_summed_replicas = False
        kept = {name: value for name, value in (kwargs or {}).items() if name not in self._foreign}
        return super().forward_one_chunk(fwd_chunk_id, args, kept, save_forward_output)

    def find_dst_rank(self, user: fx.Node) -> int | None:
        """Find the stage that a user of an output is; None if it is none."""
        return self.get_stage_index_of_submod(user.name) if user.op == "call_module" else None

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: tuple[Any, ...] | _StageForwardMeta | None,
        kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        has_backward: bool = False,  # noqa: ARG002
    ) -> _StageForwardMeta | None:
        for microbatch in range(num_microbatches):
            self.args_recv_info[microbatch] = self._create_act_recv_info()
        infos = self.args_recv_info[0]
        if self.is_first:
            if not isinstance(args, tuple):
                raise AssertionError(f"stage 0 needs the arguments of the model, not {type(args).__name__}")
            infos = infos[: len(args)]  # the rest is passed by keyword
        else:
            infos = tuple(info for info in infos if not info.is_root_arg)
        self._stage_meta.inputs = tuple(info.tensor_meta for info in infos if info.tensor_meta is not None)
        self.act_send_info = self._create_act_send_info()
        return None

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,  # noqa: ARG002
        target: torch.Tensor | None = None,  # noqa: ARG002
        received_grad_meta: _StageBackwardMeta | None = None,  # noqa: ARG002
        loss_kwargs: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> _StageBackwardMeta | None:
        if self._stage_meta.inputs is None:
            raise PipeliningMetadataError(f"stage {self.stage_index}: its inputs are not known yet")
        self._stage_meta.input_grads = _derive_grad_metas(self._stage_meta.inputs)
        self._setup_backward_recv_info(num_microbatches)
        return None

    def _create_act_recv_info(self) -> tuple[_RecvInfo, ...]:
        """Describe the inputs of a microbatch: arguments of the model, and what comes from other stages."""
        graph = _graph_of(self.submod)
        inside = [node for node in graph.nodes if node.op == "placeholder"]
        return tuple(self._received(node, origin) for node, origin in zip(inside, self._inputs, strict=True))

    def _received(self, node: fx.Node, origin: Origin | str) -> _RecvInfo:
        example = node.meta["val"]
        self._refuse_distributed(example, f"input {node.name!r}")
        if isinstance(origin, str):
            meta = _TensorMeta.from_tensor(example)
            return _RecvInfo(f"root_input_{node.name}", None, None, meta, is_root_arg=True)
        name = next(name for name, stage in self.submod_to_stage_index.items() if stage == origin.stage)
        return _RecvInfo(name, origin.stage, None, self._described(node))

    def _described(self, node: fx.Node) -> _TensorMeta:
        """Describe what goes from stage to stage. It was traced without gradients, whatever the training needs."""
        example = node.meta["val"]
        needed = self.has_backward and can_have_gradient(node)
        return _TensorMeta(example.shape, example.stride(), example.dtype, needed)

    def _refuse_distributed(self, example: object, what: str) -> None:
        if isinstance(example, DTensor):
            raise PipeliningMetadataError(
                f"stage {self.stage_index}: {what} is a DTensor, which a traced pipeline cannot send; use PipelineStage"
            )

    def _create_act_send_info(self) -> dict[int, list[Any]]:
        """For every output the stages that it goes to."""
        found: dict[int, list[Any]] = {}
        for user in self.node.users:
            is_item = user.target is operator.getitem
            users = list(user.users) if is_item else [user]
            stages = [stage for stage in map(self.find_dst_rank, users) if stage is not None]
            output: Any = user.args[1] if is_item else 0
            found.setdefault(output, []).extend(stages)
        values = flatten_args(self._get_output_node().args)
        for place, value in enumerate(values):
            self._refuse_distributed(value.meta["val"], f"output {place}")
        self._stage_meta.outputs = tuple(map(self._described, values))
        return found

    def _get_output_node(self) -> fx.Node:
        graph = _graph_of(self.submod)
        nodes = [node for node in graph.nodes if node.op == "output"]
        if len(nodes) != 1:
            raise PipeliningMetadataError(
                f"the graph of stage {self.stage_index} should have one output node, but has {len(nodes)}"
            )
        output: fx.Node = nodes[0]
        return output

    def _create_grad_recv_info(self, act_send_info: dict[int, list[Any]]) -> tuple[_RecvInfo, ...]:
        outputs = self._stage_meta.outputs
        if outputs is None:
            raise PipeliningMetadataError(f"stage {self.stage_index}: its outputs are not known yet")
        infos, numbers, metas = [], [], []
        for output, derived in enumerate(_derive_grad_metas(outputs)):
            stages = act_send_info.get(output, [])
            meta: TensorMeta | None = derived if stages else None
            metas.append(meta)
            for source in stages or [self.stage_index + 1]:
                infos.append(_RecvInfo(f"recv_grad_for_{self.stage_index}_from_{source}", source, None, meta))
                numbers.append(output)
        self._gradient_outputs = tuple(numbers)
        self._stage_meta.output_grads = tuple(metas)
        return tuple(infos)


def _graph_of(module: torch.nn.Module) -> fx.Graph:
    """Return the graph of a module, or of the one that it wraps, as ``DistributedDataParallel`` does."""
    while not hasattr(module, "graph") and isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        module = inner
    graph: fx.Graph = getattr(module, "graph", fx.Graph())
    return graph


def _placeholders(nodes: Iterable[fx.Node]) -> set[str]:
    return {node.name for node in nodes if node.op == "placeholder"}


def build_stage(
    stage_module: torch.nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> _PipelineStage:
    """Build a stage of a traced model; see ``_PipelineStage``."""
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group)
