"""A rank's actions, compiled into the flat list of functions that a step runs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.execution.early_receives import Place, by_posting, computed_by
from penstock.execution.edges import check_unchanged
from penstock.ir.actions import BACKWARD_INPUT, FORWARD, FULL_BACKWARD, RECV_B, RECV_F, SEND_B, SEND_F

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.execution.step import Operation, Step
    from penstock.execution.transport import Progress
    from penstock.ir.actions import Action
    from penstock.ir.schedule import Schedule


class Program:
    """What one rank does in a step, in order.

    Attributes:
        actions: the action that each operation belongs to; None for the wait for the last sends.
        labels: the text of each of them.
        peers: for each the rank that it may have to wait for.
        waits: for each the text of the receive that it may have to wait for, or its own.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.actions = [line.action for line in lines]
        self.labels = [line.label for line in lines]
        self.peers = [line.peer for line in lines]
        self.waits = [_awaited(line) for line in lines]
        self._operations = [line.operation for line in lines]

    def run(self, step: Step, progress: Progress) -> None:
        """Run all of it. If an operation raises, ``progress.index`` is left where that was."""
        self._begin(progress)
        operations = self._profiled() if torch._C._autograd._profiler_enabled() else self._operations
        for progress.index, operation in enumerate(operations):
            operation(step)
        progress.index = -1

    def _begin(self, progress: Progress) -> None:
        progress.index = -1
        progress.labels = self.labels
        progress.peers = self.peers
        progress.waits = self.waits
        progress.waiting = False
        progress.step += 1

    def _profiled(self) -> list[Operation]:
        """The operations, each in a range that a profiler shows under the name of its action."""
        return [_named(label, operation) for label, operation in zip(self.labels, self._operations, strict=True)]


class Line(NamedTuple):
    """An operation of a program."""

    operation: Operation
    label: str
    action: Action | None
    peer: int | None


def compiled(
    schedule: Schedule,
    rank: int,
    operation_of: Callable[[Action], Operation | None],
    progress: Progress,
    *,
    early: bool = False,
) -> Program:
    """The program of one rank.

    Args:
        schedule: a lowered schedule.
        rank: whose program it is.
        operation_of: makes the operation of an action; None if the action needs none.
        progress: is told when an operation waits.
        early: whether receives are posted earlier than they stand (see ``posting``); right only for a transport whose
            messages do not stand in line.
    """
    rank_of = schedule.placement.rank_of
    row = [action for action in schedule.actions[rank] if action is not None]
    released, left = _releases(schedule, rank)
    lines, places = [], []
    computed = 0
    for position, action in enumerate(row):
        operation = operation_of(action)
        if operation is not None:
            lines.append(Line(operation, str(action), action, _waits_for(action, rank, rank_of)))
            places.append(Place.of(action, computed, rank_of.__getitem__))
        computed += computed_by(action)
        if position in released:
            lines.append(Line(_ending(released[position], progress), str(action), action, None))
            places.append(Place(computed))
    for peer, tags in left.items():
        lines.append(Line(_ending(tags, progress), f"the end of its sends to rank {peer}", None, peer))
        places.append(Place(computed))
    return Program([lines[number] for number in by_posting(places)] if early else lines)


def _named(label: str, operation: Operation) -> Operation:
    def named(step: Step) -> None:
        with torch.profiler.record_function(label):
            operation(step)

    return named


def _awaited(line: Line) -> str:
    """What an operation waits for, as the receive that it is."""
    for part in line.action.leaves if line.action is not None and line.peer is not None else ():
        if part.computation_type is FORWARD:
            return f"{part.stage_index}RECV_F{part.microbatch_index}"
        if part.computation_type in (FULL_BACKWARD, BACKWARD_INPUT):
            return f"{part.stage_index}RECV_B{part.microbatch_index}"
    return line.label


def _waits_for(action: Action, rank: int, rank_of: Sequence[int]) -> int | None:
    """The rank that an action may have to wait for: where the first of its inputs from elsewhere is made."""
    for part in action.leaves:
        if part.computation_type is FORWARD and part.stage_index > 0:
            peer = rank_of[part.stage_index - 1]
        elif part.computation_type in (FULL_BACKWARD, BACKWARD_INPUT) and part.stage_index < len(rank_of) - 1:
            peer = rank_of[part.stage_index + 1]
        else:
            continue
        if peer != rank:
            return peer
    return None


def _ending(tags: Sequence[int], progress: Progress) -> Operation:
    """Wait for sends, and let go of their tensors."""

    def ending(step: Step) -> None:
        for tag in tags:
            for transfer, tensor, version in step.sending.pop(tag, ()):
                progress.waiting = True
                transfer.wait()
                progress.waiting = False
                check_unchanged(tensor, version)

    return ending


def _releases(schedule: Schedule, rank: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """When a rank can be sure that its sends have ended, so that waiting for them takes no time.

    A message from a peer was sent after all that stands ahead of it in the peer's row. Once the rank has used the
    message, whatever that part of the row has used has arrived.

    Returns:
        The tags of the sends to be ended after the action at each position of the rank's row, and for each peer the
        tags that no message from it tells about.
    """
    sent, used = _messages(schedule, rank)
    released: dict[int, list[int]] = {}
    left: dict[int, list[int]] = {}
    for peer, messages in sent.items():
        theirs_sent, theirs_used = _messages(schedule, peer)
        their_places = dict(theirs_sent.get(rank, ()))
        arrivals = sorted((place, their_places[tag]) for tag, place in used.items() if tag in their_places)
        waiting = sorted(((theirs_used[tag], tag) for tag, _ in messages if tag in theirs_used), reverse=True)
        reached = -1
        for place, their_place in arrivals:
            reached = max(reached, their_place)
            while waiting and waiting[-1][0] < reached:
                released.setdefault(place, []).append(waiting.pop()[1])
        if waiting:
            left[peer] = [tag for _, tag in reversed(waiting)]
    return released, left


def _messages(schedule: Schedule, rank: int) -> tuple[dict[int, list[tuple[int, int]]], dict[int, int]]:
    """What a rank sends, as (tag, position) for each peer; and the position at which it uses each message it gets."""
    rank_of, microbatches = schedule.placement.rank_of, schedule.microbatches
    sent: dict[int, list[tuple[int, int]]] = defaultdict(list)
    used: dict[int, int] = {}
    received: set[int] = set()
    row = [action for action in schedule.actions[rank] if action is not None]
    for position, action in enumerate(row):
        for part in action.leaves:
            stage, kind = part.stage_index, part.computation_type
            key = stage * microbatches + (part.microbatch_index or 0)
            if kind is SEND_F:
                sent[rank_of[stage + 1]].append((2 * key, position))
            elif kind is SEND_B:
                sent[rank_of[stage - 1]].append((2 * (key - microbatches) + 1, position))
            elif kind in (RECV_F, RECV_B):
                received.add(2 * (key - microbatches) if kind is RECV_F else 2 * key + 1)
            elif kind is FORWARD:
                used[2 * (key - microbatches)] = position
            elif kind in (FULL_BACKWARD, BACKWARD_INPUT):
                used[2 * key + 1] = position
    return sent, {tag: position for tag, position in used.items() if tag in received}


def only_forwards(rows: Iterable[Sequence[Action | None]]) -> list[list[Action]]:
    """The forwards of each row, in order: what an evaluation runs."""
    return [
        [part for action in row if action is not None for part in action.leaves if part.computation_type is FORWARD]
        for row in rows
    ]
