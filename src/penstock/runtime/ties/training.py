"""Sums the gradients of tied parameters when a step ends, and checks that the parameters stay equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.execution.distributed_tensors import from_local_part, local_part, placed_like
from penstock.runtime.ties.agreement import agree
from penstock.runtime.ties.drift import DriftCheck
from penstock.runtime.ties.exchange import add_in_order, pack, swap_between_holders, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.execution.parameter_names import ParameterPlace
    from penstock.execution.stage import Stage
    from penstock.execution.ties import Tie
    from penstock.runtime.ties.agreement import LocalTie
    from penstock.runtime.ties.given import GivenTie
    from penstock.runtime.transport.protocol import Transport

    #: Gradients, or this rank's shards of them, by where the parameter is.
    Found = Mapping[ParameterPlace, torch.Tensor | None]


class Ties:
    """Keeps tied parameters equal: in every step, all holders get the sum of their gradients.

    A step begins without gradients at tied parameters; earlier ones are set aside and added again when it ends, so that
    only what the step computed is summed. The sum runs over ranks in ascending order, on every holder alike, so the
    results are equal bit by bit.
    """

    def __init__(
        self,
        given: Iterable[GivenTie],
        stages: Mapping[int, Stage],
        rank_of: Sequence[int],
        transport: Transport,
        check_every: int,
    ) -> None:
        """All ranks call it, with the same ties."""
        self._agreement = agree(given, stages, rank_of, transport)
        self._summed = [one for one in self._agreement.local if len(one.ranks) > 1 or len(one.holders) > 1]
        self._drift = DriftCheck(self._summed, check_every)
        self._earlier: dict[ParameterPlace, torch.Tensor | None] = {}

    @property
    def ties(self) -> tuple[Tie, ...]:
        """All ties of the pipeline."""
        return self._agreement.ties

    @property
    def uncounted(self) -> list[torch.nn.Parameter]:
        """The parameters of this rank that count at another holder."""
        return [place.parameter for place in self._agreement.uncounted]

    @property
    def borrowed(self) -> list[torch.nn.Parameter]:
        """Those of them that another rank of this process takes care of."""
        return [place.parameter for place in self._agreement.borrowed]

    def begin_step(self) -> None:
        """Set the gradients of earlier steps aside."""
        self._earlier = {}
        for tie in self._agreement.local:
            tie.check_united()
        for place in self._places():
            self._earlier[place] = place.parameter.grad
            place.parameter.grad = None

    @torch.no_grad()
    def finish_step(self, transport: Transport) -> None:
        """Sum the gradients of the step and add those of earlier ones. All ranks call it."""
        if not self._agreement.ties:
            return
        call, transport.progress.call = transport.progress.call, "step(), at the gradients of tied parameters"
        self._await_all(transport)
        totals = self._totals({place: _gradient(place.parameter) for place in self._places()}, transport, self._drift)
        for place, total in totals.items():
            _set_gradient(place.parameter, self._earlier.pop(place, None), total)
        self._await_all(transport)
        transport.progress.call = call

    @torch.no_grad()
    def add_up(
        self, gradients: dict[torch.nn.Parameter, torch.Tensor | None], transport: Transport
    ) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        """Replace gradients that were found otherwise by their sums over the holders. All ranks call it."""
        places = [place for place in self._places() if place.parameter in gradients]
        found = {place: None if (one := gradients[place.parameter]) is None else one.clone() for place in places}
        totals = self._totals(found, transport, None)
        return gradients | {place.parameter: total for place, total in totals.items()}

    def _places(self) -> list[ParameterPlace]:
        return [place for tie in self._summed for place in tie.holders]

    def _await_all(self, transport: Transport) -> None:
        """Where ranks are threads that share a tensor: wait until all have added to its gradient, or may use it."""
        if self._agreement.has_borrowed:
            transport.exchange(b"")

    def _totals(self, found: Found, transport: Transport, drift: DriftCheck | None) -> Found:
        """Sum gradients over the holders of each tie."""
        mine = [_sum_of_holders(tie, found) for tie in self._summed]
        checks = [()] * len(mine) if drift is None else drift.begin()
        notes = [(pack(gradient), check) for gradient, check in zip(mine, checks, strict=True)]
        received = swap_between_holders(self._summed, notes, transport)
        if drift is not None:
            drift.finish([{rank: check for rank, (_, check) in each.items()} for each in received], transport)
        totals: dict[ParameterPlace, torch.Tensor | None] = {}
        for tie, gradient, others in zip(self._summed, mine, received, strict=True):
            parts = {rank: unpack(value) for rank, (value, _) in others.items()} | {transport.rank: gradient}
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
