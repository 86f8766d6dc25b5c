"""The actions of a schedule side by side as arrays, and the place of each in it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import packed
from penstock.ir.dependencies import NEEDS, OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.ir.actions import ComputationType
    from penstock.ir.schedule import Schedule

    Places = NDArray[np.signedinteger[Any]]

#: Stands for an action that is not there.
NOWHERE = -1


def too_sparse(schedule: Schedule) -> bool:
    """Whether so much is missing that tables of what should be there would not fit into memory."""
    return schedule.stages * schedule.microbatches > 8 * len(schedule.codes) + 100_000


class Leaves:
    """Every action that is not idle, an overlap's sub-actions one by one, rank after rank in program order.

    Attributes:
        schedule: where they come from.
        stages: how many stages it has.
        microbatches: how many microbatches it has.
        codes: the packed actions.
        rank: the rank of each.
        cell: the cell of each, counted through all ranks; the sub-actions of an overlap share one.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stages, self.microbatches = schedule.stages, schedule.microbatches
        if too_sparse(schedule):
            raise ScheduleError(
                f"{self.stages} stages times {self.microbatches} microbatches need far more actions than there are"
            )
        # Places, ranks and stages fit into 32 bits, and the time of all this is the time that memory takes.
        self.codes = schedule.codes
        self.rank = np.repeat(np.arange(schedule.ranks, dtype=np.int32), np.diff(schedule.offsets))
        self.cell = np.cumsum(~packed.is_joined(schedule.codes), dtype=np.int32) - np.int32(1)
        busy = schedule.codes != packed.IDLE
        if not busy.all():
            self.codes, self.rank, self.cell = self.codes[busy], self.rank[busy], self.cell[busy]

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def first_cell(self) -> Places:
        """The number of the first cell of each rank."""
        cells = np.cumsum(np.append(0, ~packed.is_joined(self.schedule.codes)))
        return np.asarray(cells[self.schedule.offsets])

    @cached_property
    def stage(self) -> Places:
        """The stage of each."""
        return packed.stages(self.codes).astype(np.int32)

    @cached_property
    def kind(self) -> Places:
        """The type of each, as a number of ``packed.TYPE_NUMBER``."""
        return packed.types(self.codes).astype(np.int8)

    @cached_property
    def microbatch(self) -> Places:
        """The microbatch of each, -1 where there is none."""
        return packed.microbatches(self.codes).astype(np.int32)

    @cached_property
    def home(self) -> Places:
        """The rank that each stage is placed on."""
        return np.array(self.schedule.placement.rank_of, np.int32)

    @cached_property
    def in_range(self) -> NDArray[np.bool_]:
        """Whether the stage is placed and the microbatch exists."""
        return (self.stage < self.stages) & (self.microbatch < self.microbatches)

    @cached_property
    def all_in_range(self) -> bool:
        """Whether that holds for all."""
        return bool(self.in_range.all())

    @cached_property
    def _tables(self) -> dict[int, Places]:
        return {}

    @cached_property
    def _tables_of_any(self) -> dict[tuple[ComputationType, ...], Places]:
        return {}

    @cached_property
    def _found(self) -> dict[tuple[ComputationType, ...], Places]:
        return {}

    def are(self, *kinds: ComputationType) -> Places:
        """Where the actions of these types are, in order."""
        if kinds not in self._found:
            chosen = self.kind == packed.TYPE_NUMBER[kinds[0]]
            for kind in kinds[1:]:
                chosen |= self.kind == packed.TYPE_NUMBER[kind]
            self._found[kinds] = chosen.nonzero()[0].astype(np.int32)
        return self._found[kinds]

    def is_kind(self, places: Places, kind: ComputationType) -> NDArray[np.bool_]:
        """Whether the actions at these places are of this type."""
        return np.asarray(self.kind[places] == packed.TYPE_NUMBER[kind])

    def first_at_home(self, kinds: Iterable[ComputationType]) -> Places:
        """Where the actions of these types are, in order, without repetitions and those that are on a wrong rank."""
        found = []
        for kind in kinds:
            table = self.table(kind)
            places = table[table != NOWHERE]
            found.append(places[self.home[self.stage[places]] == self.rank[places]])
        return np.sort(np.concatenate(found))

    @cached_property
    def has_transfers(self) -> bool:
        """Whether there is any send or receive."""
        return bool(len(self.are(*OPERATIONS)))

    def find(self, kind: ComputationType, stages: Places, microbatches: Places) -> Places:
        """Where the action of this type is for each stage and microbatch that exist: the first one, or ``NOWHERE``."""
        return np.asarray(self.table(kind)[stages * self.microbatches + microbatches])

    def table(self, kind: ComputationType) -> Places:
        """Where the action of this type is, for every stage times ``microbatches`` plus microbatch: the first one."""
        number = packed.TYPE_NUMBER[kind]
        if number not in self._tables:
            chosen = self.kind == number
            chosen = chosen if self.all_in_range else chosen & self.in_range
            places = chosen.nonzero()[0][::-1].astype(np.int32)  # the first last
            slots = self.stage[places] * self.microbatches + self.microbatch[places]
            table = np.full(self.stages * self.microbatches, NOWHERE, np.int32)
            table[slots] = places
            self._tables[number] = table
        return self._tables[number]

    def find_any(self, kinds: tuple[ComputationType, ...], stages: Places, microbatches: Places) -> Places:
        """As ``find``, for the first of these types that is there."""
        return np.asarray(self.table_of_any(kinds)[stages * self.microbatches + microbatches])

    def table_of_any(self, kinds: tuple[ComputationType, ...]) -> Places:
        """As ``table``, for the first of these types that is there."""
        if kinds not in self._tables_of_any:
            first, *others = kinds
            found = self.table(first)
            for kind in others:
                if len(self.are(kind)):
                    found = np.where(found == NOWHERE, self.table(kind), found)
            self._tables_of_any[kinds] = found
        return self._tables_of_any[kinds]

    @cached_property
    def home_of_slot(self) -> Places:
        """For every slot of a table the rank that its stage is placed on."""
        return np.repeat(self.home, self.microbatches)

    @cached_property
    def inputs(self) -> tuple[Places, Places]:
        """What every compute action waits for, by ``ir/dependencies.py``: pairs of (action, what it waits for).

        What is not there at all is ``NOWHERE``.
        """
        waiting, awaited = [], []
        for kind, needs in NEEDS.items():
            mine = self.are(kind)
            mine = mine if self.all_in_range else mine[self.in_range[mine]]
            slots = self.stage[mine] * self.microbatches + self.microbatch[mine]
            for need in needs:
                table, source = self.table_of_any(need.any_of), slots + need.stage_offset * self.microbatches
                if need.stage_offset:
                    exists = (source >= 0) & (source < len(table))
                    waiting.append(mine[exists])
                    awaited.append(table[source[exists]])
                else:
                    waiting.append(mine)
                    awaited.append(table[source])
        return np.concatenate(waiting), np.concatenate(awaited)
