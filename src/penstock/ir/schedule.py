"""Defines ``Schedule``: what every rank does, in order. An immutable value, like a tuple."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, overload

import numpy as np

from penstock.errors import PlacementError, ScheduleError
from penstock.ir import edges as wiring
from penstock.ir import grid, packed
from penstock.ir.actions import LARGEST_MICROBATCH, Action, parse_cell
from penstock.ir.numbers import whole_number
from penstock.ir.placement import Placement, first_gap

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.ir.edges import Edge, Link
    from penstock.ir.packed import Codes

#: A cell of a row: an action, its text form, or None for an idle step.
Cell: TypeAlias = Action | str | None
Row: TypeAlias = tuple[Action | None, ...]


class Schedule:
    """The actions of every rank, the placement of the stages, and the number of microbatches.

    Built from a row per rank (a list, or a dict from rank to row), whose cells are actions or their text:

    >>> schedule = Schedule({0: ["0F0", "0F1", None, "0B0", "0B1"], 1: [None, "1F0", "1B0", "1F1", "1B1"]})
    >>> schedule.ranks, schedule.stages, schedule.microbatches
    (2, 2, 2)
    >>> schedule.actions[1][2].computation_type.name
    'FULL_BACKWARD'
    >>> print(schedule.grid())
    step   0   1   2   3   4
    rank 0 0F0 0F1 .   0B0 0B1
    rank 1 .   1F0 1B0 1F1 1B1

    The placement and the number of microbatches are inferred from the actions unless given. If given, they are taken
    as intended, and actions that contradict them are reported by the verifier.

    Without ``edges``, every stage passes its output to the next one. With them, any stage can pass values to any later
    ones:

    >>> from penstock.ir.edges import Edge
    >>> schedule.with_edges([Edge(0, (1,)), Edge(0, (1,), "mask", gradient=False)]).is_chain
    False

    It is immutable. Equality and hash depend on the content, which does not include the metadata (such as a name), nor
    the names of the values on its edges.
    """

    __slots__ = ("_codes", "_edges", "_hash", "_metadata", "_microbatches", "_offsets", "_placement", "_rows")

    _codes: Codes
    _edges: tuple[Edge, ...] | None
    _hash: int | None
    _metadata: Mapping[str, Any]
    _microbatches: int
    _offsets: NDArray[np.int64]
    _placement: Placement
    _rows: dict[int, Row]

    def __init__(
        self,
        rows: Mapping[int, Iterable[Cell]] | Iterable[Iterable[Cell]],
        *,
        placement: Placement | None = None,
        microbatches: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        edges: Iterable[Edge] | None = None,
    ) -> None:
        cells = [_checked_cells(rank, row) for rank, row in enumerate(_in_rank_order(rows))]
        self._fill([packed.pack_cells(row) for row in cells], placement, microbatches, metadata, edges)

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        placement: Placement | None = None,
        microbatches: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        edges: Iterable[Edge] | None = None,
    ) -> Schedule:
        """Read a grid: a line per rank, cells separated by spaces, ``.`` for an idle step.

        Lines may begin with ``rank 0`` or ``rank 0:``, and then come in any order. A line of step numbers is skipped,
        so the output of ``schedule.grid(aligned=False)`` can be read back. A line such as ``edges: 0>1 0>2/F 1>2`` has
        the edges, if they are not a chain; ``/F`` marks one that has no gradient.

        >>> Schedule.from_text('''
        ...     rank 0: 0F0 .   .   0B0
        ...     rank 1: .   1F0 1B0 .
        ... ''')
        <Schedule: 2 ranks, 2 stages, 1 microbatch, 4 actions>
        """
        rows, written = grid.parse_grid(text)
        if written is not None and edges is not None:
            raise ScheduleError("the text has a line of edges; drop it, or do not pass edges=")
        edges = edges if written is None else written
        return cls(rows, placement=placement, microbatches=microbatches, metadata=metadata, edges=edges)

    @classmethod
    def from_codes(
        cls,
        rows: Sequence[Codes],
        *,
        placement: Placement | None = None,
        microbatches: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        edges: Iterable[Edge] | None = None,
    ) -> Schedule:
        """Build from packed actions (see ``ir/packed.py``), a row per rank; for generators and passes."""
        schedule = cls.__new__(cls)
        schedule._fill(rows, placement, microbatches, metadata, edges)
        if not packed.is_wellformed(schedule.codes, schedule.offsets):
            raise ScheduleError("the codes are not those of actions")
        return schedule

    def with_codes(self, codes: Codes, offsets: NDArray[np.int64]) -> Schedule:
        """Replace the packed actions, whose ranks begin at the offsets; for passes.

        The codes are not checked: a pass makes them from codes that were.
        """
        other = type(self).__new__(type(self))
        put = object.__setattr__
        put(other, "_codes", _frozen(codes))
        put(other, "_offsets", _frozen(offsets))
        put(other, "_rows", {})
        put(other, "_hash", None)
        for kept in ("_metadata", "_placement", "_microbatches", "_edges"):
            put(other, kept, getattr(self, kept))
        return other

    def with_edges(self, edges: Iterable[Edge]) -> Schedule:
        """Replace the edges of a compute-only schedule.

        >>> from penstock.ir.edges import Edge, chain
        >>> schedule = Schedule([["0F0", "2F0", "2B0", "0B0"], ["1F0", "1B0"]])
        >>> schedule.with_edges([*chain(3), Edge(0, (2,), "skip")])
        <Schedule: 2 ranks, 3 stages, 1 microbatch, 6 actions, 3 edges>

        Raises:
            EdgeError: an edge goes backwards, or to a stage that does not exist.
            ScheduleError: the schedule is lowered, so its transfers are those of its present edges.
        """
        if self.lowered:
            raise ScheduleError("a lowered schedule has the transfers of its edges; replace the edges, then lower it")
        other = self.with_codes(self._codes, self._offsets)
        object.__setattr__(other, "_edges", wiring.checked_edges(edges, self.stages))
        return other

    def _fill(
        self,
        rows: Sequence[Codes],
        placement: Placement | None,
        microbatches: int | None,
        metadata: Mapping[str, Any] | None,
        edges: Iterable[Edge] | None,
    ) -> None:
        if not rows:
            raise ScheduleError("a schedule needs at least one rank, but there are no rows")
        if placement is not None and not isinstance(placement, Placement):
            raise PlacementError(f"placement must be a Placement, got {placement!r}")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise ScheduleError(f"metadata must be a mapping, got {metadata!r}")
        if placement is not None and placement.ranks != len(rows):
            raise PlacementError(f"the placement is for {placement.ranks} ranks, but there are {len(rows)} rows")
        codes = _frozen(np.concatenate(rows, dtype=np.int64))
        offsets = _frozen(np.array([0, *accumulate(map(len, rows))], np.int64))
        put = object.__setattr__
        put(self, "_codes", codes)
        put(self, "_offsets", offsets)
        put(self, "_rows", {})
        put(self, "_hash", None)
        put(self, "_metadata", MappingProxyType(_copied(metadata or {})))
        put(self, "_placement", placement or _derived_placement(rows))
        put(self, "_edges", None if edges is None else wiring.checked_edges(edges, self._placement.stages))
        if microbatches is None:
            microbatches = packed.largest(codes)[1] + 1
        put(self, "_microbatches", whole_number("microbatches", microbatches, most=LARGEST_MICROBATCH + 1))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self._offsets) - 1

    @property
    def stages(self) -> int:
        """The number of stages, on all ranks together."""
        return self._placement.stages

    @property
    def microbatches(self) -> int:
        """The number of microbatches in a training step."""
        return self._microbatches

    @property
    def placement(self) -> Placement:
        """Which rank holds which stage."""
        return self._placement

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Additional information, e.g. its name; kept in JSON files."""
        return self._metadata

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Which values go from which stage to which later ones; by default from every stage to the next."""
        return wiring.chain(self.stages) if self._edges is None else self._edges

    @property
    def links(self) -> tuple[Link, ...]:
        """What stages send each other for each microbatch, by source and target."""
        return wiring.links(self.edges)

    @property
    def is_chain(self) -> bool:
        """Whether every stage passes one value to the next one, and nothing else."""
        return self._edges is None or wiring.is_chain(self._edges, self.stages)

    @property
    def actions(self) -> Sequence[Row]:
        """The row of each rank: actions, and None for idle steps. Rows are unpacked on first access."""
        return _Rows(self)

    @property
    def steps(self) -> int:
        """The length of the longest row."""
        return max(len(packed.cell_starts(self.codes_of(rank))) for rank in range(self.ranks))

    @property
    def compute_only(self) -> bool:
        """Whether it contains only forwards, backwards, overlaps and idle steps."""
        return bool(packed.is_compute_or_idle(self._codes).all())

    @property
    def lowered(self) -> bool:
        """Whether it contains sends, receives, sharding or reductions: the opposite of ``compute_only``."""
        return not self.compute_only

    @property
    def codes(self) -> Codes:
        """All packed actions, rank after rank; read-only."""
        return self._codes

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each rank begins in ``codes``, and finally where the last one ends; read-only."""
        return self._offsets

    def codes_of(self, rank: int) -> Codes:
        """Return the packed actions of one rank; read-only."""
        number = range(self.ranks)[rank]
        return self._codes[self._offsets[number] : self._offsets[number + 1]]

    def grid(
        self,
        *,
        aligned: bool | None = None,
        mark: grid.Mark | Sequence[grid.Mark] | None = None,
        message: str = "",
        ranks: range | None = None,
        steps: range | None = None,
    ) -> str:
        """Draw it as text: a line per rank, a column per step.

        Args:
            aligned: True draws every action in the column of the earliest step at which it could run if each took
                one step, with ``.`` where its rank waits; False draws the rows cell by cell, as written. By default,
                a compute-only schedule without idle steps is aligned, unless a step is marked.
            mark: the (rank, step) to point at, or several; steps count the cells of the rank from 0.
            message: the text to write at the mark.
            ranks: draw only these ranks.
            steps: draw only these columns.
        """
        return grid.draw(self, aligned=aligned, mark=mark, message=message, ranks=ranks, steps=steps)

    def write(self, path: str | Path) -> None:
        """Write it to a ``.csv``, ``.json`` or ``.txt`` file, completely or not at all."""
        from penstock.ir import formats  # formats build schedules, so they import this module

        formats.write(self, path)

    def _repr_html_(self) -> str:
        """Draw it in a notebook."""
        return str(import_module("penstock.view.notebook").schedule_html(self))  # by name: a higher layer

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self._microbatches == other._microbatches
            and self._placement == other._placement
            and self._wiring == other._wiring
            and np.array_equal(self._offsets, other._offsets)
            and np.array_equal(self._codes, other._codes)
        )

    def __hash__(self) -> int:
        if self._hash is None:
            codes, offsets = self._codes.tobytes(), self._offsets.tobytes()
            content = (self._microbatches, self._placement, self._wiring, offsets, codes)
            object.__setattr__(self, "_hash", hash(content))
            assert self._hash is not None
        return self._hash

    @property
    def _wiring(self) -> tuple[Edge, ...] | None:
        """The edges without the names of their values; None for a chain."""
        return None if self.is_chain else tuple(edge._replace(value="") for edge in self.edges)

    @property
    def summary(self) -> str:
        """Its name, if it has one, and its sizes, in one line."""
        name = str(self._metadata.get("name", ""))
        name = f" {name if name.isprintable() else repr(name)}" if name else ""
        actions = int(np.count_nonzero(self._codes) - np.count_nonzero(packed.is_joined(self._codes)))
        counts = [
            _counted(self.ranks, "rank"),
            _counted(self.stages, "stage"),
            _counted(self._microbatches, "microbatch"),
            _counted(actions, "action"),
            *([] if self.is_chain else [_counted(len(self.edges), "edge")]),
        ]
        return f"Schedule{name}: {', '.join(counts)}"

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a schedule is immutable (setting {name!r}); build a new one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a schedule is immutable (deleting {name!r}); build a new one")

    def __copy__(self) -> Schedule:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Schedule:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        rows = [self.codes_of(rank) for rank in range(self.ranks)]
        return _unpickle, (rows, self._placement, self._microbatches, dict(self._metadata), self._edges)


