"""Orders the work of generation: which microbatch is in which stage when, so that every rank always has work.

A token of a microbatch passes all stages, and the next one can begin when it is known. Time is divided into turns: in
one, a rank runs one stage for one microbatch. All ranks compute the same turns, so each knows what the others send.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Job(NamedTuple):
    """A stage that runs for a new token of a microbatch."""

    stage: int
    microbatch: int
    token: int


class Turns:
    """Says what runs in each turn.

    With as many microbatches as ranks, each rank has work in each turn:

    >>> turns = Turns(rank_of=(0, 1), microbatches=2)
    >>> for turn in range(4):
    ...     print([f"{stage}F{microbatch} of token {token}" for stage, microbatch, token in turns.jobs(turn)])
    ['0F0 of token 0']
    ['1F0 of token 0', '0F1 of token 0']
    ['0F0 of token 1', '1F1 of token 0']
    ['1F0 of token 1', '0F1 of token 1']

    Args:
        rank_of: the rank of each stage.
        microbatches: how many microbatches there are.

    Attributes:
        period: how many turns there are from a token of a microbatch to its next one.
        starts: the turn in which each microbatch begins.
    """

    def __init__(self, rank_of: Sequence[int], microbatches: int) -> None:
        self._stages = len(rank_of)
        self.period, self.starts = _find_starts(rank_of, microbatches)

    def jobs(self, turn: int) -> Iterator[Job]:
        """Yield what runs in a turn, on all ranks, in an order that is the same on all."""
        for microbatch, start in enumerate(self.starts):
            token, stage = divmod(turn - start, self.period)
            if token >= 0 and stage < self._stages:
                yield Job(stage, microbatch, token)


def _find_starts(rank_of: Sequence[int], microbatches: int) -> tuple[int, list[int]]:
    """Find the shortest period in which no rank has two jobs in one turn, and when microbatches begin.

    Each microbatch begins as early as those before it allow. If that fails, a longer period is tried; the longest has
    one microbatch after the other.
    """
    busiest = max(map(rank_of.count, rank_of))
    for period in count(max(len(rank_of), microbatches * busiest)):
        taken: set[tuple[int, int]] = set()
        starts: list[int] = []
        for _ in range(microbatches):
            for start in range(period):
                turns = {(rank, (start + stage) % period) for stage, rank in enumerate(rank_of)}
                if taken.isdisjoint(turns):
                    taken |= turns
                    starts.append(start)
                    break
            else:
                break
        if len(starts) == microbatches:
            return period, starts
    raise AssertionError("the loop above does not end")
