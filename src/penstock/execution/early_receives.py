"""Posts receives early, and next to a send to the same rank, where messages do not queue in lanes.

A message needs a moment to arrive, so its receive is posted some compute actions before it is needed; each posted
receive holds a buffer. Posting a receive notifies the other rank, as a send does: a rank that is notified of both at
once wakes up once. With small stages that is a large part of the cost of a message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

#: By how many compute actions a receive is posted ahead of its place.
LEAD: Final = 4
#: By how many more or fewer at most, to be beside a send.
LEEWAY: Final = 2


class Slot(NamedTuple):
    """The place of an operation in a rank's row.

    Attributes:
        computed: how many compute actions come before it; the parts of an overlap count one by one.
        sends_to: the rank that it sends to, if it does.
        receives_from: the rank that it receives from, if it does.
    """

    computed: int
    sends_to: int | None = None
    receives_from: int | None = None


def order_with_early_receives(slots: Sequence[Slot]) -> list[int]:
    """Move receives ahead; return the order in which operations run, as indices of slots. O(n log n): a sort.

    All else stays in order, and so do the receives from one rank. No receive is posted after a compute action that it
    precedes. It may move past a send, or past the wait for one: posting a send never blocks, and a send is waited for
    only when its message has been used, or will be used regardless of what this rank does.

    >>> send, receive, compute = Slot(1, sends_to=0), Slot(5, receives_from=0), [Slot(number) for number in range(6)]
    >>> order_with_early_receives([*compute[:1], send, *compute[1:5], receive, *compute[5:]])
    [0, 1, 6, 2, 3, 4, 5, 7]
    """
    sends = {(slot.computed, slot.sends_to): number for number, slot in enumerate(slots) if slot.sends_to is not None}

    def sort_key(number: int) -> tuple[int, int, int]:
        computed, _, source = slots[number]
        if source is None:
            return computed, number, -1
        moment = _beside_a_send(computed - LEAD, source, sends)
        return moment, sends.get((moment, source), -1), number

    return sorted(range(len(slots)), key=sort_key)


def _beside_a_send(moment: int, peer: int, sends: Container[tuple[int, int | None]]) -> int:
    """Find the moment nearest to this one at which something is sent to the peer; this one if none is in reach."""
    for earlier in range(moment, moment - LEEWAY - 1, -1):
        if (earlier, peer) in sends:
            return earlier
    for later in range(moment + 1, moment + LEEWAY + 1):
        if (later, peer) in sends:
            return later
    return moment
