"""The actions of a schedule side by side as arrays, and the place of each in it."""

from __future__ import annotations

from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ScheduleError
from penstock.graph.array_blocks import SIZE, blocks, check_length, number_type, together
from penstock.graph.heap import keep_freed_memory
from penstock.ir import packed
from penstock.ir.dependencies import NEEDS, TRANSFER_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from penstock.ir.actions import ComputationType
    from penstock.ir.schedule import Schedule

    Places = NDArray[np.signedinteger[Any]]

#: Stands for an action that is not there, and for the rank of a stage that there is not.
NOWHERE: Final = -1

_NO_PLACES: Final = np.empty(0, np.int32)


def too_sparse(schedule: Schedule) -> bool:
    """Whether so much is missing that tables of what should be there would not fit into memory."""
    return schedule.stages * schedule.microbatches > 8 * len(schedule.codes) + 100_000


class Leaves:
    """Every action that is not idle, an overlap's sub-actions one by one, rank after rank in program order.

    What is where is looked up in tables, one per type of action. A *slot* of a table is a stage and a microbatch. For
    each stage there is a slot more, before its microbatches, for what has none; and there is a stage more at both ends
    of the pipeline, where nothing ever is. So the slot of a neighbouring stage, ``stride`` slots on or back, always
    exists.

    Attributes:
        schedule: where they come from.
        stages: how many stages it has.
        microbatches: how many microbatches it has.
        stride: how many slots there are for a stage.
        codes: the packed actions.
        rank: the rank of each.
        cell: the cell of each, counted through all ranks; the sub-actions of an overlap share one.
        kind: the type of each, as a number of ``packed.TYPE_NUMBER``.
        offsets: where those of each rank begin, and at last where they end.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stages, self.microbatches = schedule.stages, schedule.microbatches
        self.stride = self.microbatches + 1
        self.codes, offsets = schedule.codes, schedule.offsets
        if len(self.codes) > SIZE:
            check_length(len(self.codes))
            keep_freed_memory()
        self.rank: Places = np.arange(schedule.ranks, dtype=np.int32).repeat(offsets[1:] - offsets[:-1])
        self.cell: Places = np.arange(len(self.codes), dtype=number_type(len(self.codes)))
        kinds, counts, joined = [], [], 0
        for block in blocks(len(self.codes)):
            codes = self.codes[block]
            types = packed.types(codes)
            kinds.append(types.astype(np.int8))
            counts.append(np.bincount(types, minlength=len(packed.TYPE_NUMBER) + 1))
            if joined or (codes & packed.JOINED).any():
                self.cell[block] -= packed.is_joined(codes).cumsum() + joined
                joined = block.stop - 1 - int(self.cell[block.stop - 1])
        self.kind = together(kinds)
        self._count: list[int] = sum(counts[1:], counts[0]).tolist()
        self.offsets = offsets
        if self._count[packed.IDLE]:
            busy = self.codes != packed.IDLE
            self.codes, self.rank, self.cell = self.codes[busy], self.rank[busy], self.cell[busy]
            self.kind = self.kind[busy]
            self.offsets = offsets - np.append(0, (~busy).cumsum())[offsets]
        self._found: dict[tuple[ComputationType, ...], Places] = {}
        self._tables_of_any: dict[tuple[ComputationType, ...], Places] = {}
        self._known_inputs: tuple[tuple[Places, Places], Places] | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def grown_into(self, schedule: Schedule, kinds: frozenset[ComputationType]) -> Leaves | None:
        """The leaves of a schedule where all actions but those of these types, none of them compute, stand as here.

        None if they do not. What is known of them is taken over: it need not be found again. O(n).
        """
        if schedule.placement != self.schedule.placement or schedule.microbatches != self.microbatches:
            return None
        other = Leaves(schedule)
        other.home = self.home
        stayed, now = (leaves._where(~packed.kind_mask(kinds)) for leaves in (self, other))
        if len(stayed) != len(now) or not all(
            np.array_equal(self.codes[stayed[block]], other.codes[now[block]]) for block in blocks(len(now))
        ):
            return None
        on_their_ranks = self.all_at_home and other.all_at_home  # and so on the same: the stages are where they were
        if not on_their_ranks and not np.array_equal(self.rank[stayed], other.rank[now]):
            return None
        if other.has_transfers:
            return other  # what waits for what is then said by its transfers
        place = np.zeros(len(self), number_type(len(self)))
        place[stayed] = now
        if self._known_inputs:
            known, before = self._known_inputs
            other._known_inputs = known, place[before]
        else:
            other._known_inputs = self.inputs_from_elsewhere(), place
        return other

    @cached_property
    def first_cell(self) -> Places:
        """The number of the first cell of each rank."""
        cells = np.cumsum(np.append(0, ~packed.is_joined(self.schedule.codes)))
        return np.asarray(cells[self.schedule.offsets])

    @property
    def cells(self) -> int:
        """How many cells there are up to the last one that is not idle."""
        return int(self.cell[-1]) + 1 if len(self) else 0

    @cached_property
    def stage(self) -> Places:
        """The stage of each."""
        return packed.stages(self.codes)

    @cached_property
    def microbatch(self) -> Places:
        """The microbatch of each, -1 where there is none."""
        return packed.microbatches(self.codes)

    @cached_property
    def home(self) -> Places:
        """The rank that each stage is placed on; and ``NOWHERE`` for one before the first and one behind the last."""
        return np.array((*self.schedule.placement.rank_of, NOWHERE), np.int32)

    @cached_property
    def in_range(self) -> NDArray[np.bool_]:
        """Whether the stage is placed and the microbatch exists."""
        return (self.stage < self.stages) & (self.microbatch < self.microbatches)

    @cached_property
    def all_in_range(self) -> bool:
        """Whether that holds for all."""
        for block in blocks(len(self)):
            stage, microbatch = packed.largest(self.codes[block])
            if stage >= self.stages or microbatch >= self.microbatches:
                return False
        return True

    @cached_property
    def all_at_home(self) -> bool:
        """Whether it does, and all are on the rank that holds their stage."""
        if not self.all_in_range:
            return False
        for block in blocks(len(self)):
            if (self.home[packed.stages(self.codes[block])] != self.rank[block]).any():
                return False
        return True

    def stages_at(self, places: Places) -> Places:
        """The stages of the actions at these places: not all of them are made for a few."""
        return packed.stages(self.codes[places])

    def is_at_home(self, places: Places) -> NDArray[np.bool_]:
        """Whether the actions at these places are on the rank that holds their stage."""
        return np.asarray(self.home[np.minimum(self.stage[places], self.stages)] == self.rank[places])

    @cached_property
    def slot(self) -> Places:
        """The slot of each; it may be none, or another's, if it is not in range."""
        return self.slots(packed.stages(self.codes), packed.microbatches(self.codes))

    def slots_at(self, places: Places | slice) -> Places:
        """The slots of the actions at these places, with the same reservation: not all of them are made for a few."""
        if len(blocks(len(self))) == 1:
            return np.asarray(self.slot[places])
        codes = self.codes[places]
        return self.slots(packed.stages(codes), packed.microbatches(codes))

    def slots(self, stages: Places, microbatches: Places) -> Places:
        """The slots of these stages and microbatches."""
        return (stages + 1) * self.stride + microbatches + 1

    @cached_property
    def _tables(self) -> Places:
        if too_sparse(self.schedule):
            raise ScheduleError(
                f"{self.stages} stages times {self.microbatches} microbatches need far more actions than there are"
            )
        shape = int(self._number_of_table.max()) + 1, (self.stages + 2) * self.stride
        tables = np.full(shape, NOWHERE, number_type(len(self)))
        for block in reversed(blocks(len(self))):
            places, entries = self._entries(block)
            tables.ravel()[entries[::-1]] = places[::-1]  # of several the first stays
        return tables

    @cached_property
    def _number_of_table(self) -> Places:
        """Which table is that of each type; those that there is nothing of share the first, which stays empty."""
        numbers = count(1)
        return np.array([next(numbers) if many and kind != packed.IDLE else 0 for kind, many in enumerate(self._count)])

    def _entries(self, block: slice) -> tuple[Places, Places]:
        """The actions of a block that are in range, and where each stands in the tables, counted through all."""
        table = self._number_of_table.take(self.kind[block])
        entries = table * ((self.stages + 2) * self.stride) + self.slots_at(block)
        places = np.arange(block.start, block.stop, dtype=number_type(len(self)))
        if self.all_in_range:
            return places, entries
        inside = self.in_range[block]
        return places[inside], entries[inside]

    @cached_property
    def repetitions(self) -> Places:
        """Where actions are, of those in range and with a microbatch, that have been there before."""
        if self.all_in_range and np.count_nonzero(self._tables != NOWHERE) == len(self):
            return _NO_PLACES  # as many are found as there are
        found = [_NO_PLACES]
        for block in blocks(len(self)):
            places, entries = self._entries(block)
            found.append(places[self._tables.ravel()[entries] != places])
        again = np.concatenate(found)
        return np.asarray(again[self.microbatch[again] != NOWHERE])

    def are(self, *kinds: ComputationType) -> Places:
        """Where the actions of these types are, in order."""
        if kinds not in self._found:
            self._found[kinds] = self._where(packed.kind_mask(kinds)) if self.has_any(kinds) else _NO_PLACES
        return self._found[kinds]

    def _where(self, wanted: NDArray[np.bool_]) -> Places:
        """Where the actions are whose type, as a number, is wanted."""
        if len(blocks(len(self))) == 1:
            return wanted.take(self.kind).nonzero()[0]
        return np.concatenate(
            [wanted.take(self.kind[block]).nonzero()[0] + block.start for block in blocks(len(self))], dtype=np.int32
        )

    def are_between(self, kind: ComputationType, begin: int, end: int) -> Places:
        """Where the actions of this type are that stand between these places and are in range, in order."""
        places: Places = (self.kind[begin:end] == packed.TYPE_NUMBER[kind]).nonzero()[0] + begin
        return places if self.all_in_range else places[self.in_range[places]]

    def count(self, kind: ComputationType) -> int:
        """How many actions of this type there are."""
        return self._count[packed.TYPE_NUMBER[kind]]

    def has_any(self, kinds: tuple[ComputationType, ...]) -> bool:
        """Whether there is any action of these types."""
        return any(self._count[packed.TYPE_NUMBER[kind]] for kind in kinds)

    def are_in_range(self, *kinds: ComputationType) -> Places:
        """The same without those whose stage or microbatch there is not."""
        places = self.are(*kinds)
        return places if self.all_in_range else places[self.in_range[places]]

    def is_kind(self, places: Places, kind: ComputationType) -> NDArray[np.bool_]:
        """Whether the actions at these places are of this type."""
        return np.asarray(self.kind[places] == packed.TYPE_NUMBER[kind])

    def first_at_home(self, kinds: Iterable[ComputationType]) -> Places:
        """Where the actions of these types are, in order, without repetitions and those that are on a wrong rank."""
        found = []
        for kind in kinds:
            table = self.table(kind)
            places = table[table != NOWHERE]
            found.append(places[self.is_at_home(places)])
        return np.sort(np.concatenate(found))

    @cached_property
    def has_transfers(self) -> bool:
        """Whether there is any send or receive."""
        return self.has_any(TRANSFER_TYPES)

    def find(self, kind: ComputationType, stages: Places, microbatches: Places) -> Places:
        """Where the action of this type is for each stage and microbatch that exist: the first one, or ``NOWHERE``."""
        return np.asarray(self.table(kind)[self.slots(stages, microbatches)])

    def table(self, kind: ComputationType) -> Places:
        """Where the action of this type is, for every slot: the first one, or ``NOWHERE``."""
        return np.asarray(self._tables[self._number_of_table[packed.TYPE_NUMBER[kind]]])

    def places(self, kind: ComputationType) -> Places:
        """The table of this type as a grid, with a row per stage and a column per microbatch, and nothing else."""
        return self.table(kind).reshape(-1, self.stride)[1:-1, 1:]

    def find_any(self, kinds: tuple[ComputationType, ...], stages: Places, microbatches: Places) -> Places:
        """As ``find``, for the first of these types that is there."""
        return np.asarray(self.table_of_any(kinds)[self.slots(stages, microbatches)])

    def table_of_any(self, kinds: tuple[ComputationType, ...]) -> Places:
        """As ``table``, for the first of these types that is there."""
        if kinds not in self._tables_of_any:
            first, *others = kinds
            found = self.table(first)
            for kind in others:
                if self.has_any((kind,)):
                    found = np.where(found == NOWHERE, self.table(kind), found)
            self._tables_of_any[kinds] = found
        return self._tables_of_any[kinds]

    @cached_property
    def home_of_slot(self) -> Places:
        """For every slot of a table the rank that its stage is placed on; ``NOWHERE`` at both ends of the pipeline."""
        return np.append(NOWHERE, self.home).repeat(self.stride)

    @property
    def inputs(self) -> tuple[Places, Places]:
        """What every compute action waits for, by ``ir/dependencies.py``: pairs of (action, what it waits for).

        What is not there at all nothing waits for.
        """
        return _side_by_side(self.inputs_in_parts)

    @cached_property
    def inputs_in_parts(self) -> list[tuple[Places, Places]]:
        """The same, a block at a time."""
        parts = [*self._inputs_or_nowhere()]
        if len(blocks(len(self))) == 1:
            parts = [_side_by_side(parts)]
        there = [(awaited != NOWHERE).nonzero()[0] for _, awaited in parts]
        return [(waiting[found], awaited[found]) for (waiting, awaited), found in zip(parts, there, strict=True)]

    def _inputs_or_nowhere(self) -> Iterator[tuple[Places, Places]]:
        yield _NO_PLACES, _NO_PLACES
        for kind, needs in NEEDS.items():
            mine = self.are_in_range(kind)
            if not len(mine):
                continue
            parts = [(mine[block], self.slots_at(mine[block])) for block in blocks(len(mine))]
            for need in needs:
                table, offset = self.table_of_any(need.any_of), need.stage_offset * self.stride
                for waiting, slots in parts:
                    yield waiting, table[slots + offset]

    def inputs_from_elsewhere(self) -> tuple[Places, Places]:
        """Those pairs of ``inputs`` that are of two ranks."""
        if self._known_inputs:
            (waiting, awaited), place = self._known_inputs
            return place[waiting], place[awaited]
        found = []
        for waiting, awaited in self.inputs_in_parts:
            elsewhere = (self.rank[awaited] != self.rank[waiting]).nonzero()[0]
            found.append((waiting[elsewhere], awaited[elsewhere]))
        return _side_by_side(found)


def _side_by_side(parts: list[tuple[Places, Places]]) -> tuple[Places, Places]:
    """Pairs that came in parts, together."""
    first, second = zip(*parts, strict=True)
    return np.concatenate(first), np.concatenate(second)
