"""Gives all holders of a tie the sum of their gradients, once per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.execution.distributed_tensors import from_local_part, local_part, placed_like
from penstock.execution.tied_parameters.drift import DriftCheck
from penstock.execution.tied_parameters.exchange import add_in_order, pack, swap_between_holders, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.execution.parameter_names import ParameterPlace
    from penstock.execution.tied_parameters.exchange import Exchange
    from penstock.execution.tied_parameters.holders import LocalTie

    #: Gradients, or this rank's shards of them, by where the parameter is.
    Found = Mapping[ParameterPlace, torch.Tensor | None]


class TiedGradients:
    """Sums the gradients of a step over the holders of each tie.

    A step begins without gradients at tied parameters; earlier ones are set aside and added again when it ends, so that
    only what the step computed is summed. The sum runs over ranks in ascending order, on every holder alike, so the
    results are equal bit by bit.
    """

    def __init__(self, ties: Iterable[LocalTie], check_every: int) -> None:
        """Take the ties of this rank, and after how many steps to check that parameters are equal; 0 for never."""
        self.ties = [tie for tie in ties if tie.is_shared]
        self._drift = DriftCheck(self.ties, check_every)
        self._earlier: dict[ParameterPlace, torch.Tensor | None] = {}

    def set_aside(self) -> None:
        """Set the gradients of earlier steps aside."""
        self._earlier = {}
        for place in self._places():
            self._earlier[place] = place.parameter.grad
            place.parameter.grad = None

    def put_back(self) -> None:
        """Add the gradients of earlier steps to those of a step that has failed, which are not summed."""
        for place in self._earlier:
            _set_gradient(place.parameter, self._earlier[place], _gradient(place.parameter))
        self._earlier = {}

    @torch.no_grad()
    def sum_step(self, exchange: Exchange) -> None:
        """Sum the gradients of the step and add those of earlier ones. All ranks that hold a tie call it."""
        totals = self._totals({place: _gradient(place.parameter) for place in self._places()}, exchange, self._drift)
        for place, total in totals.items():
            _set_gradient(place.parameter, self._earlier.pop(place, None), total)

    @torch.no_grad()
    def add_up(
        self, gradients: dict[torch.nn.Parameter, torch.Tensor | None], exchange: Exchange
    ) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        """Replace gradients that were found otherwise by their sums over the holders. All ranks call it."""
        places = [place for place in self._places() if place.parameter in gradients]
        found = {place: None if (one := gradients[place.parameter]) is None else one.clone() for place in places}
        totals = self._totals(found, exchange, None)
        return gradients | {place.parameter: total for place, total in totals.items()}

    def _places(self) -> list[ParameterPlace]:
        return [place for tie in self.ties for place in tie.holders]

    def _totals(self, found: Found, exchange: Exchange, drift: DriftCheck | None) -> Found:
        """Sum gradients over the holders of each tie."""
        mine = [_sum_of_holders(tie, found) for tie in self.ties]
        checks = [()] * len(mine) if drift is None else drift.begin()
        notes = [(pack(gradient), check) for gradient, check in zip(mine, checks, strict=True)]
        received = swap_between_holders(self.ties, notes, exchange)
        if drift is not None:
            drift.finish([{rank: check for rank, (_, check) in each.items()} for each in received], exchange)
        totals: dict[ParameterPlace, torch.Tensor | None] = {}
        for tie, gradient, others in zip(self.ties, mine, received, strict=True):
            parts = {rank: unpack(value) for rank, (value, _) in others.items()} | {exchange.rank: gradient}
            total = add_in_order(parts[rank] for rank in tie.ranks)
            for number, place in enumerate(tie.holders):
                totals[place] = total if number == 0 or total is None else total.to(place.parameter.device, copy=True)
        return totals


def _sum_of_holders(tie: LocalTie, found: Found) -> torch.Tensor | None:
    """Sum what this rank has computed, where the first of its holders is."""
    device = local_part(tie.holders[0].parameter).device
    gradients = [found.get(place) for place in tie.holders]
    return add_in_order(None if one is None else one.to(device) for one in gradients)


def _gradient(parameter: Any) -> torch.Tensor | None:
    """Get the gradient of a parameter, or this rank's shard of it."""
    return None if parameter.grad is None else local_part(placed_like(parameter.grad, parameter))


def _set_gradient(parameter: Any, earlier: Any, total: torch.Tensor | None) -> None:
    """Give a parameter the sum of a step in addition to its earlier gradient."""
    if total is None:
        parameter.grad = earlier
    elif earlier is None:
        parameter.grad = from_local_part(total, parameter)
    elif earlier.layout is torch.strided:
        local_part(earlier).add_(total)
        parameter.grad = earlier
    else:
        parameter.grad = total + earlier if total.layout is torch.strided else earlier + total
