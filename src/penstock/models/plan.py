"""Defines what one stage of a split does in each forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.models.record import ARGUMENT, INPUT, Record, Source

if TYPE_CHECKING:
    from penstock.models.edges import Flow


class Plan(NamedTuple):
    """What a stage does in each forward.

    Attributes:
        record: what the probe has found.
        flow: what stages exchange.
        stage: the stage.
        stages: the number of stages.
    """

    record: Record
    flow: Flow
    stage: int
    stages: int

    @property
    def received(self) -> list[Source]:
        """The values that the stage receives, in the order of its arguments."""
        return [v for v, edge in zip(self.flow.values, self.flow.edges, strict=True) if self.stage in edge.targets]

    @property
    def sent(self) -> list[Source]:
        """The values that the stage returns, in order."""
        return [v for v, edge in zip(self.flow.values, self.flow.edges, strict=True) if edge.source == self.stage]

    @property
    def end(self) -> int:
        """The number of the call at whose entry the forward ends."""
        if self.stage == self.stages - 1:
            return len(self.record.calls) + 1
        own = [number + 1 for number, stage in enumerate(self.flow.stages) if stage == self.stage]
        return max(own + [value.call for value in self.sent if value.kind == ARGUMENT], default=0)

    @property
    def unneeded(self) -> frozenset[str]:
        """The keyword arguments that only later stages need, such as labels."""
        if self.stage == self.stages - 1:
            return frozenset()
        # The arguments of the call at which the forward ends are computed, too.
        read = {source.name for call in self.record.calls[: self.end + 1] for source in call.all_feeds}
        later = self.record.calls[self.end + 1 :]
        rest = {source.name for call in later for source in call.all_feeds if source.kind == INPUT}
        rest |= {source.name for source in self.record.result if source.kind == INPUT}
        return frozenset(rest - read) & frozenset(self.record.keywords)
