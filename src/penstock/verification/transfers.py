"""Checks that everything another rank needs is sent once and received once, in time, and nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.graph.action_table import NONE
from penstock.graph.array_blocks import blocks
from penstock.ir import packed
from penstock.ir.actions import Action
from penstock.ir.dependencies import TRANSFER_TYPES
from penstock.verification.findings import Finding, Problem, action_at, describe_at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.graph.action_table import ActionTable
    from penstock.ir.actions import ComputationType
    from penstock.ir.dependencies import Transfer

    Ints = NDArray[np.signedinteger[Any]]


def check_transfers(actions: ActionTable) -> Iterator[Problem]:
    """Find wrong sends and receives. Finds nothing in a schedule without any."""
    transfers = actions.routes.transfers
    if not actions.has_transfers or _are_consistent(actions, transfers):
        return
    yield from _undirected(actions)
    for transfer in transfers:
        sends = yield from _across(actions, transfer.send, transfer)
        receives = yield from _across(actions, transfer.receive, transfer)
        yield _unmatched(actions, sends, transfer, transfer.receive)
        yield _unmatched(actions, receives, transfer, transfer.send)
        yield from _untimely(actions, transfer, sends, receives)
        yield from _unsent(actions, transfer)


def _are_consistent(actions: ActionTable, transfers: Sequence[Transfer]) -> bool:
    """Return whether everything that needs a transfer is sent once and received once, in time, and nothing else is."""
    wanted = dict.fromkeys(TRANSFER_TYPES, 0)
    for transfer in transfers:
        count = _consistent_count(actions, transfer)
        if count is None:
            return False
        wanted[transfer.send] += count
        wanted[transfer.receive] += count
    return all(count == actions.count(kind) for kind, count in wanted.items())


def _consistent_count(actions: ActionTable, transfer: Transfer) -> int | None:
    """Return how many need this transfer, if all are sent and received in time; else None."""
    sent, received = (actions.table(kind, transfer.distance) for kind in (transfer.send, transfer.receive))
    made, needed = actions.first_table(transfer.made_by), actions.first_table(transfer.needed_by)
    linked, count = actions.routes.receivers(transfer), 0
    for block in blocks(len(needed)):
        users = (needed[block] != NONE).nonzero()[0] + block.start
        if linked is not None:
            users = users[linked[actions.stages_of_slots(users)]]
        sources = users - transfer.stage_offset * actions.stride
        home, source_home = actions.rank_of_slot[users], actions.rank_of_slot[sources]
        away = ((home != source_home) & (source_home != NONE)).nonzero()[0]
        users, sources = users[away], sources[away]
        maker, receive = made[sources], received[users]
        in_time = (maker < sent[sources]) & (receive < needed[users])
        if not (in_time & (np.minimum(maker, receive) != NONE)).all():
            return None
        count += len(users)
    return count


def _undirected(actions: ActionTable) -> Iterator[Problem]:
    """Report transfers over a distance that no link has."""
    if not actions.has_hops:
        return
    mine = actions.positions_in_range(*TRANSFER_TYPES)
    strange = actions.routes.number_of(packed.hops(actions.codes[mine]) + 1) == NONE
    yield Problem("misdirected", mine[strange], _without_link(actions))


def _without_link(actions: ActionTable) -> Callable[[int], Finding]:
    """Return a function that describes a transfer for which there is no link."""

    def describe(position: int) -> Finding:
        code = actions.codes[position : position + 1]
        source, target = sorted((int(packed.stages(code)[0]), int(packed.peers(code)[0])))
        action, words, fix = action_at(actions, position), "", "drop it"
        if action.peer_index is None and not (source >= 0 and target < actions.stages):
            words = "{} has no neighbouring stage to exchange with"
        elif any((link.source, link.target) == (source, target) for link in actions.schedule.links):
            words = f"{{}} is for an edge that has no gradient, from stage {source} to stage {target}"
        else:
            words = f"{{}} has no edge to go over: there is none from stage {source} to stage {target}"
            fix = f"drop it, or add the edge {source}>{target}" if target < actions.stages else fix
        return describe_at(actions, "misdirected", words, fix)(position)

    return describe


def _across(actions: ActionTable, kind: ComputationType, transfer: Transfer) -> Generator[Problem, None, Ints]:
    """Return the operations of this type that go between two ranks; report the others as problems."""
    mine = actions.within_distance(actions.positions_in_range(kind), transfer.distance)
    peer = actions.stage[mine] + (transfer.stage_offset if kind is transfer.send else -transfer.stage_offset)
    inside = (peer >= 0) & (peer < actions.stages)
    linked = actions.routes.receivers(transfer)
    if linked is not None:
        receiver = peer if kind is transfer.send else actions.stage[mine]
        inside &= linked[np.clip(receiver, 0, actions.stages - 1)]
    yield Problem("misdirected", mine[~inside], _without_link(actions))
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
        absent, rank = _action(stage, other, microbatch, -offset), int(actions.rank_of_stage[stage])
        partner = int(actions.find_any(partners, np.array(stage), np.array(microbatch)))
        where = f" {'before' if receiving else 'after'} {action_at(actions, partner)}" if partner != NONE else ""
        return describe_at(
            actions, "unmatched", f"{{}} has no {absent} on rank {rank}", f"add {absent}{where} on rank {rank}"
        )(position)

    found = actions.find(other, actions.stage[mine] + offset, actions.microbatch[mine], transfer.distance)
    alone = found == NONE
    return Problem("unmatched", mine[alone], describe)


def _action(stage: int, kind: ComputationType, microbatch: int, offset: int) -> Action:
    """Return the transfer of a stage with the one at this offset."""
    return Action(stage, kind, microbatch, peer_index=stage + offset if abs(offset) > 1 else None)


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
    linked = actions.routes.receivers(transfer)
    if linked is not None:
        users = users[linked[actions.stage[users]]]
    source = actions.stage[users] - transfer.stage_offset
    inside = (source >= 0) & (source < actions.schedule.stages)
    users, source = users[inside], source[inside]
    away = actions.rank_of_stage[source] != actions.rank_of_stage[actions.stage[users]]
    users, source = users[away], source[away]
    microbatch, distance = actions.microbatch[users], transfer.distance
    sent = actions.find(transfer.send, source, microbatch, distance)
    received = actions.find(transfer.receive, actions.stage[users], microbatch, distance)
    yield Problem(
        "not_transferred",
        users[(sent == NONE) & (received == NONE)],
        _needing(actions, transfer),
    )


def _needing(actions: ActionTable, transfer: Transfer) -> Callable[[int], Finding]:
    def describe(position: int) -> Finding:
        stage, microbatch = int(actions.stage[position]), int(actions.microbatch[position])
        send = _action(stage - transfer.stage_offset, transfer.send, microbatch, transfer.stage_offset)
        receive = _action(stage, transfer.receive, microbatch, -transfer.stage_offset)
        sender, receiver = int(actions.rank_of_stage[send.stage_index]), int(actions.rank_of_stage[stage])
        words = f"{{}} needs the output of stage {send.stage_index} on rank {sender}, which is not sent"
        fix = f"add {send} on rank {sender} and {receive} on rank {receiver}"
        return describe_at(actions, "not_transferred", words, fix)(position)

    return describe
