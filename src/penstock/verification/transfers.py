"""Everything that goes to another rank is sent once and received once, in time; nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.graph.action_table import NOWHERE
from penstock.graph.array_blocks import blocks
from penstock.ir.actions import Action
from penstock.ir.dependencies import TRANSFERS
from penstock.verification.findings import Finding, Problem, action_at, at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from penstock.graph.action_table import Leaves
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
        yield _unmatched(leaves, sends, transfer, transfer.receive)
        yield _unmatched(leaves, receives, transfer, transfer.send)
        yield from _untimely(leaves, transfer, sends, receives)
        yield from _unsent(leaves, transfer)


def _all_well(leaves: Leaves, transfer: Transfer) -> bool:
    """Whether everything that this kind of transfer is for is sent once and received once, in time."""
    sent, received = leaves.table(transfer.send), leaves.table(transfer.receive)
    made, needed = leaves.table_of_any(transfer.made_by), leaves.table_of_any(transfer.needed_by)
    count = 0
    for block in blocks(len(needed)):
        users = (needed[block] != NOWHERE).nonzero()[0] + block.start
        sources = users - transfer.stage_offset * leaves.stride
        home, source_home = leaves.home_of_slot[users], leaves.home_of_slot[sources]
        away = ((home != source_home) & (source_home != NOWHERE)).nonzero()[0]
        users, sources = users[away], sources[away]
        maker, receive = made[sources], received[users]
        in_time = (maker < sent[sources]) & (receive < needed[users])
        if not (in_time & (np.minimum(maker, receive) != NOWHERE)).all():
            return False
        count += len(users)
    return count == leaves.count(transfer.send) == leaves.count(transfer.receive)


def _across(leaves: Leaves, kind: ComputationType, offset: int) -> Generator[Problem, None, Ints]:
    """The operations of this type that go between two ranks; the others are problems."""
    mine = leaves.are_in_range(kind)
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


def _unmatched(leaves: Leaves, mine: Ints, transfer: Transfer, other: ComputationType) -> Problem:
    """Operations whose other side, which is of this type, is not there."""
    receiving = other is transfer.receive
    offset = transfer.stage_offset if receiving else -transfer.stage_offset
    partners = transfer.needed_by if receiving else transfer.made_by

    def tell(place: int) -> Finding:
        stage, microbatch = int(leaves.stage[place]) + offset, int(leaves.microbatch[place])
        absent, rank = Action(stage, other, microbatch), int(leaves.home[stage])
        partner = int(leaves.find_any(partners, np.array(stage), np.array(microbatch)))
        where = f" {'before' if receiving else 'behind'} {action_at(leaves, partner)}" if partner != NOWHERE else ""
        return at(leaves, "unmatched", f"{{}} has no {absent} on rank {rank}", f"add {absent}{where} on rank {rank}")(
            place
        )

    alone = leaves.find(other, leaves.stage[mine] + offset, leaves.microbatch[mine]) == NOWHERE
    return Problem("unmatched", mine[alone], tell)


def _untimely(leaves: Leaves, transfer: Transfer, sends: Ints, receives: Ints) -> Iterator[Problem]:
    maker = leaves.find_any(transfer.made_by, leaves.stage[sends], leaves.microbatch[sends])
    early = (maker > sends) & (leaves.rank[maker] == leaves.rank[sends])

    def tell_early(number: int) -> Finding:
        made = action_at(leaves, maker[number])
        words, fix = f"{{}} comes before {made}, which makes what it sends", f"move it behind {made}"
        return at(leaves, "send_too_early", words, fix, maker[number])(sends[number])

    yield Problem("send_too_early", early.nonzero()[0], tell_early)
    user = leaves.find_any(transfer.needed_by, leaves.stage[receives], leaves.microbatch[receives])
    late = (user != NOWHERE) & (user < receives) & (leaves.rank[user] == leaves.rank[receives])

    def tell_late(number: int) -> Finding:
        used = action_at(leaves, user[number])
        words, fix = f"{{}} comes after {used}, which uses it", f"move it before {used}"
        return at(leaves, "receive_too_late", words, fix, user[number])(receives[number])

    yield Problem("receive_too_late", late.nonzero()[0], tell_late)


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
        sender, receiver = int(leaves.home[send.stage_index]), int(leaves.home[stage])
        words = f"{{}} needs what stage {send.stage_index} makes on rank {sender}, and nobody sends it"
        fix = f"add {send} on rank {sender} and {receive} on rank {receiver}"
        return at(leaves, "not_transferred", words, fix)(place)

    return tell
