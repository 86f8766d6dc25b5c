"""Names of tracing: a model that is cut into stages by the software. They are here, but that is not done yet.

A program that only imports them works, and so does a model with ``pipe_split()`` in its forward or with modules of
this file in it, run as it is. What would have to trace raises ``TracingNotYetError``, which says what to use instead.
"""

from __future__ import annotations

import copy
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch

from penstock.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx
    from torch.export import ExportedProgram

logger = logging.getLogger(__name__)

PP_SUBMOD_PREFIX = "submod_pp"


class TracingNotYetError(RunError, NotImplementedError):
    """Something that would have to trace a model was called."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} traces the model, which penstock does not support yet; split the model into one module per stage "
            "yourself and pass each to PipelineStage(module, stage_index, num_stages, device)"
        )


class SplitPoint(Enum):
    """Where a model is cut: before a module runs, or after."""

    BEGINNING = 1
    END = 2


class PipeSplitWrapper:
    """An older home of ``SplitPoint``."""

    SplitPoint = SplitPoint


class MultiUseParameterConfig(Enum):
    """What becomes of a parameter that several stages use."""

    TRANSMIT = 1
    REPLICATE = 2


MultiUseParamSpec: TypeAlias = MultiUseParameterConfig | dict[str, MultiUseParameterConfig]


def pipe_split() -> None:
    """Marks where a model may be cut; nothing happens when the model is run as it is."""


def get_submod_name(stage_idx: int) -> str:
    """The name of a stage's module in a traced model.

    >>> get_submod_name(2)
    'submod_pp_2'
    """
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


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


class LossWrapper(torch.nn.Module):
    """A model and its loss; derive from it and say in ``forward`` how they are connected."""

    def __init__(self, module: torch.nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """For derived classes to write."""
        raise NotImplementedError(
            f"{type(self).__name__} has no forward that connects its model and its loss; write one"
        )


class TrivialLossWrapper(LossWrapper):
    """The loss of what the model makes of one input."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """The loss."""
        return self.loss_fn(self.module(x), targets)


class Pipe(torch.nn.Module):
    """A traced model."""

    def __init__(
        self, split_gm: fx.GraphModule, num_stages: int, has_loss_and_backward: bool, loss_spec: Any
    ) -> NoReturn:
        raise TracingNotYetError("Pipe")

    @staticmethod
    def from_tracing(
        mod: torch.nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> NoReturn:
        """Trace a model and cut it at its marks."""
        raise TracingNotYetError("Pipe.from_tracing()")

    @staticmethod
    def _trace_with_export(
        mod: torch.nn.Module, example_args: tuple[Any, ...], example_kwargs: dict[str, Any] | None = None
    ) -> ExportedProgram:
        raise TracingNotYetError("Pipe")


def annotate_split_points(mod: torch.nn.Module, spec: dict[str, SplitPoint]) -> NoReturn:
    """Mark where a model is cut."""
    raise TracingNotYetError("annotate_split_points()")


def pipeline(
    module: torch.nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> NoReturn:
    """Trace a model and cut it into stages."""
    if split_spec is not None and split_policy is not None:
        raise ValueError("split_spec and split_policy both say where to split; pass only one of them")
    raise TracingNotYetError("pipeline()")
