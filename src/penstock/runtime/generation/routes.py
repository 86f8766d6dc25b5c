"""Knows where values of stages, and tokens, go while tokens are generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.runtime.wiring import Wiring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.execution.links.fan_out import OutputValues
    from penstock.ir.edges import Link
    from penstock.ir.schedule import Schedule


class Way(NamedTuple):
    """How a value of a microbatch gets to another rank.

    Attributes:
        number: that of the link, or of the rank that gets tokens; the same at both ends.
        microbatch: whose value it is.
        peer: the rank at the other end.
        label: what a rank does that waits for it.
    """

    number: int
    microbatch: int
    peer: int
    label: str


class Routes:
    """Where values go, as one rank sees it.

    Args:
        schedule: says which stages there are, on which ranks, and what they exchange.
        rank: the rank.

    Attributes:
        last: the last stage, whose rank sends tokens to all others.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._wiring = Wiring(schedule)
        self._rank = rank
        self._ranks = schedule.ranks
        self._rank_of = schedule.placement.rank_of
        self._outputs = {stage: self._wiring.outputs(stage) for stage in range(schedule.stages)}
        self._routes = {link: self._wiring.route(link) for link in self._wiring.links}
        self._leaving: dict[tuple[int, int], list[tuple[Way, Link | None]]] = {}
        self.last = schedule.stages - 1

    def is_here(self, stage: int) -> bool:
        """Return whether a stage is on this rank."""
        return self._rank_of[stage] == self._rank

    def into(self, stage: int) -> Sequence[Link]:
        """Return the links that enter a stage."""
        return self._wiring.into(stage)

    def outputs(self, stage: int) -> OutputValues:
        """Return what leaves a stage."""
        return self._outputs[stage]

    def as_arguments(self, link: Link, value: Any) -> tuple[Any, ...]:
        """Return the arguments that the value of a link becomes."""
        return self._routes[link].as_arguments(value)

    def of_link(self, link: Link, microbatch: int) -> Way | None:
        """Return the way of a link from or to this rank; None if both of its ends are here."""
        source, target = self._rank_of[link.source], self._rank_of[link.target]
        if source == target:
            return None
        peer = source if target == self._rank else target
        return Way(self._routes[link].number, microbatch, peer, f"{link.target}RECV_F{microbatch}")

    def of_tokens(self, microbatch: int, target: int | None = None) -> Way:
        """Return the way of tokens: to another rank, or to this one."""
        peer = self._rank_of[self.last] if target is None else target
        number = len(self._routes) + (self._rank if target is None else target)
        return Way(number, microbatch, peer, f"a new token of microbatch {microbatch}")

    def leaving(self, stage: int, microbatch: int) -> list[tuple[Way, Link | None]]:
        """Return the ways from or to this rank that a stage's values take, with their links; None for tokens."""
        key = stage, microbatch
        if key not in self._leaving:
            self._leaving[key] = self._find_leaving(stage, microbatch)
        return self._leaving[key]

    def _find_leaving(self, stage: int, microbatch: int) -> list[tuple[Way, Link | None]]:
        source = self._rank_of[stage]
        if stage == self.last:
            others = [rank for rank in range(self._ranks) if rank != source]
            targets = [None] if source != self._rank else others
            return [(self.of_tokens(microbatch, target), None) for target in targets]
        found: list[tuple[Way, Link | None]] = []
        for link in self._outputs[stage].links:
            if self._rank in (source, self._rank_of[link.target]) and (way := self.of_link(link, microbatch)):
                found.append((way, link))
        return found
