"""Orders microbatches in rounds, in which a rank with several stages takes its stages in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir import packed

if TYPE_CHECKING:
    from penstock.ir.actions import ComputationType
    from penstock.ir.packed import Codes


@dataclass(frozen=True, slots=True)
class Rounds:
    """Microbatches go through the stages of a rank in rounds: each stage runs a whole round before the next.

    Attributes:
        count: the number of rounds.
        size: the microbatches in a round; of ``count * size`` in total, the last may be padding.
    """

    count: int
    size: int

    @classmethod
    def of(cls, ranks: int, microbatches: int) -> Rounds:
        """Return the most rounds of equal size with at least ``ranks`` microbatches each.

        >>> Rounds.of(ranks=4, microbatches=10), Rounds.of(ranks=4, microbatches=11)
        (Rounds(count=2, size=5), Rounds(count=2, size=6))
        """
        count = max(1, microbatches // ranks)
        return cls(count, -(-microbatches // count))

    def stream(self, stages: tuple[int, ...], kind: ComputationType) -> Codes:
        """Return one type of action of these stages, which take turns in this order in every round."""
        shape = (self.count, len(stages), self.size)
        microbatches = np.arange(self.count * self.size).reshape(self.count, 1, self.size)
        in_turn = np.array(stages, np.int64).reshape(1, -1, 1)
        return np.broadcast_to(packed.pack(in_turn, kind, microbatches), shape).ravel()


def drop_padding(codes: Codes, microbatches: int) -> Codes:
    """Drop the microbatches that only pad a schedule to a size that has a pattern.

    No action waits for one of another microbatch, so what is left of an order that runs still runs.
    """
    wanted = packed.microbatches(codes) < microbatches
    return codes if wanted.all() else packed.select(codes, wanted)
