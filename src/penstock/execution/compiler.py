"""Compiles a lowered row to a program, given the operations of its actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from penstock.execution.early_receives import Slot, order_with_early_receives
from penstock.execution.messages import received_by, sent_by, used_by
from penstock.execution.program import Line, Program
from penstock.ir.actions import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.execution.operation_set import OperationSet
    from penstock.execution.send_releases import Releases
    from penstock.ir.edges import Link

S = TypeVar("S")


def compile_program(
    row: Sequence[Any],
    operations: OperationSet[S],
    releases: Releases,
    *,
    rank: int,
    rank_of: Callable[[int], int | None],
    links: Sequence[Link] | None = None,
    early_receives: bool = False,
) -> Program[S]:
    """Compile the program of one rank.

    Args:
        row: its cells: lowered actions, or other cells that the operation set knows.
        operations: makes the operations.
        releases: when its sends may be released.
        rank: whose program it is.
        rank_of: the rank of a stage; None if it is unknown.
        links: the links of the pipeline; without them, those of a chain.
        early_receives: post receives ahead of their place. Correct only where messages do not queue in lanes.
    """
    lines: list[Line[S]] = []
    slots: list[Slot] = []
    computed = 0
    for position, cell in enumerate(row):
        label, action = operations.label(cell), cell if isinstance(cell, Action) else None
        lines.append(Line(operations.operation(cell), label, cell, position, *_awaited(action, rank, rank_of, links)))
        slots.append(_slot(action, computed, rank_of))
        computed += len(action.parts) if action is not None and action.is_compute else 0
        for peer, keys in releases.after.get(position, {}).items():
            lines.append(Line(operations.release_sends(keys), label, cell, position, peer))
            slots.append(Slot(computed))
    for peer, keys in releases.at_end.items():
        label = "the end of its sends" + ("" if peer is None else f" to rank {peer}")
        lines.append(Line(operations.release_sends(keys), label, None, len(row) - 1, peer))
        slots.append(Slot(computed))
    return Program([lines[number] for number in order_with_early_receives(slots)] if early_receives else lines)


def _awaited(
    action: Action | None, rank: int, rank_of: Callable[[int], int | None], links: Sequence[Link] | None
) -> tuple[int, str] | tuple[None, None]:
    """Find the first other rank whose message an action uses, and the receive of that message."""
    for message in () if action is None else used_by(action, links):
        peer = rank_of(message.source)
        if peer is not None and peer != rank:
            return peer, message.receive
    return None, None


def _slot(action: Action | None, computed: int, rank_of: Callable[[int], int | None]) -> Slot:
    if action is not None and (message := sent_by(action)) is not None:
        return Slot(computed, sends_to=rank_of(message.target))
    if action is not None and (message := received_by(action)) is not None:
        return Slot(computed, receives_from=rank_of(message.source))
    return Slot(computed)
