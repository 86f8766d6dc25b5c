"""Runs all stages of a traced model on one process, each as if it were on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from penstock.pipelining._backward import stage_backward

if TYPE_CHECKING:
    from collections.abc import Mapping


class DetachExecutor(fx.Interpreter):
    """Runs the graph that calls the stages, and cuts the autograd graph between them.

    Attributes:
        value_remap: for each value that was cut off, the leaf that its stage got instead.
    """

    def __init__(self, module: torch.nn.Module, garbage_collect_values: bool = True) -> None:  # noqa: ARG002
        # Values are kept whatever is asked for: a backward in the graph needs them.
        super().__init__(module, garbage_collect_values=False)
        self.value_remap: dict[torch.Tensor, torch.Tensor] = {}

    def run(self, *args: Any, initial_env: dict[fx.Node, Any] | None = None) -> Any:  # type: ignore[override]
        """Run it."""
        self.value_remap = {}
        return super().run(*args, initial_env=initial_env)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a stage on leaves."""
        return super().call_module(target, map_aggregate(args, self._leaf), map_aggregate(kwargs, self._leaf))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run what is between stages; a backward gets the leaves that its stage got."""
        if target is stage_backward:
            inputs = [self.value_remap.get(value, value) for value in kwargs["input_values"]]
            kwargs = {**kwargs, "input_values": inputs}
        return super().call_function(target, args, dict(kwargs))

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        if value not in self.value_remap:
            self.value_remap[value] = value.detach().requires_grad_()
        return self.value_remap[value]
