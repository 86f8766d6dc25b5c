"""A link between two stages of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.execution.autograd import gradient_edge
from penstock.execution.links import (
    ABSENT,
    Give,
    GiveGradients,
    Take,
    TakeGradients,
    Taken,
    Tensors,
    as_arguments,
    check_unchanged,
    guard,
    keep,
    roots_of,
)
from penstock.execution.value_spec import flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import GradientEdge

    from penstock.execution.step import Step


class LocalLink:
    """A link between two stages of one rank.

    Args:
        stage: the stage that it comes from.
        microbatches: how many microbatches there are.
        modifiable: whether a later stage may modify its inputs in place.
    """

    def __init__(self, stage: int, microbatches: int, *, modifiable: bool = True) -> None:
        self._base = stage * microbatches
        self._modifiable = modifiable

    def give(self, microbatch: int) -> Give:
        """Keep an output for the next stage."""
        key = self._base + microbatch

        def give(step: Step, output: Any) -> Sequence[GradientEdge]:
            if isinstance(output, torch.Tensor):
                step.local_values[key] = keep(output)
                return (gradient_edge(output),) if output.requires_grad else ()
            if output is ABSENT:
                step.local_values[key] = ABSENT, None
                return ()
            leaves, meta = flatten(output, step.kin)
            step.local_values[key] = [keep(leaf) for leaf in leaves], meta
            return roots_of(leaves)

        return give

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""
        key, modifiable = self._base + microbatch, self._modifiable

        def take(step: Step) -> Taken:
            output, about = step.local_values.pop(key)
            if isinstance(output, torch.Tensor):
                check_unchanged(output, about)
                cut = output.detach()
                if output.requires_grad:
                    return (cut,), (cut.requires_grad_(),), None
                return (cut,), (), None
            if output is ABSENT:
                return None
            for leaf, version in output:
                check_unchanged(leaf, version)
            cuts = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf, _ in output]
            watched = guard(about, cuts, modifiable=modifiable)
            return as_arguments(about.unflatten(cuts)), [cut for cut in cuts if cut.requires_grad], watched

        return take

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Keep the gradients of the inputs for the stage before."""
        key = self._base + microbatch

        def give(step: Step, gradients: Sequence[torch.Tensor | None], _inputs: Tensors) -> None:
            step.local_gradients[key] = gradients

        return give

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradients of the outputs."""
        key = self._base + microbatch
        return lambda step: step.local_gradients.pop(key)

    def send(self, microbatch: int) -> None:
        """SEND_F."""

    def receive(self, microbatch: int) -> None:
        """RECV_F."""

    def send_gradients(self, microbatch: int) -> None:
        """SEND_B."""

    def receive_gradients(self, microbatch: int) -> None:
        """RECV_B."""
