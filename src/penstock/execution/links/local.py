"""A link between two stages of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.execution.autograd import gradient_edge
from penstock.execution.links import (
    ABSENT,
    Give,
    GiveGradients,
    Route,
    Take,
    TakeGradients,
    Taken,
    Tensors,
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
        route: which link it is.
        microbatches: how many microbatches there are.
        modifiable: whether a later stage may modify its inputs in place.
    """

    def __init__(self, route: Route, microbatches: int, *, modifiable: bool = True) -> None:
        self.route = route
        self._base = route.number * microbatches
        self._modifiable = modifiable
        #: Whether to watch even a single tensor: no stage is known to modify one, and another may share its memory.
        self._watches = not (modifiable or route.alone)

    def give(self, microbatch: int) -> Give:
        """Keep an output for the target."""
        key, watches = self._base + microbatch, self._watches

        def give(step: Step, output: Any) -> Sequence[GradientEdge]:
            if isinstance(output, torch.Tensor) and not (step.kin or watches):
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
        key, modifiable, route = self._base + microbatch, self._modifiable, self.route

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
            watched = guard(about, cuts, route, modifiable=modifiable)
            return route.as_arguments(about.unflatten(cuts)), [cut for cut in cuts if cut.requires_grad], watched

        return take

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Keep the gradients of the inputs for the stage that they came from."""
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

    def awaits(self, microbatch: int, *, gradients: bool) -> None:
        """Nothing comes from another rank."""
