"""Finds when a rank may wait for its sends, to free their tensors as early as the wait costs nothing.

Of two rules, the earlier one applies:

- *proven*: a message from a peer was sent after everything ahead of it in the peer's row. Once a rank has used that
  message, all that the peer had used before has arrived, and the wait for it returns at once.
- *by level*: every action has a level, higher than the levels of all that it waits for. Before an action whose level is
  higher than that of the action that ends the send, a rank may wait for it: all that still waits has a higher level,
  so nothing deadlocks. Such a wait may block briefly, so it comes some compute actions later still, and only
  where messages do not queue in lanes: in a lane, a send can also wait for its turn. A send ends with the receive, or
  with the use of the message where a header announces its shapes: only then is the rest of it received.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.execution.messages import message_key, number_links, sent_by
from penstock.graph.action_table import NONE, ActionTable
from penstock.graph.longest_path import UNREACHED, longest_path
from penstock.ir import packed
from penstock.ir.actions import COMPUTE
from penstock.ir.dependencies import TRANSFERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.execution.messages import LinkNumbers
    from penstock.ir.actions import Action
    from penstock.ir.schedule import Schedule

    Ints = NDArray[np.signedinteger[Any]]

_SENDS: Final = tuple(transfer.send for transfer in TRANSFERS)
#: How much an action adds to the level: a compute action, and any other.
_COMPUTE: Final = 1000
_OTHER: Final = 1
#: How far after both ends of a message the wait for its send comes: transfers take time, and ranks vary in speed.
_SLACK: Final = 6 * _COMPUTE


class Releases(NamedTuple):
    """When a rank waits for its sends; messages are given by their keys.

    Attributes:
        after: for positions of its row, by peer, the messages to wait for after the action there.
        at_end: by peer (None if it is unknown), the messages to wait for at the end of the step.
    """

    after: Mapping[int, Mapping[int | None, Sequence[int]]]
    at_end: Mapping[int | None, Sequence[int]]


class _Messages(NamedTuple):
    """Messages as arrays; actions are given by their cells, counted through all ranks."""

    key: Ints
    sender: Ints
    receiver: Ints
    sent: Ints
    received: Ints
    used: Ints

    def select(self, wanted: Ints | NDArray[np.bool_]) -> _Messages:
        return _Messages(*(column[wanted] for column in self))


def find_releases(schedule: Schedule, rank: int, *, by_level: bool, with_headers: bool = False) -> Releases:
    """Find when a rank may wait for each of its sends. O(n log n) for n actions.

    Positions count the actions of the rank, without idle steps.

    Args:
        schedule: a lowered schedule.
        rank: whose sends.
        by_level: apply the second rule, too; only where messages do not queue in lanes.
        with_headers: a send ends when its message is used, since headers announce shapes.
    """
    table = ActionTable(_without_idle_steps(schedule))
    if not table.has_transfers:
        return Releases({}, {})
    messages = _messages(table)
    mine = messages.select((messages.sender == rank).nonzero()[0])
    begin, end = _cells_of(table, rank)
    release = np.full(len(mine.key), end)
    for peer in np.unique(mine.receiver).tolist():
        theirs = messages.select(((messages.sender == peer) & (messages.receiver == rank)).nonzero()[0])
        to_peer = (mine.receiver == peer).nonzero()[0]
        release[to_peer] = _proven(mine.used[to_peer], theirs, end)
    if by_level:
        ended = mine.used if with_headers else mine.received
        release = np.minimum(release, _released_by_level(table, mine.sent, ended, messages, begin, end))
    release[release < mine.sent] = end  # in a schedule that deadlocks
    return _collect(mine, release - begin, end - begin, _unmatched(schedule, rank, mine.key))


def release_at_end(
    row: Iterable[Action],
    microbatches: int,
    rank_of: Callable[[int], int | None],
    numbers: LinkNumbers | None = None,
) -> Releases:
    """Wait for all sends of a row at its end: correct for any row, regardless of the others.

    Args:
        row: the actions of a rank.
        microbatches: how many microbatches there are.
        rank_of: the rank of a stage; None if it is unknown.
        numbers: the links of the pipeline; without them, those of a chain.
    """
    at_end: dict[int | None, list[int]] = defaultdict(list)
    for message in filter(None, map(sent_by, row)):
        if numbers is None or message.link in numbers:
            at_end[rank_of(message.target)].append(message.key(microbatches, numbers))
    return Releases({}, dict(at_end))


def _without_idle_steps(schedule: Schedule) -> Schedule:
    busy = schedule.codes != packed.IDLE
    if busy.all():
        return schedule
    return schedule.with_codes(schedule.codes[busy], np.append(0, busy.cumsum())[schedule.offsets])


def _unmatched(schedule: Schedule, rank: int, known: Ints) -> Mapping[int | None, Sequence[int]]:
    """Find the messages that a rank sends and no action uses, by peer."""
    codes = schedule.codes_of(rank)
    sends = packed.kind_mask(_SENDS).take(packed.types(codes)).sum()
    if sends == len(known):
        return {}
    ranks = dict(enumerate(schedule.placement.rank_of))
    row = [action for action in packed.unpack_cells(codes) if action is not None]
    matched = set(known.tolist())
    numbers = None if schedule.is_chain else number_links(schedule.links)
    every = release_at_end(row, schedule.microbatches, ranks.get, numbers).at_end
    return {peer: [key for key in keys if key not in matched] for peer, keys in every.items()}


def _cells_of(table: ActionTable, rank: int) -> tuple[int, int]:
    first = table.first_cell
    return int(first[rank]), int(first[rank + 1])


def _messages(table: ActionTable) -> _Messages:
    """Find all messages that are sent, received and used, each by the rank that should."""
    found = []
    numbers = _number_table(table)
    for direction, nearest in enumerate(TRANSFERS):
        for distance in table.routes.distances:
            transfer = nearest.over(distance)
            offset = transfer.stage_offset * table.stride
            sends = table.table(transfer.send, distance)
            slots = (sends != NONE).nonzero()[0]
            stage, microbatch = table.stages_of_slots(slots), slots % table.stride - 1
            link = numbers[distance][np.minimum(stage, stage + transfer.stage_offset)]
            sent = sends[slots]
            received = table.table(transfer.receive, distance)[slots + offset]
            used = table.first_table(transfer.needed_by)[slots + offset]
            is_whole = (link != NONE) & (received != NONE) & (used != NONE)
            whole = (is_whole & (table.rank[received] == table.rank[used])).nonzero()[0]
            key = message_key(link[whole], microbatch[whole], table.microbatches, direction)
            places = [each[whole] for each in (sent, received, used)]
            cells = (table.cell[each].astype(np.int64) for each in places)
            found.append((key, table.rank[places[0]], table.rank[places[1]], *cells))
    return _Messages(*map(np.concatenate, zip(*found, strict=True)))


def _number_table(table: ActionTable) -> Mapping[int, Ints]:
    """Number the link from each stage, by distance; ``NONE`` if there is none."""
    found = {distance: np.full(table.stages + 1, NONE) for distance in table.routes.distances}
    for (source, target), number in number_links(table.schedule.links).items():
        found[target - source][source] = number
    return found


def _proven(used: Ints, theirs: _Messages, end: int) -> Ints:
    """Find the cell of this rank after which each message is proven to have been used; ``end`` for never."""
    order = theirs.used.argsort(kind="stable")
    reached = np.maximum.accumulate(theirs.sent[order]) if len(order) else theirs.sent
    number = reached.searchsorted(used, side="right")
    return np.append(theirs.used[order], end)[number]


def _released_by_level(table: ActionTable, sent: Ints, ended: Ints, messages: _Messages, begin: int, end: int) -> Ints:
    """Find the cell after which this rank's wait for each message cannot be part of a circle; ``end`` for never.

    ``sent`` are the cells of this rank's sends, and ``ended`` those that end them on other ranks.
    """
    levels = _levels(table, messages)
    if levels is None:
        return np.full(len(sent), end)
    over = np.maximum(levels[sent], levels[ended]) + _SLACK
    number = begin + levels[begin:end].searchsorted(over, side="right")
    return np.where(number < end, number - 1, end)


def _levels(table: ActionTable, messages: _Messages) -> Ints | None:
    """Compute the level of each cell, ascending on each rank; None if the schedule deadlocks."""
    cells = int(table.first_cell[-1])
    weight = np.full(cells, _OTHER, np.int64)
    weight[table.cell[packed.kind_mask(COMPUTE).take(table.kind).nonzero()[0]]] = _COMPUTE
    ahead = np.arange(cells - 1)[np.diff(np.repeat(np.arange(table.schedule.ranks), np.diff(table.first_cell))) == 0]
    source = np.concatenate([ahead, messages.sent])
    target = np.concatenate([ahead + 1, messages.used])
    start = longest_path(cells, source, target, weight[source])
    return None if (start == UNREACHED).any() else start + weight


def _collect(mine: _Messages, position: Ints, end: int, unmatched: Mapping[int | None, Sequence[int]]) -> Releases:
    after: dict[int, dict[int | None, list[int]]] = defaultdict(lambda: defaultdict(list))
    at_end: dict[int | None, list[int]] = defaultdict(list)
    order = np.lexsort((mine.used, position))
    columns = (mine.key[order], mine.receiver[order], position[order])
    for key, peer, place in zip(*(column.tolist() for column in columns), strict=True):
        (after[place][peer] if place < end else at_end[peer]).append(key)
    for peer, keys in unmatched.items():
        at_end[peer] += keys
    return Releases({place: dict(peers) for place, peers in after.items()}, dict(at_end))
