"""Moves a traced module's operations to another device: a trace holds the device of the example."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

if TYPE_CHECKING:
    import torch


def move_operations(module: fx.GraphModule, device: torch.device) -> None:
    """Let operations that create tensors, e.g. ``torch.ones``, create them on a device, also in modules inside."""
    for inner in module.modules():
        if not isinstance(inner, fx.GraphModule):
            continue
        moved = [
            node
            for node in inner.graph.nodes
            if node.op == "call_function" and node.kwargs.get("device", device) != device
        ]
        for node in moved:
            node.update_kwarg("device", device)
        if moved:
            inner.recompile()
