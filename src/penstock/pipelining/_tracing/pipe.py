"""A model that was traced and cut into stages."""

from __future__ import annotations

import copy
import hashlib
import logging
import operator
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import Enum
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import torch
from torch import fx

from penstock.errors import SplitError, TraceError
from penstock.execution.ties import Tie
from penstock.models.origin import identify_values
from penstock.models.tracing.devices import move_operations
from penstock.models.tracing.exporting import export_model
from penstock.models.tracing.native import native_stage
from penstock.models.tracing.stages import RETURNS, make_stages
from penstock.models.tracing.wiring import Wiring, read_wiring
from penstock.pipelining._backward import _null_coalesce_accumulate, stage_backward
from penstock.pipelining._engine.replicas import sum_now
from penstock.pipelining._stage.traced import _PipelineStage
from penstock.pipelining._tracing.executor import DetachExecutor
from penstock.pipelining._tracing.loss import _find_loss_output, _insert_stage_symbolic_backward
from penstock.pipelining._utils import PipeInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed import ProcessGroup
    from torch.export import ExportedProgram

    from penstock.ir.edges import Edge
    from penstock.ir.placement import Placement

logger = logging.getLogger("penstock.pipelining._IR")

PP_SUBMOD_PREFIX = "submod_pp"

#: What the graph that calls the stages consists of, beside the calls.
_FUNCTIONS: Final = (operator.getitem, stage_backward, _null_coalesce_accumulate)


class MultiUseParameterConfig(Enum):
    """What becomes of a parameter that several stages use."""

    TRANSMIT = 1
    REPLICATE = 2


MultiUseParamSpec: TypeAlias = MultiUseParameterConfig | dict[str, MultiUseParameterConfig]


def get_submod_name(stage_idx: int) -> str:
    """The name of a stage's module in a traced model.

    >>> get_submod_name(2)
    'submod_pp_2'
    """
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


@dataclass(slots=True)
class TiedPipeInfo(PipeInfo):
    """What a stage needs to know of the whole, with the parameters that are in several stages.

    Attributes:
        ties: the parameters of which several stages have a copy, and whose gradients a schedule sums.
    """

    ties: tuple[Tie, ...] = ()


