"""Everything that goes to another rank is sent once and received once, in time; nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.graph.leaves import NOWHERE
from penstock.ir.actions import Action
from penstock.ir.dependencies import TRANSFERS
from penstock.verification.findings import Finding, Problem, at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from penstock.graph.leaves import Leaves
    from penstock.ir.actions import ComputationType
    from penstock.ir.dependencies import Transfer

    Ints = NDArray[np.signedinteger[Any]]


def untransferred(leaves: Leaves) -> Iterator[Problem]:
    """What is wrong with sends and receives; nothing in a schedule that has none at all."""
    if not leaves.has_transfers or all(_all_well(leaves, transfer) for transfer in TRANSFERS):
        return
    for transfer in TRANSFERS:
        sends = yield from _across(leaves, transfer.send, transfer.stage_offset)
        receives = yield from _across(leaves, transfer.receive, -transfer.stage_offset)
        yield _unmatched(leaves, sends, transfer.receive, transfer.stage_offset)
        yield _unmatched(leaves, receives, transfer.send, -transfer.stage_offset)
        yield from _untimely(leaves, transfer, sends, receives)
        yield from _unsent(leaves, transfer)


def _all_well(leaves: Leaves, transfer: Transfer) -> bool:
    """Whether everything that this kind of transfer is for is sent once and received once, in time."""
    sends, receives = leaves.are(transfer.send), leaves.are(transfer.receive)
    made, needed = leaves.table_of_any(transfer.made_by), leaves.table_of_any(transfer.needed_by)
    users = (needed != NOWHERE).nonzero()[0]
    sources = users - transfer.stage_offset * leaves.microbatches
    exists = (sources >= 0) & (sources < len(needed))
    users, sources = users[exists], sources[exists]
    away = leaves.home_of_slot[users] != leaves.home_of_slot[sources]
    users, sources = users[away], sources[away]
    if not len(users) == len(sends) == len(receives):
        return False
    sent, received, maker = leaves.table(transfer.send)[sources], leaves.table(transfer.receive)[users], made[sources]
    in_time = (maker < sent) & (received < needed[users])
    return bool((in_time & (maker != NOWHERE) & (received != NOWHERE)).all())


def _across(leaves: Leaves, kind: ComputationType, offset: int) -> Generator[Problem, None, Ints]:
    """The operations of this type that go between two ranks; the others are problems."""
    mine = leaves.are(kind)
    mine = mine[leaves.in_range[mine]]
    peer = leaves.stage[mine] + offset
    inside = (peer >= 0) & (peer < leaves.stages)
    yield Problem(
        "misdirected",
        mine[~inside],
        at(leaves, "misdirected", "{} has no stage on its other side", "drop it"),
    )
    mine, peer = mine[inside], peer[inside]
    away = leaves.home[peer] != leaves.home[leaves.stage[mine]]
    yield Problem(
        "self_directed",
        mine[~away],
        at(leaves, "self_directed", "{} is between two stages on one rank", "drop it: they share memory"),
    )
    return np.asarray(mine[away])


def _unmatched(leaves: Leaves, mine: Ints, other: ComputationType, offset: int) -> Problem:
    alone = leaves.find(other, leaves.stage[mine] + offset, leaves.microbatch[mine]) == NOWHERE
    words = at(leaves, "unmatched", f"{{}} has no {other} on its other side", "add that, or drop this")
    return Problem("unmatched", mine[alone], words)


def _untimely(leaves: Leaves, transfer: Transfer, sends: Ints, receives: Ints) -> Iterator[Problem]:
    maker = leaves.find_any(transfer.made_by, leaves.stage[sends], leaves.microbatch[sends])
    yield Problem(
        "send_too_early",
        sends[(maker > sends) & (leaves.rank[maker] == leaves.rank[sends])],
        at(leaves, "send_too_early", "{} comes before what it sends is made", "move it behind that"),
    )
    user = leaves.find_any(transfer.needed_by, leaves.stage[receives], leaves.microbatch[receives])
    yield Problem(
        "receive_too_late",
        receives[(user != NOWHERE) & (user < receives) & (leaves.rank[user] == leaves.rank[receives])],
        at(leaves, "receive_too_late", "{} comes after what it receives is used", "move it before that"),
    )


def _unsent(leaves: Leaves, transfer: Transfer) -> Iterator[Problem]:
    """What is used on another rank than it is made on, and neither sent nor received."""
    users = leaves.first_at_home(transfer.needed_by)
    source = leaves.stage[users] - transfer.stage_offset
    inside = (source >= 0) & (source < leaves.schedule.stages)
    users, source = users[inside], source[inside]
    away = leaves.home[source] != leaves.home[leaves.stage[users]]
    users, source = users[away], source[away]
    sent = leaves.find(transfer.send, source, leaves.microbatch[users])
    received = leaves.find(transfer.receive, leaves.stage[users], leaves.microbatch[users])
    yield Problem(
        "not_transferred",
        users[(sent == NOWHERE) & (received == NOWHERE)],
        _needing(leaves, transfer),
    )


def _needing(leaves: Leaves, transfer: Transfer) -> Callable[[int], Finding]:
    def tell(place: int) -> Finding:
        stage, microbatch = int(leaves.stage[place]), int(leaves.microbatch[place])
        send = Action(stage - transfer.stage_offset, transfer.send, microbatch)
        receive = Action(stage, transfer.receive, microbatch)
        words = at(
            leaves,
            "not_transferred",
            "{} needs what another rank makes, and nobody sends it",
            f"add {send} and {receive}",
        )
        return words(place)

    return tell
