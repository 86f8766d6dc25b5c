"""Computes and keeps the losses of a step."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class ScheduleLosses:
    """A schedule that computes losses, on the rank of the last stage."""

    _loss_fn: Callable[..., torch.Tensor] | None
    _n_microbatches: int
    _internal_losses: list[torch.Tensor]
    _loss_places: dict[int, int]

    def _maybe_compute_loss(
        self,
        stage: Any,
        output: Any,
        target_mbs: list[Any] | None,
        mb_index: int,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Compute the loss of a microbatch, if the stage is the last and there is a loss function."""
        if self._loss_fn is not None and stage.is_last:
            if target_mbs is None:
                raise TypeError("there is a loss function, but no target; pass target= on the rank of the last stage")
            loss = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)
            self._loss_places[mb_index] = len(self._internal_losses)
            self._internal_losses.append(loss)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        """Get the loss of a microbatch; None if the stage is not the last, or there is no loss function."""
        if self._loss_fn is None or not self._internal_losses or not stage.is_last:
            return None
        place = self._loss_places.get(mb_index, mb_index)
        if not 0 <= place < len(self._internal_losses):
            raise RuntimeError(
                f"the loss of microbatch {mb_index} is missing; there are {len(self._internal_losses)} losses, of "
                f"microbatches {sorted(self._loss_places)}"
            )
        return self._internal_losses[place]

    def _replace_loss(self, mb_index: int, loss: torch.Tensor) -> None:
        self._internal_losses[self._loss_places.get(mb_index, mb_index)] = loss

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """Hand the losses over in the order of the microbatches, and forget them."""
        stages = stages if isinstance(stages, list) else [stages]
        if losses is not None and any(stage.is_last for stage in stages):
            found = self._internal_losses
            if len(found) != self._n_microbatches:
                why = "; the schedule has no loss_fn" if self._loss_fn is None else ""
                raise RuntimeError(f"Expecting {self._n_microbatches} losses but got {len(found)}{why}")
            places = [self._loss_places.get(number, number) for number in range(len(found))]
            losses[:] = [found[place] for place in places]
        self._forget_losses()

    def _forget_losses(self) -> None:
        self._internal_losses.clear()
        self._loss_places.clear()

    def _compute_loss(self, output: Any, target: Any, loss_kwargs: dict[str, Any] | None = None) -> Any:
        return self._loss_fn(output, target, **(loss_kwargs or {}))  # type: ignore[misc]  # asked only if there is one

    def _computes_loss_as_written(self) -> bool:
        return vars(self).keys().isdisjoint(_LOSSES) and _of_losses(type(self)) == _AS_WRITTEN


_LOSSES: Final = ("_maybe_compute_loss", "_maybe_get_loss")
_of_losses: Final = attrgetter(*_LOSSES)
_AS_WRITTEN: Final = _of_losses(ScheduleLosses)
