"""Says which tensors of a tie a rank takes care of, and which other ranks have some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import StageError

if TYPE_CHECKING:
    from penstock.execution.parameter_names import ParameterPlace
    from penstock.execution.ties import Member, Tie


@dataclass(frozen=True, slots=True)
class LocalTie:
    """The part of a tie that this rank has.

    Attributes:
        tie: the tie.
        holders: the distinct tensors of this rank, of which this rank takes care.
        members: what each of these is called.
        united: where this rank has the same tensors once more, with the number of the holder.
        ranks: all ranks that take care of such tensors, in the order in which gradients are summed.
    """

    tie: Tie
    holders: tuple[ParameterPlace, ...]
    members: tuple[Member, ...]
    united: tuple[tuple[Member, ParameterPlace, int], ...]
    ranks: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        """Whether there is another tensor to sum with, here or on another rank."""
        return len(self.ranks) > 1 or len(self.holders) > 1

    def check_united(self) -> None:
        """Refuse a tensor that has been replaced in one place only since the pipeline was made."""
        for member, place, number in self.united:
            if place.parameter is not self.holders[number].parameter:
                raise StageError(
                    f"{member} and {self.members[number]} were made one tensor, but one of them has been replaced "
                    "since; load, move or resize parameters before the pipeline is made, or in place",
                    stage=member.stage,
                )
