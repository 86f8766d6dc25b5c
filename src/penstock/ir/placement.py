"""Defines which rank holds which stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Final, SupportsIndex

from penstock.errors import PlacementError
from penstock.ir.actions import LARGEST_STAGE
from penstock.ir.numbers import whole_number

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

#: More stages than any model has layers.
MOST_STAGES: Final = LARGEST_STAGE + 1


@dataclass(frozen=True, slots=True)
class Placement:
    """Maps stages to ranks and back.

    >>> Placement.loop(ranks=2, stages=4)
    Placement(rank_of=(0, 1, 0, 1), ranks=2)
    >>> Placement.v(ranks=2, stages=4).stages_of(0)
    (0, 3)
    >>> Placement.from_rows([[0, 1, 4], [2, 3]]).rank_of[4]
    0

    Attributes:
        rank_of: the rank of each stage.
        ranks: the number of ranks; a rank may hold no stage.
    """

    rank_of: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", whole_number("ranks", self.ranks, least=1))
        given: object = self.rank_of
        if not isinstance(given, Iterable):
            raise PlacementError(f"rank_of must list the rank of each stage, e.g. (0, 1, 1, 0), got {given!r}")
        object.__setattr__(self, "rank_of", tuple(map(_plain, given)))
        if len(self.rank_of) > MOST_STAGES:
            raise PlacementError(f"there are {len(self.rank_of)} stages; at most {MOST_STAGES} are possible")
        for stage, rank in enumerate(self.rank_of):
            if not 0 <= rank < self.ranks:
                raise PlacementError(
                    f"stage {stage} is placed on rank {rank}, but the ranks are 0 to {self.ranks - 1}", stage=stage
                )

    @classmethod
    def loop(cls, ranks: int, stages: int) -> Placement:
        """Place stage i on rank i mod ``ranks``."""
        ranks, stages = whole_number("ranks", ranks, least=1), whole_number("stages", stages, most=MOST_STAGES)
        return cls(tuple(stage % ranks for stage in range(stages)), ranks)

    @classmethod
    def v(cls, ranks: int, stages: int) -> Placement:
        """Place stages down the ranks and up again, so that neighbours at a turn share a rank."""
        ranks, stages = whole_number("ranks", ranks, least=1), whole_number("stages", stages, most=MOST_STAGES)
        there_and_back = (*range(ranks), *reversed(range(ranks)))
        return cls(tuple(there_and_back[stage % (2 * ranks)] for stage in range(stages)), ranks)

    @classmethod
    def from_mapping(cls, rank_of: Mapping[int, int], ranks: int | None = None) -> Placement:
        """Build from a mapping of stage to rank. Without ``ranks``, the highest rank in the mapping is the last."""
        if (gap := first_gap(rank_of)) is not None:
            raise PlacementError(
                f"stages must be numbered from 0 without gaps, but no rank holds stage {gap}", stage=gap
            )
        count = max(map(_plain, rank_of.values()), default=-1) + 1 if ranks is None else ranks
        return cls(tuple(rank_of[stage] for stage in range(len(rank_of))), count)

    @classmethod
    def from_rows(cls, stages_of: Sequence[Iterable[int]]) -> Placement:
        """Build from the stages of each rank, in any order."""
        mapping: dict[int, int] = {}
        for rank, stages in enumerate(stages_of):
            for stage in stages:
                if _plain(stage) in mapping:
                    raise PlacementError(f"stage {stage} is on rank {mapping[stage]} and on rank {rank}", stage=stage)
                mapping[_plain(stage)] = rank
        return cls.from_mapping(mapping, len(stages_of))

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank, ascending. O(stages)."""
        rows: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            rows[rank].append(stage)
        return tuple(map(tuple, rows))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        rank = range(self.ranks)[rank]
        return tuple(stage for stage, home in enumerate(self.rank_of) if home == rank)


def first_gap(numbers: Collection[int]) -> int | None:
    """Return the first number missing from 0, 1, 2, ...; None if distinct ``numbers`` have no gap.

    O(n) in how many numbers there are, however large they are.
    """
    return next((number for number in range(len(numbers)) if number not in numbers), None)


def _plain(number: SupportsIndex) -> int:
    """Convert a stage or a rank to ``int``; whether it exists is checked elsewhere."""
    try:
        return index(number)
    except TypeError:
        raise PlacementError(f"stages and ranks must be integers, got {number!r}") from None
