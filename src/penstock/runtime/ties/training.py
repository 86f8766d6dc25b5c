"""Keeps the tied parameters of a pipeline equal: agrees on them with the other ranks, and sums their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.execution.tied_parameters.gradients import TiedGradients
from penstock.runtime.ties.agreement import agree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from penstock.execution.stage import Stage
    from penstock.execution.ties import Tie
    from penstock.runtime.ties.given import GivenTie
    from penstock.runtime.transport.protocol import Transport


class Ties:
    """Keeps tied parameters equal: in every step, all holders get the sum of their gradients."""

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
        self._gradients = TiedGradients(self._agreement.local, check_every)

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

    @property
    def has_borrowed(self) -> bool:
        """Whether ranks are threads that share a parameter."""
        return self._agreement.has_borrowed

    def begin_step(self) -> None:
        """Set the gradients of earlier steps aside."""
        for tie in self._agreement.local:
            tie.check_united()
        self._gradients.set_aside()

    def finish_step(self, transport: Transport) -> None:
        """Sum the gradients of the step and add those of earlier ones. All ranks call it."""
        if not self._agreement.ties:
            return
        call, transport.progress.call = transport.progress.call, "step(), at the gradients of tied parameters"
        self._await_all(transport)
        self._gradients.sum_step(transport)
        self._await_all(transport)
        transport.progress.call = call

    def add_up(
        self, gradients: dict[torch.nn.Parameter, torch.Tensor | None], transport: Transport
    ) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        """Replace gradients that were found otherwise by their sums over the holders. All ranks call it."""
        return self._gradients.add_up(gradients, transport)

    def _await_all(self, transport: Transport) -> None:
        """Where ranks are threads that share a tensor: wait until all have added to its gradient, or may use it."""
        if self._agreement.has_borrowed:
            transport.exchange(b"")
