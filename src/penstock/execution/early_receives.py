"""When receives are posted, where messages do not stand in line: early, and beside a send to the same rank.

A message needs a moment until it can come, so its receive is posted some compute actions before it is needed; each that
is posted has a buffer. To post a receive is to tell the other rank, as to send is: a rank that is told of both at once
is woken up once. With small stages that is a good part of what a message costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

from penstock.ir.actions import RECV_B, RECV_F, SEND_B, SEND_F

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from penstock.ir.actions import Action

#: By how many compute actions a receive is posted earlier than it stands.
AHEAD: Final = 4
#: By how many more or fewer at most, to be beside a send.
LEEWAY: Final = 2


class Place(NamedTuple):
    """Where an operation of a rank stands.

    Attributes:
        computed: how many compute actions stand before it, the parts of an overlap each for themselves.
        sends_to: the rank that it sends to, if it does.
        receives_from: the rank that it receives from, if it does.
    """

    computed: int
    sends_to: int | None = None
    receives_from: int | None = None

    @classmethod
    def of(cls, action: Action, computed: int, rank_of: Callable[[int], int]) -> Self:
        """The place of an action; ``rank_of`` tells where a stage is."""
        kind, stage = action.computation_type, action.stage_index
        if kind in (SEND_F, SEND_B):
            return cls(computed, sends_to=rank_of(stage + 1 if kind is SEND_F else stage - 1))
        if kind in (RECV_F, RECV_B):
            return cls(computed, receives_from=rank_of(stage - 1 if kind is RECV_F else stage + 1))
        return cls(computed)


def computed_by(action: Action) -> int:
    """How many compute actions an action is."""
    return len(action.leaves) if action.is_compute else 0


def by_posting(places: Sequence[Place]) -> list[int]:
    """The order in which operations run, as numbers of places: receives are moved, all else stays in order.

    Those from one rank stay in order, too, and none is posted after a compute action that it stands before. Behind a
    send, or the wait for an earlier one, it may come: to post a send blocks nobody, and a send is waited for when
    another message has told that it was used, or will be whatever else this rank does. O(n log n): a sort.

    >>> send, receive, compute = Place(1, sends_to=0), Place(5, receives_from=0), [Place(number) for number in range(6)]
    >>> by_posting([*compute[:1], send, *compute[1:5], receive, *compute[5:]])
    [0, 1, 6, 2, 3, 4, 5, 7]
    """
    sends = {
        (place.computed, place.sends_to): number for number, place in enumerate(places) if place.sends_to is not None
    }

    def standing(number: int) -> tuple[int, int, int]:
        computed, _, source = places[number]
        if source is None:
            return computed, number, -1
        moment = _beside_a_send(computed - AHEAD, source, sends)
        return moment, sends.get((moment, source), -1), number

    return sorted(range(len(places)), key=standing)


def _beside_a_send(moment: int, peer: int, sends: Container[tuple[int, int | None]]) -> int:
    """The moment nearest to this one at which something is sent to the peer; this one if there is none in reach."""
    for earlier in range(moment, moment - LEEWAY - 1, -1):
        if (earlier, peer) in sends:
            return earlier
    for later in range(moment + 1, moment + LEEWAY + 1):
        if (later, peer) in sends:
            return later
    return moment
