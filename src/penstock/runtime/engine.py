"""The autograd engine, called for edges of the graph.

``torch.autograd.backward`` and ``grad`` check every root in Python, which for an edge takes longer than many a small
node. The engine makes the same checks itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import GradientEdge

_run = torch.autograd.Variable._execution_engine.run_backward


def accumulate(roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """Run a backward from the roots; gradients are added to ``.grad`` of every leaf that is reached."""
    _run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients_at(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], wanted: Sequence[GradientEdge | torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Run as much of a backward as leads to the wanted edges or leaves; what flows there, None where nothing does."""
    found: tuple[torch.Tensor | None, ...] = _run(
        tuple(roots), tuple(gradients), False, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
    )
    return found
