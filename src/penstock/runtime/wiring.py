"""How the stages of a pipeline are connected: which links enter and leave each, and on which ranks they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.execution.links import Route
from penstock.execution.links.fan_out import OutputValues
from penstock.execution.messages import number_links

if TYPE_CHECKING:
    from collections.abc import Container

    from penstock.ir.edges import Link
    from penstock.ir.schedule import Schedule


class Wiring:
    """The links of a schedule.

    Attributes:
        links: all of them, by source and target.
        rank_of: the rank of each stage.
        is_chain: whether each stage passes its output to the next one, and nothing else.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.links = schedule.links
        self.rank_of = schedule.placement.rank_of
        self.is_chain = schedule.is_chain
        self._edges = schedule.edges
        self._numbers = number_links(self.links)
        self._into: dict[int, list[Link]] = {}
        self._from: dict[int, list[Link]] = {}
        for link in self.links:
            self._into.setdefault(link.target, []).append(link)
            self._from.setdefault(link.source, []).append(link)

    def into(self, stage: int) -> list[Link]:
        """The links that enter a stage, by source."""
        return self._into.get(stage, [])

    def outputs(self, stage: int) -> OutputValues:
        """What leaves a stage."""
        return OutputValues(stage, self._edges, self.links)

    def touching(self, stages: Container[int]) -> list[Link]:
        """The links that enter or leave one of these stages."""
        return [link for link in self.links if link.source in stages or link.target in stages]

    def route(self, link: Link) -> Route:
        """Where a link leads, and how its values become arguments."""
        enters_alone = len(self._into[link.target]) == 1
        return Route(
            link.source,
            link.target,
            self._numbers[link.source, link.target],
            spread=enters_alone or len(link.edges) > 1,
            alone=enters_alone and len(self._from[link.source]) == 1,
        )

    def reached_from(self, stages: Container[int]) -> set[int]:
        """These stages, and all that get values with a gradient from one of them, directly or through others."""
        reached: set[int] = set()
        for stage in range(len(self.rank_of)):
            if stage in stages or any(link.gradient and link.source in reached for link in self.into(stage)):
                reached.add(stage)
        return reached
