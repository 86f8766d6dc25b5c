"""Compares a measured timeline with a predicted one: in all, by rank, by the cause of idle time, and by action."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ScheduleError
from penstock.simulation.idle import CAUSES

if TYPE_CHECKING:
    from penstock.ir.actions import Action
    from penstock.simulation.timeline import Timeline


class Row(NamedTuple):
    """A figure of both timelines.

    Attributes:
        name: what it is.
        predicted: its value in the first one.
        measured: its value in the second one.
    """

    name: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float | None:
        """How much more was measured, as a share of what was predicted; None if nothing was predicted."""
        return self.measured / self.predicted - 1 if self.predicted else None


class ActionRow(NamedTuple):
    """An action of both timelines.

    Attributes:
        rank: its rank.
        action: the action.
        predicted: how long it takes in the first one.
        measured: how long in the second one.
        late: how much later it ends there, counted from the start of each.
    """

    rank: int
    action: Action
    predicted: float
    measured: float
    late: float

    @property
    def longer(self) -> float:
        """How much longer it takes in the second one."""
        return self.measured - self.predicted


@dataclass(frozen=True)
class Difference:
    """What differs between two timelines of the same ranks.

    Attributes:
        predicted: the first one.
        measured: the second one.
    """

    predicted: Timeline
    measured: Timeline

    def __post_init__(self) -> None:
        ranks = [timeline.schedule.ranks for timeline in (self.predicted, self.measured)]
        if ranks[0] != ranks[1]:
            raise ScheduleError(
                f"timelines of {ranks[0]} and {ranks[1]} ranks cannot be compared rank by rank; "
                "draw both with penstock view"
            )

    @property
    def totals(self) -> tuple[Row, ...]:
        """Makespan, bubble rate, and what all ranks together are busy and idle."""
        names = {"makespan": "makespan", "bubble": "bubble_rate", "busy": "busy", "idle": "idle"}
        values = [
            [getattr(timeline, field) for timeline in (self.predicted, self.measured)] for field in names.values()
        ]
        summed = [[sum(one) if isinstance(one, tuple) else one for one in pair] for pair in values]
        return tuple(Row(name, *pair) for name, pair in zip(names, summed, strict=True))

    @cached_property
    def ranks(self) -> tuple[tuple[Row, ...], ...]:
        """For each rank: how long it is busy, idle, and idle by cause, for causes that occur."""
        causes = [_idle_of_ranks(timeline) for timeline in (self.predicted, self.measured)]
        found = []
        for rank in range(self.predicted.schedule.ranks):
            rows = [
                Row("busy", self.predicted.busy[rank], self.measured.busy[rank]),
                Row("idle", self.predicted.idle[rank], self.measured.idle[rank]),
            ]
            rows += [Row(cause, *(by_cause[rank, cause] for by_cause in causes)) for cause in CAUSES]
            found.append(tuple(row for row in rows if row.predicted or row.measured))
        return tuple(found)

    @cached_property
    def actions(self) -> tuple[ActionRow, ...]:
        """Actions that both timelines run and that take time, the most prolonged first."""
        predicted = {(span.step, span.rank, span.action): span for span in self.predicted.spans}
        transfers = self.measured.step_graph.is_transfer.tolist()
        found = []
        for span, is_transfer in zip(self.measured.spans, transfers, strict=True):
            other = predicted.get((span.step, span.rank, span.action))
            if other is None or is_transfer or (span.start == span.end and other.start == other.end):
                continue
            taken = other.end - other.start, span.end - span.start
            found.append(ActionRow(span.rank, span.action, *taken, late=span.end - other.end))
        return tuple(sorted(found, key=lambda row: -row.longer))


def _idle_of_ranks(timeline: Timeline) -> dict[tuple[int, str], float]:
    """Return how long each rank is idle, by cause."""
    total: dict[tuple[int, str], float] = defaultdict(float)
    for wait in timeline.waits:
        total[wait.rank, wait.cause] += wait.end - wait.start
    return total
