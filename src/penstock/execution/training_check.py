"""Finds stages that a step leaves untrained although they have parameters that require gradients."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.errors import StageError

if TYPE_CHECKING:
    from penstock.execution.stage import Stage


class TrainingCheck:
    """Raises in the last forward of a stage if none of its outputs, or losses, required a gradient in this step.

    The unsplit model raises if no loss requires a gradient, and so does this in every step. An earlier stage that is
    cut off is checked in the first step only: it may leave out its layers in a later one, e.g. by stochastic depth.
    """

    __slots__ = ("_cut_inputs", "_is_first", "_last", "_microbatches", "_without")

    def __init__(self, stages: int, microbatches: int, *, is_first_step: bool) -> None:
        self._last = stages - 1
        self._microbatches = microbatches
        self._is_first = is_first_step
        self._without: Counter[int] = Counter()
        self._cut_inputs: set[int] = set()

    def note(self, stage: Stage, *, has_inputs: bool) -> None:
        """Note a forward that gave nothing that requires a gradient; ``has_inputs`` if one of its inputs does."""
        index = stage.index
        self._without[index] += 1
        if has_inputs:
            self._cut_inputs.add(index)
        is_last = index == self._last
        if self._without[index] == self._microbatches and not stage.dw_builder and (is_last or self._is_first):
            self._check(stage, is_last)

    def _check(self, stage: Stage, is_last: bool) -> None:
        index, what = stage.index, "loss" if is_last else "output"
        if any(one.requires_grad for one in stage.module.parameters()):
            raise _cut_off(index, "parameters", what, f"stage {index} is not trained")
        if index in self._cut_inputs:
            raise _cut_off(index, "inputs", what, "the stages before it are not trained")
        if is_last:
            raise StageError(
                f"the step trains nothing: neither the parameters of stage {index}, the last, nor its inputs require a "
                "gradient. Unfreeze parameters, call eval() if you only need losses, or pass Pipeline(..., "
                "allow_untrained=True) if it is intended",
                stage=index,
            )


def _cut_off(index: int, cut: str, what: str, lost: str) -> StageError:
    return StageError(
        f"stage {index} has {cut} that require a gradient, but its {what} does not require one, so {lost}: is it "
        "detached, or computed under no_grad or by reentrant checkpointing of an input that requires no gradient (pass "
        "use_reentrant=False)? Freeze parameters that are not to be trained, or pass Pipeline(..., "
        "allow_untrained=True) if it is intended",
        stage=index,
    )
