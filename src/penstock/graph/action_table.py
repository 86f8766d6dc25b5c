"""Holds the actions of a schedule as arrays, and looks up where each action is."""

from __future__ import annotations

from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ScheduleError
from penstock.graph.array_blocks import SIZE, blocks, check_length, concatenate, index_dtype
from penstock.graph.heap import keep_freed_memory
from penstock.graph.routes import Routes
from penstock.ir import packed
from penstock.ir.dependencies import NEEDS, TRANSFER_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from penstock.ir.actions import ComputationType
    from penstock.ir.schedule import Schedule

    Positions = NDArray[np.signedinteger[Any]]

#: The position of an action that is missing, and the rank of a stage that does not exist.
NONE: Final = -1

_NO_POSITIONS: Final = np.empty(0, np.int32)

_IS_TRANSFER: Final = packed.kind_mask(TRANSFER_TYPES)

#: What actions wait for, and the types of action that wait for exactly that.
_WAITING_FOR: Final = {needs: tuple(kind for kind in NEEDS if NEEDS[kind] == needs) for needs in NEEDS.values()}


def is_too_sparse(schedule: Schedule) -> bool:
    """Return whether so many actions are missing that tables of all of them would not fit into memory."""
    return schedule.stages * schedule.microbatches > 8 * len(schedule.codes) + 100_000


