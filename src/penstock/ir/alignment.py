"""Computes the earliest step of every action if each took one step: what makes a drawn schedule readable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ScheduleError
from penstock.ir.dependencies import Neighbours, needs

if TYPE_CHECKING:
    from penstock.ir.actions import Action
    from penstock.ir.schedule import Row, Schedule


def unit_steps(schedule: Schedule) -> list[list[int | None]]:
    """Return the earliest step of every cell of every rank, each action taking one step; None for an idle cell.

    O(number of actions): a rank runs until it has to wait, and is woken by the action that it waits for.

    Raises:
        ScheduleError: some rank would wait forever, or the schedule is lowered.
    """
    if schedule.lowered:
        raise ScheduleError("only a compute-only schedule can be aligned; draw this one with aligned=False")
    return _Walk(schedule).run()


class _Walk:
    """Runs through a schedule once."""

    def __init__(self, schedule: Schedule) -> None:
        self.rows = schedule.actions[:]
        self.stages = Neighbours.over(schedule.links, schedule.stages)
        self.ended: dict[Action, int] = {}
        self.sleepers: dict[Action, list[int]] = {}
        self.columns: list[list[int | None]] = [[] for _ in range(schedule.ranks)]
        self.free = [0] * schedule.ranks

    def run(self) -> list[list[int | None]]:
        awake = list(range(len(self.rows)))
        while awake:
            awake += self._advance(awake.pop())
        for rank, row in enumerate(self.rows):
            if len(self.columns[rank]) < len(row):
                raise ScheduleError(self._stuck(rank, row))
        return self.columns

    def _advance(self, rank: int) -> list[int]:
        """Run this rank until it must wait; return the ranks that it woke."""
        woken: list[int] = []
        row, columns = self.rows[rank], self.columns[rank]
        while len(columns) < len(row):
            cell = row[len(columns)]
            if cell is None:
                columns.append(None)
                continue
            start = self.free[rank]
            for providers in needs(cell, self.stages):
                ends = [self.ended[one] for one in providers if one in self.ended]
                if not ends:
                    for one in providers:
                        self.sleepers.setdefault(one, []).append(rank)
                    return woken
                start = max(start, min(ends))
            columns.append(start)
            self.free[rank] = start + 1
            for part in cell.parts:
                self.ended.setdefault(part, start + 1)
                woken += self.sleepers.pop(part, ())
        return woken

    def _stuck(self, rank: int, row: Row) -> str:
        step = len(self.columns[rank])
        cell = row[step]
        assert cell is not None  # an idle cell never waits
        missing = [
            " or ".join(map(str, providers))
            for providers in needs(cell, self.stages)
            if not any(one in self.ended for one in providers)
        ]
        return f"rank {rank} waits forever at step {step}: {cell} needs {', '.join(missing)}"
