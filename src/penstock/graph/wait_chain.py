"""Describes in one sentence which rank waits for which, in a proof of deadlock as in a step that hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A sentence with more ranks is no clearer; the rest are counted.
MAX_LINKS: Final = 12


class WaitingRank(NamedTuple):
    """One link of a chain: a rank that waits for the next one.

    Attributes:
        rank: its number.
        action: what it waits in.
        blocked: the action that is held up behind it, on the rank or in a lane, if another rank waits for that one.
        is_lane_full: whether it waits for room in a lane.
    """

    rank: int
    action: str
    blocked: str | None = None
    is_lane_full: bool = False

    def __str__(self) -> str:
        ahead = "" if self.blocked is None else f", ahead of {self.blocked},"
        return f"waits in {self.action}{ahead}{' (its lane is full)' if self.is_lane_full else ''}"


def describe_wait_chain(links: Sequence[WaitingRank], end: str) -> str:
    """Write a chain of waits as a sentence.

    >>> chain = [WaitingRank(0, "0SEND_F1"), WaitingRank(1, "1SEND_B0", blocked="1RECV_F1")]
    >>> describe_wait_chain(chain, "rank 0")
    'rank 0 waits in 0SEND_F1 for rank 1, which waits in 1SEND_B0, ahead of 1RECV_F1, for rank 0'

    Args:
        links: the ranks that wait, each for the next.
        end: what the last of them waits for: the first one again, or a rank that does not wait.
    """
    first, *others = links[:MAX_LINKS]
    words = [f"rank {first.rank} {first} for ", *(f"rank {each.rank}, which {each} for " for each in others)]
    if len(links) > MAX_LINKS:
        words.append(f"{len(links) - MAX_LINKS} more ranks, and finally for ")
    return "".join(words) + end