class _Rows(Sequence[Row]):
    """The rows of a schedule, each unpacked when it is first accessed."""

    __slots__ = ("_schedule",)

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    @overload
    def __getitem__(self, rank: int) -> Row: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, rank: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(rank, slice):
            return tuple(self)[rank]
        number = range(len(self))[rank]
        made = self._schedule._rows
        if number not in made:
            made[number] = packed.unpack_cells(self._schedule.codes_of(number))
        return made[number]

    def __len__(self) -> int:
        return self._schedule.ranks

    def __iter__(self) -> Iterator[Row]:
        return (self[rank] for rank in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or not all(isinstance(row, Sequence) for row in other):
            return NotImplemented
        return list(self) == [tuple(row) for row in other]

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _frozen(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a copy that can never be made writeable."""
    return np.frombuffer(np.ascontiguousarray(numbers, np.int64).tobytes(), np.int64)


def _copied(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that shares nothing mutable."""
    return {key: value if isinstance(value, str) else deepcopy(value) for key, value in metadata.items()}


def _in_rank_order(rows: Mapping[int, Iterable[Cell]] | Iterable[Iterable[Cell]]) -> list[Iterable[Cell]]:
    if isinstance(rows, str):
        raise ScheduleError("expected rows of cells, got text; use Schedule.from_text to parse text")
    if not isinstance(rows, Iterable):
        raise ScheduleError(f"expected rows of cells, got {rows!r}")
    if not isinstance(rows, Mapping):
        return list(rows)
    if (gap := first_gap(rows)) is not None:
        raise ScheduleError(
            f"{len(rows)} rows must be for ranks 0 to {len(rows) - 1}, but there is none for rank {gap}"
        )
    return [rows[rank] for rank in range(len(rows))]


def _checked_cells(rank: int, row: Iterable[Cell]) -> list[Action | None]:
    if isinstance(row, str) or not isinstance(row, Iterable):
        raise ScheduleError(f"the row of rank {rank} must be a list of cells, e.g. ['0F0', None, '0B0'], got {row!r}")
    cells: list[Action | None] = []
    for cell in row:
        if cell is None or isinstance(cell, Action):
            cells.append(cell)
        elif isinstance(cell, str) or hasattr(cell, "computation_type"):  # PyTorch's actions have the same text form
            cells.append(parse_cell(str(cell), row=rank + 1, cell=len(cells) + 1))
        else:
            raise ScheduleError(
                f"rank {rank}, step {len(cells)}: a cell must be an Action, its text or None, got {cell!r}"
            )
    return cells


def _derived_placement(rows: Sequence[Codes]) -> Placement:
    """Place each stage on the rank that has its actions."""
    rank_of: dict[int, int] = {}
    for rank, codes in enumerate(rows):
        busy = np.flatnonzero(codes)
        if not len(busy):
            raise PlacementError(
                f"rank {rank} has no actions, so its stages cannot be inferred; remove its row, or pass placement= "
                "(or use a .json file)",
                places=[(rank, 0)],
            )
        for stage in np.unique(packed.stages(codes[busy])).tolist():
            if (other := rank_of.setdefault(stage, rank)) != rank:
                places = [(home, _first_step(rows[home], stage)) for home in (other, rank)]
                where = " and ".join(f"rank {home} (step {step})" for home, step in places)
                raise PlacementError(f"stage {stage} is on {where}", stage=stage, places=places)
    if (gap := first_gap(rank_of)) is not None:
        raise PlacementError(
            f"no rank runs stage {gap}, although there is a stage {max(rank_of)}; add its actions, or pass placement= "
            "(or use a .json file)",
            stage=gap,
        )
    return Placement.from_mapping(rank_of, len(rows))


def _first_step(codes: Codes, stage: int) -> int:
    here = (packed.stages(codes) == stage) & (codes != packed.IDLE)
    return int(np.cumsum(~packed.is_joined(codes))[here][0]) - 1


def _counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _unpickle(
    rows: Sequence[Codes],
    placement: Placement,
    microbatches: int,
    metadata: Mapping[str, Any],
    edges: tuple[Edge, ...] | None = None,
) -> Schedule:
    return Schedule.from_codes(rows, placement=placement, microbatches=microbatches, metadata=metadata, edges=edges)