class ActionTable:
    """Every action that is not idle, rank after rank in program order, overlaps split into their sub-actions.

    A *position* is an index into these arrays. Positions are looked up in tables, one per type of action, and for
    transfers also per distance between the two stages. A *slot* of a table is a stage and a microbatch. Each stage has
    one extra slot, before its microbatches, for actions that have none; and there are extra, empty stages at both ends
    of the pipeline, as many as the longest distance. So the slot of a stage that another one exchanges with, a multiple
    of ``stride`` ahead or back, always exists.

    Attributes:
        schedule: the schedule.
        stages: its number of stages.
        microbatches: its number of microbatches.
        stride: the number of slots per stage.
        routes: which stages exchange with which.
        padding: the number of extra stages at each end.
        codes: the packed actions.
        rank: the rank of each action.
        cell: the cell of each action, numbered across all ranks; the sub-actions of an overlap share one.
        kind: the type of each action, as a number of ``packed.TYPE_NUMBER``.
        offsets: where the actions of each rank begin, and finally where the last rank ends.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stages, self.microbatches = schedule.stages, schedule.microbatches
        self.stride = self.microbatches + 1
        self.codes, offsets = schedule.codes, schedule.offsets
        self.routes = Routes.of(schedule)
        self.padding = self.routes.distances[-1]
        if len(self.codes) > SIZE:
            check_length(len(self.codes))
            keep_freed_memory()
        dtype = index_dtype(len(self.codes))  # the same for all if they are few: NumPy has other code for every type
        ranks: Positions = np.arange(schedule.ranks, dtype=dtype)
        self.rank = ranks.repeat(offsets[1:] - offsets[:-1])
        self.cell: Positions = np.arange(len(self.codes), dtype=dtype)
        kinds: list[Positions] = []
        counts, joined = [], 0
        for block in blocks(len(self.codes)):
            codes = self.codes[block]
            types = packed.types(codes)
            kinds.append(types if dtype is np.int64 else types.astype(np.int8))
            counts.append(np.bincount(types, minlength=len(packed.TYPE_NUMBER) + 1))
            if joined or (codes & packed.JOINED).any():
                self.cell[block] -= packed.is_joined(codes).cumsum() + joined
                joined = block.stop - 1 - int(self.cell[block.stop - 1])
        self.kind = concatenate(kinds)
        self._count: list[int] = sum(counts[1:], counts[0]).tolist()
        self.offsets = offsets
        if self._count[packed.IDLE]:
            busy = self.codes != packed.IDLE
            self.codes, self.rank, self.cell = self.codes[busy], self.rank[busy], self.cell[busy]
            self.kind = self.kind[busy]
            self.offsets = offsets - np.append(0, (~busy).cumsum())[offsets]
        self._found: dict[tuple[ComputationType, ...], Positions] = {}
        self._first_tables: dict[tuple[ComputationType, ...], Positions] = {}

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def first_cell(self) -> Positions:
        """The first cell of each rank."""
        cells = np.cumsum(np.append(0, ~packed.is_joined(self.schedule.codes)))
        return np.asarray(cells[self.schedule.offsets])

    @property
    def cells(self) -> int:
        """The number of cells up to the last one that is not idle."""
        return int(self.cell[-1]) + 1 if len(self) else 0

    @cached_property
    def stage(self) -> Positions:
        """The stage of each action."""
        return packed.stages(self.codes)

    @cached_property
    def microbatch(self) -> Positions:
        """The microbatch of each action, -1 if it has none."""
        return packed.microbatches(self.codes)

    @cached_property
    def rank_of_stage(self) -> Positions:
        """The rank of each stage, followed by ``NONE`` for a stage that does not exist."""
        return np.array((*self.schedule.placement.rank_of, NONE), self.rank.dtype)

    @cached_property
    def in_range(self) -> NDArray[np.bool_]:
        """Whether the stage and the microbatch of each action exist."""
        return (self.stage < self.stages) & (self.microbatch < self.microbatches)

    @cached_property
    def all_in_range(self) -> bool:
        """Whether they exist for all actions."""
        for block in blocks(len(self)):
            stage, microbatch = packed.largest(self.codes[block])
            if stage >= self.stages or microbatch >= self.microbatches:
                return False
        return True

    @cached_property
    def all_placed(self) -> bool:
        """Whether all actions are in range and on the rank that holds their stage."""
        if not self.all_in_range:
            return False
        for block in blocks(len(self)):
            if (self.rank_of_stage[packed.stages(self.codes[block])] != self.rank[block]).any():
                return False
        return True

    def stages_at(self, positions: Positions) -> Positions:
        """Return the stages at these positions, without computing those of all actions."""
        return packed.stages(self.codes[positions])

    def is_placed(self, positions: Positions) -> NDArray[np.bool_]:
        """Return whether the actions at these positions are on the rank that holds their stage."""
        return np.asarray(self.rank_of_stage[np.minimum(self.stage[positions], self.stages)] == self.rank[positions])

    @cached_property
    def slot(self) -> Positions:
        """The slot of each action; meaningless if the action is not in range."""
        return self.slots(packed.stages(self.codes), packed.microbatches(self.codes))

    def slots_at(self, positions: Positions | slice) -> Positions:
        """Return the slots at these positions, without computing those of all actions."""
        if len(blocks(len(self))) == 1:
            return np.asarray(self.slot[positions])
        codes = self.codes[positions]
        return self.slots(packed.stages(codes), packed.microbatches(codes))

    def slots(self, stages: Positions, microbatches: Positions) -> Positions:
        """Return the slots of these stages and microbatches."""
        return (stages + self.padding) * self.stride + microbatches + 1

    def stages_of_slots(self, slots: Positions) -> Positions:
        """Return the stages of these slots."""
        return slots // self.stride - self.padding

    @cached_property
    def _tables(self) -> Positions:
        if is_too_sparse(self.schedule):
            raise ScheduleError(
                f"{self.stages} stages x {self.microbatches} microbatches need far more actions than the schedule has"
            )
        last = max(map(max, self._numbers_of_tables))
        shape = last + 1, (self.stages + 2 * self.padding) * self.stride
        tables = np.full(shape, NONE, index_dtype(len(self)))
        for block in reversed(blocks(len(self))):
            positions, entries = self._entries(block)
            tables.ravel()[entries[::-1]] = positions[::-1]  # of duplicates, the first stays
        return tables

    @cached_property
    def _numbers_of_tables(self) -> list[list[int]]:
        """The index of each type's table, by distance; types without actions share the first one, which stays empty."""
        numbers = count(1)
        found = [next(numbers) if many and kind != packed.IDLE else 0 for kind, many in enumerate(self._count)]
        others = [
            [next(numbers) if many and _IS_TRANSFER[kind] else 0 for kind, many in enumerate(self._count)]
            for _ in self.routes.distances[1:]
        ]
        return [found, *others]

    def _entries(self, block: slice) -> tuple[Positions, Positions]:
        """Return the actions of a block that are in range, and the index of each into all tables, flattened."""
        positions = np.arange(block.start, block.stop, dtype=index_dtype(len(self)))
        inside = None if self.all_in_range else self.in_range[block]
        if self.has_hops:
            distance = self.routes.number_of(packed.hops(self.codes[block]) + 1)
            table = np.array(self._numbers_of_tables)[distance, self.kind[block]]
            inside = distance != NONE if inside is None else inside & (distance != NONE)
        else:
            table = np.array(self._numbers_of_tables[0]).take(self.kind[block])
        entries = table * ((self.stages + 2 * self.padding) * self.stride) + self.slots_at(block)
        return (positions, entries) if inside is None else (positions[inside], entries[inside])

    @cached_property
    def has_hops(self) -> bool:
        """Whether any transfer goes further than to the next stage."""
        return self.has_transfers and packed.has_hops(self.codes)

    @cached_property
    def duplicates(self) -> Positions:
        """The positions of duplicates, among the actions in range that have a microbatch."""
        if self.all_in_range and np.count_nonzero(self._tables != NONE) == len(self):
            return _NO_POSITIONS  # every action has its own entry
        found = [_NO_POSITIONS]
        for block in blocks(len(self)):
            positions, entries = self._entries(block)
            found.append(positions[self._tables.ravel()[entries] != positions])
        again = np.concatenate(found)
        return np.asarray(again[self.microbatch[again] != NONE])

    def positions_of(self, *kinds: ComputationType) -> Positions:
        """Return the positions of the actions of these types, in order."""
        if kinds not in self._found:
            self._found[kinds] = self._where(packed.kind_mask(kinds)) if self.has_any(kinds) else _NO_POSITIONS
        return self._found[kinds]

    def _where(self, wanted: NDArray[np.bool_]) -> Positions:
        """Return the positions of the actions whose type number is wanted."""
        if len(blocks(len(self))) == 1:
            return wanted.take(self.kind).nonzero()[0]
        return np.concatenate(
            [wanted.take(self.kind[block]).nonzero()[0] + block.start for block in blocks(len(self))], dtype=np.int32
        )

    def positions_between(self, kind: ComputationType, begin: int, end: int, distance: int | None = None) -> Positions:
        """Return the positions of this type between ``begin`` and ``end`` that are in range, in order.

        With a distance, only those of transfers between stages that are this far apart.
        """
        positions: Positions = (self.kind[begin:end] == packed.TYPE_NUMBER[kind]).nonzero()[0] + begin
        positions = positions if self.all_in_range else positions[self.in_range[positions]]
        return positions if distance is None else self.within_distance(positions, distance)

    def within_distance(self, transfers: Positions, distance: int) -> Positions:
        """Return those of these transfers that are between stages this far apart."""
        if not self.has_hops:
            return transfers if distance == 1 else _NO_POSITIONS
        return np.asarray(transfers[packed.hops(self.codes[transfers]) == distance - 1])

    def count(self, kind: ComputationType) -> int:
        """Return the number of actions of this type."""
        return self._count[packed.TYPE_NUMBER[kind]]

    def has_any(self, kinds: tuple[ComputationType, ...]) -> bool:
        """Return whether there is an action of one of these types."""
        return any(self._count[packed.TYPE_NUMBER[kind]] for kind in kinds)

    def positions_in_range(self, *kinds: ComputationType) -> Positions:
        """Return the positions of the actions of these types that are in range, in order."""
        positions = self.positions_of(*kinds)
        return positions if self.all_in_range else positions[self.in_range[positions]]

    def is_kind(self, positions: Positions, kind: ComputationType) -> NDArray[np.bool_]:
        """Return whether the actions at these positions are of this type."""
        return np.asarray(self.kind[positions] == packed.TYPE_NUMBER[kind])

    def first_placed(self, kinds: Iterable[ComputationType]) -> Positions:
        """Return the positions of these types, in order, without duplicates and actions on a wrong rank."""
        found = []
        for kind in kinds:
            table = self.table(kind)
            positions = table[table != NONE]
            found.append(positions[self.is_placed(positions)])
        return np.sort(np.concatenate(found))

    @cached_property
    def has_transfers(self) -> bool:
        """Whether there is any send or receive."""
        return self.has_any(TRANSFER_TYPES)

    def find(self, kind: ComputationType, stages: Positions, microbatches: Positions, distance: int = 1) -> Positions:
        """Return the first position of this type for each existing stage and microbatch; ``NONE`` if missing."""
        return np.asarray(self.table(kind, distance)[self.slots(stages, microbatches)])

    def table(self, kind: ComputationType, distance: int = 1) -> Positions:
        """Return the first position of this type for every slot; ``NONE`` if missing. Transfers are by distance."""
        number = 0 if distance == 1 else self.routes.distances.index(distance)
        return np.asarray(self._tables[self._numbers_of_tables[number][packed.TYPE_NUMBER[kind]]])

    def position_grid(self, kind: ComputationType) -> Positions:
        """Return the table of this type as a grid, with a row per stage and a column per microbatch."""
        return self.table(kind).reshape(-1, self.stride)[self.padding : -self.padding, 1:]

    def find_any(self, kinds: tuple[ComputationType, ...], stages: Positions, microbatches: Positions) -> Positions:
        """Return the same as ``find``, for the first of these types that exists."""
        return np.asarray(self.first_table(kinds)[self.slots(stages, microbatches)])

    def first_table(self, kinds: tuple[ComputationType, ...]) -> Positions:
        """Return the same as ``table``, for the first of these types that exists."""
        if kinds not in self._first_tables:
            first, *others = kinds
            found = self.table(first)
            for kind in others:
                if self.has_any((kind,)):
                    found = np.where(found == NONE, self.table(kind), found)
            self._first_tables[kinds] = found
        return self._first_tables[kinds]

    @cached_property
    def rank_of_slot(self) -> Positions:
        """The rank of every slot of a table; ``NONE`` for the extra stages at both ends."""
        extra = np.full(self.padding, NONE, self.rank_of_stage.dtype)
        return np.concatenate([extra, self.rank_of_stage, extra[1:]]).repeat(self.stride)

    @property
    def inputs(self) -> tuple[Positions, Positions]:
        """What every compute action waits for, by ``ir/dependencies.py``: pairs of (waiting, awaited) positions.

        Missing actions are left out.
        """
        return _concatenate_pairs(self.input_blocks)

    @cached_property
    def input_blocks(self) -> list[tuple[Positions, Positions]]:
        """The same pairs, block by block."""
        return self._find_inputs()

    def remote_inputs(self) -> tuple[Positions, Positions]:
        """Return the pairs of ``inputs`` that are on different ranks."""
        found = []
        # If every action is on the rank of its stage, only what comes from other stages can be on another rank.
        for waiting, awaited in self._find_inputs(of_other_stages=self.all_placed):
            elsewhere = (self.rank[awaited] != self.rank[waiting]).nonzero()[0]
            found.append((waiting[elsewhere], awaited[elsewhere]))
        return _concatenate_pairs(found)

    def _find_inputs(self, *, of_other_stages: bool = False) -> list[tuple[Positions, Positions]]:
        parts = [*self._inputs_or_none(of_other_stages=of_other_stages)] or [(_NO_POSITIONS, _NO_POSITIONS)]
        if len(blocks(len(self))) == 1:
            parts = [_concatenate_pairs(parts)]
        there = [(awaited != NONE).nonzero()[0] for _, awaited in parts]
        return [(waiting[found], awaited[found]) for (waiting, awaited), found in zip(parts, there, strict=True)]

    def _inputs_or_none(self, *, of_other_stages: bool) -> Iterator[tuple[Positions, Positions]]:
        for needs, kinds in _WAITING_FOR.items():
            wanted = [need for need in needs if need.stage_offset or not of_other_stages]
            mine = self.positions_in_range(*kinds) if wanted else _NO_POSITIONS
            if not len(mine):
                continue
            parts = [(mine[block], self.slots_at(mine[block])) for block in blocks(len(mine))]
            for need in wanted:
                table = self.first_table(need.any_of)
                for distance, linked in self.routes.providers(need):
                    offset = need.stage_offset * distance * self.stride
                    for waiting, slots in parts if linked is None else self._with_link(parts, linked):
                        yield waiting, table[slots + offset]

    def _with_link(
        self, parts: Iterable[tuple[Positions, Positions]], linked: NDArray[np.bool_]
    ) -> Iterator[tuple[Positions, Positions]]:
        """Keep the positions whose stages have a link, and their slots."""
        for waiting, slots in parts:
            has_link = linked[self.stages_of_slots(slots)].nonzero()[0]
            yield waiting[has_link], slots[has_link]


def _concatenate_pairs(parts: list[tuple[Positions, Positions]]) -> tuple[Positions, Positions]:
    """Concatenate the pairs of several parts."""
    first, second = zip(*parts, strict=True)
    return np.concatenate(first), np.concatenate(second)