class Pipe(torch.nn.Module):
    """A traced model: one module per stage, and a graph that calls them in turn.

    Called, it runs all stages on this process and returns the outputs of the model, flat, in a tuple.

    Attributes:
        split_gm: holds the modules of the stages, and the graph that calls them.
        num_stages: how many there are.
        has_loss_and_backward: whether the graph computes the backward, too.
        loss_spec: which output is the loss.
        replicated_params: for each parameter that several stages use, its name in each of them. Every stage has a copy.
        sums_replicas: whether schedules sum the gradients of these copies at the end of each training step, or you do.
            Set it before stages are built, the same for all.
    """

    def __init__(self, split_gm: fx.GraphModule, num_stages: int, has_loss_and_backward: bool, loss_spec: Any) -> None:
        super().__init__()
        for node in split_gm.graph.nodes:
            is_known = node.op in ("call_module", "placeholder", "output") or node.target in _FUNCTIONS
            if not is_known and (node.op, node.target) != ("call_method", "backward"):
                raise AssertionError(f"{node.format_node()} is neither a stage nor between stages")
        self.split_gm = split_gm
        self.executor = DetachExecutor(split_gm)
        self.num_stages = num_stages
        self.has_loss_and_backward = has_loss_and_backward
        self.loss_spec = loss_spec
        self.replicated_params = _replicate(split_gm)
        self.sums_replicas = True
        self._origin = identify_values(split_gm)
        split_gm.forward = _refuse_call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages here, each as if it were on its own: no gradient goes from one to the other."""
        if kwargs:
            bound = self._signature().bind(*args, **kwargs)
            bound.apply_defaults()
            args = tuple(bound.arguments.values())
        return self.executor.run(*args)

    def _signature(self) -> Signature:
        parameters = []
        for node in self.split_gm.graph.nodes:
            if node.op == "placeholder":
                name = str(node.target)
                kinds = {0: Parameter.POSITIONAL_OR_KEYWORD, 1: Parameter.VAR_POSITIONAL, 2: Parameter.VAR_KEYWORD}
                kind = kinds[len(name) - len(name.lstrip("*"))]
                default = node.args[0] if node.args else Parameter.empty
                parameters.append(Parameter(name.lstrip("*"), kind, default=default))
        return Signature(parameters)

    def get_stage_module(self, stage_idx: int) -> torch.nn.Module:
        """The module of a stage."""
        if not 0 <= stage_idx < self.num_stages:
            raise SplitError(f"there is no stage {stage_idx}; the stages are 0 to {self.num_stages - 1}")
        return self.split_gm.get_submodule(get_submod_name(stage_idx))

    @staticmethod
    def _number_and_count_forward_stages(gm: fx.GraphModule) -> int:
        """Write into each call of a stage which one it is, and count them."""
        calls = [
            node for node in gm.graph.nodes if node.op == "call_module" and node.target.startswith(PP_SUBMOD_PREFIX)
        ]
        for node in calls:
            node.meta["stage_idx"] = int(node.target.rpartition("_")[2])
        return len(calls)

    @staticmethod
    def _from_traced(
        mod: torch.nn.Module,
        exported_program: ExportedProgram,
        multi_use_param_spec: MultiUseParamSpec | None = None,  # noqa: ARG004 - each stage has a copy in any case
        output_loss_value_spec: Any = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> Pipe:
        """Cut an exported model at its marks. ``output_loss_value_spec`` is True for the output that is the loss."""
        split = make_stages(mod, exported_program, get_submod_name, split_policy)
        spec = output_loss_value_spec
        if spec is not None:
            loss, output, spec = _find_loss_output(mod, split.graph, spec)
            if loss is None:
                raise TraceError(f"output_loss_value_spec={spec!r} is True for no output, so there is no loss")
            _insert_stage_symbolic_backward(split.graph, loss, output)
            split.recompile()
        count = Pipe._number_and_count_forward_stages(split)
        return Pipe(split, count, output_loss_value_spec is not None, spec)

    def print_readable(self) -> None:
        """Print the code of the stages, and of what calls them."""
        self.split_gm.print_readable()

    @staticmethod
    def _trace_with_export(
        mod: torch.nn.Module, example_args: tuple[Any, ...], example_kwargs: dict[str, Any] | None = None
    ) -> ExportedProgram:
        return export_model(mod, example_args, example_kwargs)

    @staticmethod
    def from_tracing(
        mod: torch.nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> Pipe:
        """Trace a model and cut it at its marks, or where a policy puts some."""
        program = Pipe._trace_with_export(mod, example_args, example_kwargs)
        return Pipe._from_traced(mod, program, MultiUseParameterConfig.REPLICATE, split_policy=split_policy)

    def __str__(self) -> str:
        return str(self.split_gm)

    def __repr__(self) -> str:
        return repr(self.split_gm)

    def info(self) -> TiedPipeInfo:
        """What a stage needs to know of the whole. It does not refer to the modules of other stages."""
        return TiedPipeInfo(self.split_gm.graph, self.num_stages, self.has_loss_and_backward, self.ties)

    def sum_replicated_gradients(self, stages: Iterable[_PipelineStage]) -> None:
        """Sum the gradients of each parameter that several stages use, on all ranks that have a copy.

        A schedule does so at the end of each training step, and this changes nothing after it. It is for stages that
        are run without a schedule, or were built when ``sums_replicas`` was False: then call it on every rank, once,
        before the step of the optimizer.

        Args:
            stages: the stages of this rank.
        """
        sum_now(self.ties, list(stages))

    # What ``penstock.runtime.Pipeline`` reads of a split model, such as a Pipe ---------------------------------------

    loss = None

    @property
    def layout(self) -> tuple[tuple[str, ...], ...]:
        """The modules of each stage: the outermost ones that it calls."""
        return tuple(
            tuple(str(node.target) for node in self._graph_module(index).graph.nodes if node.op == "call_module")
            for index in range(self.num_stages)
        )

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Which values go from which stage to which others; all that the model returns goes to the last."""
        return self._wiring.edges

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The parameters that several stages use."""
        return tuple(
            Tie(tuple((int(stage.rpartition("_")[2]), name) for stage, name in each.items()))
            for each in self.replicated_params
        )

    @property
    def digest(self) -> str:
        """A checksum of what the stages compute, the same on all ranks that have traced the same model."""
        codes = [self._graph_module(index).code for index in range(self.num_stages)]
        return hashlib.sha256("\n".join([*codes, str(self.edges)]).encode()).hexdigest()

    def origin_of(self, stages: Iterable[int]) -> str:  # noqa: ARG002 - all stages are of one model
        """Identify the values that the model had when it was traced."""
        return self._origin

    def stages(self, rank: int, placement: Placement) -> dict[int, torch.nn.Module]:
        """The stages of a rank for ``Pipeline``: they share all tensors with those of ``get_stage_module``."""
        arguments = [node.name for node in self.split_gm.graph.nodes if node.op == "placeholder"]
        returns = self.split_gm.meta.get(RETURNS)
        return {
            index: native_stage(self._graph_module(index), index, self._wiring, arguments, returns)
            for index in placement.stages_of(rank)
        }

    @property
    def _wiring(self) -> Wiring:
        return read_wiring(self.split_gm.graph, with_outputs=True)

    def _graph_module(self, index: int) -> fx.GraphModule:
        module = self.get_stage_module(index)
        if not isinstance(module, fx.GraphModule):
            raise SplitError(f"stage {index} is a {type(module).__name__}, not a traced module")
        return module

    def build_stage(self, stage_index: int, device: torch.device, group: ProcessGroup | None = None) -> _PipelineStage:
        """Build a stage for a schedule, with its module on a device.

        Args:
            stage_index: which stage.
            device: where it runs.
            group: the ranks of the pipeline; all of them by default.
        """
        module = self.get_stage_module(stage_index)
        if isinstance(module, fx.GraphModule):
            move_operations(module, device)
        else:
            logger.warning("stage %s is a %s; operations in it stay on their devices", stage_index, type(module))
        info = self.info() if self.sums_replicas else replace(self.info(), ties=())
        return _PipelineStage(module, stage_index, info, device, group)


def _refuse_call(*args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG001
    raise TraceError("split_gm only holds the stages; call the Pipe itself to run them on this process")


def _replicate(split_gm: fx.GraphModule) -> list[dict[str, str]]:
    """Give each stage a copy of a parameter that several use; returns their names by stage."""
    holders: dict[torch.nn.Parameter, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for stage_name, stage in split_gm.named_children():
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            holders[parameter][stage_name].append(name)
    found = []
    for parameter, stages in holders.items():
        if len(stages) < 2:
            continue
        found.append({stage_name: names[0] for stage_name, names in stages.items()})
        for stage_name, names in stages.items():
            own = copy.deepcopy(parameter)
            for name in names:
                path, _, last = name.rpartition(".")
                setattr(split_gm.get_submodule(stage_name).get_submodule(path), last, own)
    return found
