"""Tracing: a model is cut into stages at marks in its forward, at modules, or where a policy says.

::

    pipe = pipeline(model, mb_args=(x,), split_spec={"layers.4": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, device, group)

What cannot be traced raises ``TraceError``. The graph is cut in ``penstock.models.tracing``.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import SplitError
from penstock.models.tracing.devices import move_operations
from penstock.models.tracing.graph_modules import reduce_graph_module, restore_graph_module
from penstock.models.tracing.marks import MARK as aten_pipe_split_alias  # noqa: N811
from penstock.models.tracing.marks import mark as _pipe_split
from penstock.models.tracing.ordering import move_placeholders_to_front
from penstock.models.tracing.serialization import LinearNodeList as _LinearNodeList
from penstock.models.tracing.serialization import NodeReference as _NodeReference
from penstock.models.tracing.split_points import SplitPoint, mark_modules, modules_marked
from penstock.pipelining._backward import _null_coalesce_accumulate, stage_backward
from penstock.pipelining._stage.traced import _PipelineStage
from penstock.pipelining._tracing.executor import DetachExecutor
from penstock.pipelining._tracing.loss import (
    LossWrapper,
    TrivialLossWrapper,
    _find_loss_from_output_and_spec,
    _find_loss_output,
    _insert_stage_symbolic_backward,
)
from penstock.pipelining._tracing.pipe import (
    PP_SUBMOD_PREFIX,
    MultiUseParameterConfig,
    MultiUseParamSpec,
    Pipe,
    get_submod_name,
)
from penstock.pipelining._unflatten import _outline_submodules
from penstock.pipelining._utils import PipeInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

__all__ = [
    "PP_SUBMOD_PREFIX",
    "DetachExecutor",
    "LossWrapper",
    "MultiUseParamSpec",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "SplitPoint",
    "TrivialLossWrapper",
    "_LinearNodeList",
    "_NodeReference",
    "_PipelineStage",
    "_direct_serialization_deserialize",
    "_direct_serialization_reduce",
    "_find_loss_from_output_and_spec",
    "_find_loss_output",
    "_insert_stage_symbolic_backward",
    "_modify_graph_op_device",
    "_move_placeholders_to_front",
    "_null_coalesce_accumulate",
    "_outline_submodules",
    "_pipe_split",
    "_split_after_forward",
    "_split_before_forward",
    "annotate_split_points",
    "aten_pipe_split_alias",
    "get_submod_name",
    "pipe_split",
    "pipeline",
    "stage_backward",
]

logger = logging.getLogger(__name__)


class PipeSplitWrapper:
    """An older home of ``SplitPoint``."""

    SplitPoint = SplitPoint


def pipe_split() -> None:
    """Mark where a model is cut; nothing happens when the model is run as it is."""
    _pipe_split()


class PipeSequential(torch.nn.Sequential):
    """Modules one after the other, with a mark between them."""

    @staticmethod
    def from_sequential(sequential_instance: torch.nn.Sequential) -> PipeSequential:
        """From one without marks; the modules are copied, their parameters shared."""
        return PipeSequential(*[copy.copy(module) for module in sequential_instance])

    def forward(self, input: Any) -> Any:  # noqa: A002 - the name that callers may use
        """Run them."""
        for index, module in enumerate(self):
            if index:
                pipe_split()
            input = module(input)  # noqa: A001
        return input


def annotate_split_points(mod: torch.nn.Module, spec: dict[str, SplitPoint]) -> None:
    """Mark modules of a model by name, before or after they run. ``pipeline`` does so for the time of a trace."""
    mark_modules(mod, spec)


def _split_before_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward with a mark before it."""
    pipe_split()
    return self._orig_forward(*args, **kwargs)


def _split_after_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward with a mark after it."""
    output = self._orig_forward(*args, **kwargs)
    pipe_split()
    return output


def _move_placeholders_to_front(graph: fx.Graph) -> None:
    """Let a graph begin with its placeholders."""
    move_placeholders_to_front(graph)


def _modify_graph_op_device(gm: fx.GraphModule, new_device: torch.device) -> None:
    """Let operations that create tensors create them on a device."""
    move_operations(gm, new_device)


def _direct_serialization_reduce(self: fx.GraphModule) -> tuple[Any, ...]:
    """What pickles a graph module node by node."""
    return reduce_graph_module(self)


def _direct_serialization_deserialize(body: dict[str, Any], nodes: _LinearNodeList) -> fx.GraphModule:
    """Make the module again."""
    return restore_graph_module(body, nodes)


def pipeline(
    module: torch.nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Trace a model and cut it into stages.

    Args:
        module: the model; its own tensors are used, and it is left as it is.
        mb_args: example arguments: those of one microbatch.
        mb_kwargs: example keyword arguments.
        split_spec: the modules to cut at, by name. Without it the model is cut at each ``pipe_split()`` in its forward.
        split_policy: inserts marks into the exported graph.
    """
    if split_spec is not None and split_policy is not None:
        raise SplitError("split_spec and split_policy both say where to split; pass only one of them")
    with modules_marked(module, split_spec or {}):
        return Pipe.from_tracing(module, mb_args, mb_kwargs, split_policy)
