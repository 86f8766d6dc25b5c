"""Checks that everything another rank needs is sent once and received once, in time, and nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.graph.action_table import NONE
from penstock.graph.array_blocks import blocks
from penstock.ir.actions import Action
from penstock.ir.dependencies import TRANSFERS
from penstock.verification.findings import Finding, Problem, action_at, describe_at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from penstock.graph.action_table import ActionTable
    from penstock.ir.actions import ComputationType
    from penstock.ir.dependencies import Transfer

    Ints = NDArray[np.signedinteger[Any]]


def check_transfers(actions: ActionTable) -> Iterator[Problem]:
    """Find wrong sends and receives. Finds nothing in a schedule without any."""
    if not actions.has_transfers or all(_is_consistent(actions, transfer) for transfer in TRANSFERS):
        return
    for transfer in TRANSFERS:
        sends = yield from _across(actions, transfer.send, transfer.stage_offset)
        receives = yield from _across(actions, transfer.receive, -transfer.stage_offset)
        yield _unmatched(actions, sends, transfer, transfer.receive)
        yield _unmatched(actions, receives, transfer, transfer.send)
        yield from _untimely(actions, transfer, sends, receives)
        yield from _unsent(actions, transfer)


def _is_consistent(actions: ActionTable, transfer: Transfer) -> bool:
    """Return whether everything that needs this type of transfer is sent once and received once, in time."""
    sent, received = actions.table(transfer.send), actions.table(transfer.receive)
    made, needed = actions.first_table(transfer.made_by), actions.first_table(transfer.needed_by)
    count = 0
    for block in blocks(len(needed)):
        users = (needed[block] != NONE).nonzero()[0] + block.start
        sources = users - transfer.stage_offset * actions.stride
        home, source_home = actions.rank_of_slot[users], actions.rank_of_slot[sources]
        away = ((home != source_home) & (source_home != NONE)).nonzero()[0]
        users, sources = users[away], sources[away]
        maker, receive = made[sources], received[users]
        defer_with_turns = (maker < sent[sources]) & (receive < needed[users])
        if not (defer_with_turns & (np.minimum(maker, receive) != NONE)).all():
            return False
        count += len(users)
    return count == actions.count(transfer.send) == actions.count(transfer.receive)


def _across(actions: ActionTable, kind: ComputationType, offset: int) -> Generator[Problem, None, Ints]:
    """Return the operations of this type that go between two ranks; report the others as problems."""
    mine = actions.positions_in_range(kind)
    peer = actions.stage[mine] + offset
    inside = (peer >= 0) & (peer < actions.stages)
    yield Problem(
        "misdirected",
        mine[~inside],
        describe_at(actions, "misdirected", "{} has no neighbouring stage to exchange with", "drop it"),
    )
    mine, peer = mine[inside], peer[inside]
    away = actions.rank_of_stage[peer] != actions.rank_of_stage[actions.stage[mine]]
    yield Problem(
        "self_directed",
        mine[~away],
        describe_at(
            actions, "self_directed", "{} is between two stages on the same rank", "drop it: they share memory"
        ),
    )
    return np.asarray(mine[away])


def _unmatched(actions: ActionTable, mine: Ints, transfer: Transfer, other: ComputationType) -> Problem:
    """Report operations whose counterpart, of type ``other``, is missing."""
    receiving = other is transfer.receive
    offset = transfer.stage_offset if receiving else -transfer.stage_offset
    partners = transfer.needed_by if receiving else transfer.made_by

    def describe(position: int) -> Finding:
        stage, microbatch = int(actions.stage[position]) + offset, int(actions.microbatch[position])
        absent, rank = Action(stage, other, microbatch), int(actions.rank_of_stage[stage])
        partner = int(actions.find_any(partners, np.array(stage), np.array(microbatch)))
        where = f" {'before' if receiving else 'after'} {action_at(actions, partner)}" if partner != NONE else ""
        return describe_at(
            actions, "unmatched", f"{{}} has no {absent} on rank {rank}", f"add {absent}{where} on rank {rank}"
        )(position)

    alone = actions.find(other, actions.stage[mine] + offset, actions.microbatch[mine]) == NONE
    return Problem("unmatched", mine[alone], describe)


def _untimely(actions: ActionTable, transfer: Transfer, sends: Ints, receives: Ints) -> Iterator[Problem]:
    maker = actions.find_any(transfer.made_by, actions.stage[sends], actions.microbatch[sends])
    early = (maker > sends) & (actions.rank[maker] == actions.rank[sends])

    def describe_early(number: int) -> Finding:
        made = action_at(actions, maker[number])
        words, fix = f"{{}} comes before {made}, which produces what it sends", f"move it after {made}"
        return describe_at(actions, "send_too_early", words, fix, maker[number])(sends[number])

    yield Problem("send_too_early", early.nonzero()[0], describe_early)
    user = actions.find_any(transfer.needed_by, actions.stage[receives], actions.microbatch[receives])
    late = (user != NONE) & (user < receives) & (actions.rank[user] == actions.rank[receives])

    def describe_late(number: int) -> Finding:
        used = action_at(actions, user[number])
        words, fix = f"{{}} comes after {used}, which uses it", f"move it before {used}"
        return describe_at(actions, "receive_too_late", words, fix, user[number])(receives[number])

    yield Problem("receive_too_late", late.nonzero()[0], describe_late)


def _unsent(actions: ActionTable, transfer: Transfer) -> Iterator[Problem]:
    """Report what one rank produces and another uses, but is neither sent nor received."""
    users = actions.first_placed(transfer.needed_by)
    source = actions.stage[users] - transfer.stage_offset
    inside = (source >= 0) & (source < actions.schedule.stages)
    users, source = users[inside], source[inside]
    away = actions.rank_of_stage[source] != actions.rank_of_stage[actions.stage[users]]
    users, source = users[away], source[away]
    sent = actions.find(transfer.send, source, actions.microbatch[users])
    received = actions.find(transfer.receive, actions.stage[users], actions.microbatch[users])
    yield Problem(
        "not_transferred",
        users[(sent == NONE) & (received == NONE)],
        _needing(actions, transfer),
    )


def _needing(actions: ActionTable, transfer: Transfer) -> Callable[[int], Finding]:
    def describe(position: int) -> Finding:
        stage, microbatch = int(actions.stage[position]), int(actions.microbatch[position])
        send = Action(stage - transfer.stage_offset, transfer.send, microbatch)
        receive = Action(stage, transfer.receive, microbatch)
        sender, receiver = int(actions.rank_of_stage[send.stage_index]), int(actions.rank_of_stage[stage])
        words = f"{{}} needs the output of stage {send.stage_index} on rank {sender}, which is not sent"
        fix = f"add {send} on rank {sender} and {receive} on rank {receiver}"
        return describe_at(actions, "not_transferred", words, fix)(position)

    return describe
