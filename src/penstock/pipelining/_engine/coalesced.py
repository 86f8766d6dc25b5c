"""Rows of one stage per rank whose transfers are posted as torch posts them: ahead, or a send with a receive.

A backend with lanes can deadlock where neighbours send to each other at the same time, unless each send is posted
together with the receive from that neighbour. Where messages do not queue in lanes, no rank would wait, and any other
row serves as well (see ``programs.program_of_order``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.execution.messages import sent_by
from penstock.execution.send_releases import Releases
from penstock.ir.actions import (
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
)
from penstock.pipelining._engine.methods import Posted
from penstock.pipelining._schedule.actions import _Action

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.ir.actions import ComputationType


def gpipe_row(stage: Any, microbatches: int, *, backwards: bool, reduces: bool) -> list[Any]:
    """Order all forwards, then all backwards; each receive is posted ahead, by a microbatch at least."""
    index = stage.stage_index
    row = [*_half(index, FORWARD, microbatches, RECV_F, SEND_F, receives=not stage.is_first)]
    if backwards:
        row += _half(index, FULL_BACKWARD, microbatches, RECV_B, SEND_B, receives=not stage.is_last)
    return [*row, _Action(index, REDUCE_GRAD)] if reduces else row


def gpipe_label(cell: Any) -> str | None:
    """Get the range that torch's GPipe shows in a profiler."""
    if isinstance(cell, Posted):
        return cell.label
    return "reduce" if cell.computation_type is REDUCE_GRAD else _half_label(cell.computation_type, cell[2])


def _half_label(kind: ComputationType, microbatch: int) -> str:
    return f"{'Forward' if kind is FORWARD else 'Backward'} {microbatch}"


def _half(
    stage: int,
    computes: ComputationType,
    microbatches: int,
    recv: ComputationType,
    send: ComputationType,
    *,
    receives: bool,
) -> Iterator[Any]:
    """One direction of GPipe."""
    way = "fwd" if computes is FORWARD else "bwd"
    for number in range(microbatches):
        label = _half_label(computes, number)
        ahead = (0, 1) if number == 0 else (number + 1,)
        for each in ahead if receives else ():
            if each < microbatches:
                yield Posted((_Action(stage, recv, each),), f"{way}_recv", label)
        yield _Action(stage, computes, number)
        yield Posted((_Action(stage, send, number),), f"{way}_send", label)


def one_f_one_b_row(stage: int, stages: int, microbatches: int, *, reduces: bool) -> list[Any]:
    """Fill, alternate one backward with one forward, drain. What goes to a neighbour is posted with what comes back.

    >>> [cell for cell in one_f_one_b_row(0, 1, 1, reduces=True) if isinstance(cell, _Action)]
    [0F0, 0B0, 0REDUCE_GRAD]
    """

    def post(desc: str, *transfers: tuple[ComputationType, int]) -> Posted:
        return Posted(tuple(_Action(stage, kind, number) for kind, number in transfers), desc)

    warm_up = min(microbatches, stages - stage)
    row: list[Any] = []
    for number in range(warm_up):
        row += [post("fwd_recv", (RECV_F, number)), _Action(stage, FORWARD, number)]
        if number < warm_up - 1:
            row.append(post("fwd_send", (SEND_F, number)))
    for number in range(microbatches):
        following = number + warm_up
        if following <= microbatches:
            row.append(post("fwd_send_bwd_recv", (SEND_F, following - 1), (RECV_B, number)))
        else:
            row.append(post("bwd_recv", (RECV_B, number)))
        row.append(_Action(stage, FULL_BACKWARD, number))
        if following < microbatches:
            row.append(post("bwd_send_fwd_recv", (SEND_B, number), (RECV_F, following)))
            row.append(_Action(stage, FORWARD, following))
        else:
            row.append(post("bwd_send", (SEND_B, number)))
    return [*row, _Action(stage, REDUCE_GRAD)] if reduces else row


def no_label(_: Any) -> None:
    """Show nothing in a profiler, as torch's 1F1B does."""


def releases_of(row: Sequence[Any], microbatches: int, *, in_flight: int) -> Releases:
    """Wait for the oldest send when more than the limit are in flight."""
    after: dict[int, dict[int | None, list[int]]] = {}
    waiting: list[int] = []
    for position, cell in enumerate(row):
        for message in map(sent_by, cell.transfers) if isinstance(cell, Posted) else ():
            if message is not None:
                waiting.append(message.key(microbatches))
                if len(waiting) > in_flight:
                    after[position] = {None: [waiting.pop(0)]}
    return Releases(after, {None: waiting} if waiting else {})
