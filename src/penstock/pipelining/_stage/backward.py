"""Runs a backward of a stage, whole or in halves, with the gradients of its weights in memory of their own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.execution.autograd import needs_gradient, run_backward, unshare_gradients
from penstock.execution.split_backward.split import SplitBackward
from penstock.pipelining._debug import map_debug_info
from penstock.pipelining._stage.forward import StageForward
from penstock.pipelining._stage.gradients import (
    Gradients,
    find_roots,
    kept_gradients,
    nothing,
    pop_input_gradients,
    unseeded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.execution.data_parallel.adapter import BackwardKind

#: The name, in what the first half of a backward leaves, of the second.
WEIGHT_BACKWARD: Final = "weight_backward"


class StageBackward(StageForward):
    """A stage that runs backwards."""

    _split: SplitBackward | None = None
    _without_gradient: list[torch.Tensor] | None = None

    def _backward(
        self, kind: str, beginning: dict[str, Any], last_backward: bool
    ) -> tuple[Gradients, list[dict[str, Any]] | None]:
        if self._is_plain:
            return _BACKWARDS[kind](self, beginning)
        return self.backward_maybe_with_nosync(kind, beginning, last_backward=last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Gradients, list[dict[str, Any]] | None]:
        """Run a backward; gradients are reduced over replicas in the last one of a step, or after it.

        Args:
            backward_type: ``full``, ``input`` or ``weight``.
            bwd_kwargs: where it begins (``stage_output``, ``output_grads``) and ends (``input_values``), or what the
                first half has left (``param_groups``).
            last_backward: whether it is the last one.

        Returns:
            The gradients of the inputs, and what is left for the weights.
        """
        run = _BACKWARDS.get(backward_type)
        if run is None:
            raise RuntimeError(f"unknown backward_type {backward_type!r}; expected 'full', 'input' or 'weight'")
        if self._parallel is None:
            return run(self, bwd_kwargs)
        return self._parallel.run_backward(
            cast("BackwardKind", backward_type),
            partial(run, self, bwd_kwargs),
            outputs=bwd_kwargs.get("stage_output"),
            last=last_backward,
        )

    def _full_backward(self, beginning: dict[str, Any], *, of_any_size: bool = False) -> tuple[Gradients, None]:
        inputs = beginning["input_values"]
        self._note_missing_gradients()
        try:
            roots, gradients = find_roots(beginning["stage_output"], beginning["output_grads"], of_any_size)
            if roots:
                self._before_whole_backward()
                run_backward(roots, gradients)
        except Exception as error:
            raise self._failure("backward", beginning, error) from error
        self._own_gradients()
        return self._gradients_of(inputs), None

    def _gradients_of(self, inputs: Sequence[Any]) -> Gradients:
        """Get the gradients of inputs after a backward; those of the model's inputs are the user's, and stay there."""
        return kept_gradients(inputs) if self.is_first else pop_input_gradients(inputs)

    def _input_backward(self, beginning: dict[str, Any]) -> tuple[Gradients, list[dict[str, Any]]]:
        inputs = beginning["input_values"]
        wanted = [one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad]
        if not all(one.is_leaf for one in wanted) or not (self._is_plain or self._splits_backward()):
            return self._full_backward(beginning, of_any_size=True)[0], [{WEIGHT_BACKWARD: nothing}]
        self._note_missing_gradients()
        try:
            roots, gradients = find_roots(beginning["stage_output"], beginning["output_grads"], of_any_size=True)
            found, left = self._halved(roots, gradients, wanted)
        except Exception as error:
            raise self._failure("backward input", beginning, error) from error
        self._own_gradients()
        if len(wanted) < len(inputs):
            each = iter(found)
            found = [next(each) if needs_gradient(one) else None for one in inputs]
        return tuple(found), [{WEIGHT_BACKWARD: left}]

    def _splits_backward(self) -> bool:
        return self._parallel is None or self._parallel.splits_backward

    def _halved(
        self,
        roots: Sequence[Any],
        gradients: Sequence[torch.Tensor],
        wanted: list[torch.Tensor],
    ) -> tuple[Sequence[torch.Tensor | None], Callable[[], None]]:
        if not roots:
            return [None] * len(wanted), nothing
        edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
        return self._splitter().input_backward(edges, gradients, wanted)

    def _splitter(self) -> SplitBackward:
        alone = self._parallel is None
        if self._split is None or self._split.adds_in_place != alone:
            self._split = SplitBackward(adds_in_place=alone)
        return self._split

    def _before_whole_backward(self) -> None:
        if self._split is not None:
            self._split.before_whole_backward()

    def _weight_backward(self, rest: dict[str, Any]) -> tuple[Gradients, None]:
        self._note_missing_gradients()
        for left in rest["param_groups"]:
            left.pop(WEIGHT_BACKWARD)()
        self._own_gradients()
        return (), None

    def _note_missing_gradients(self) -> None:
        """Find out, once in a step, which parameters have no gradient yet."""
        if self._without_gradient is None:
            has_parameters = isinstance(self.submod, torch.nn.Module) and not self._has_gradients_in_buckets()
            parameters = self.submod.parameters() if has_parameters else ()
            self._without_gradient = [one for one in parameters if one.requires_grad and one.grad is None]

    def _own_gradients(self) -> None:
        if self._without_gradient and not self._has_gradients_in_buckets():
            self._without_gradient = unshare_gradients(self._without_gradient)

    def _has_gradients_in_buckets(self) -> bool:
        return self._parallel is not None and self._parallel.gradients_in_buckets

    def _failure(self, what: str, beginning: Mapping[str, Any], error: Exception) -> RuntimeError:
        info = {name: map_debug_info(value) for name, value in beginning.items()}
        return RuntimeError(
            f"{self.log_prefix} Failed to run stage {what}: {type(error).__name__}: {error}\n"
            f"Stage output: {info['stage_output']}\nOutput gradient: {info['output_grads']}\n"
            f"Input: {info['input_values']}"
        )

    def _loss_failure(self, loss: torch.Tensor, inputs: Sequence[Any]) -> RuntimeError:
        """Describe a backward that would have to begin at several numbers."""
        beginning = {"stage_output": loss, "output_grads": None, "input_values": inputs}
        return self._failure("backward", beginning, unseeded(loss))


_BACKWARDS: Final[dict[str, Callable[[StageBackward, dict[str, Any]], tuple[Gradients, Any]]]] = {
    "full": StageBackward._full_backward,
    "input": StageBackward._input_backward,
    "weight": StageBackward._weight_backward,
}
