"""Programs of one stage per rank: chains of stages, in which messages go to neighbours only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.ir.actions import REDUCE_GRAD
from penstock.pipelining._engine.operations import (
    ending,
    receive_backward,
    receive_forward,
    reduction,
    send_backward,
    send_forward,
)
from penstock.pipelining._engine.program import Line, Program
from penstock.pipelining._engine.programs import maker_of, may_post_ahead, of_order
from penstock.pipelining._engine.selection import Shortcut
from penstock.pipelining._schedule.actions import _Action
from penstock.pipelining._schedule.passes import compute_rows_with_transfers
from penstock.pipelining._schedule.rows import as_rows
from penstock.pipelining._stage.inference import StageInference
from penstock.schedules.gpipe import gpipe
from penstock.schedules.one_f_one_b import one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipelining._engine.methods import Calls, Maker
    from penstock.pipelining._engine.program import Operation, Step
    from penstock.pipelining._schedule.rows import Rows

#: How many sends of a chain of stages are under way at most. To wait for the last few would cost time: a rank that is
#: ahead for a moment would be stopped.
_UNDER_WAY: Final = 6


def of_gpipe(
    stage: Any, microbatches: int, *, calls: Calls, trains: bool, way: Shortcut = Shortcut.NONE, backwards: bool = True
) -> Program:
    """All forwards, then all backwards; each receive is posted ahead, by a microbatch at least.

    To wait for an earlier send is safe: in each half, messages go one way only.
    """
    if way and _goes_by_messages(stage):
        order = as_rows(gpipe(stage.num_stages, microbatches))
        if not backwards:
            order = {rank: row[:microbatches] for rank, row in order.items()}
        return _by_messages(stage, order, microbatches, calls=calls, trains=trains, way=way)
    maker = maker_of(way, {stage.stage_index: stage}, microbatches, calls, trains=trains)
    directly = way >= Shortcut.MESSAGES
    lines: list[Line] = []
    halves: list[tuple[Any, ...]] = [
        ("Forward", receive_forward, maker.forward, send_forward, "fwd", not stage.is_first)
    ]
    if backwards:
        halves.append(("Backward", receive_backward, maker.backward, send_backward, "bwd", not stage.is_last))
    for name, receive, compute, send, direction, receives in halves:
        base = len(lines)
        for number in range(microbatches):
            label = f"{name} {number}"
            posted = [0, 1] if number == 0 else [number + 1]
            parts = [
                receive(stage, each, f"{direction}_recv", directly=directly)
                for each in posted
                if receives and each < microbatches
            ]
            parts.append(compute(stage, number, receives=receives))
            parts.append(send(stage, number, base + number, f"{direction}_send", directly=directly))
            if number >= _UNDER_WAY:
                parts.append(ending([base + number - _UNDER_WAY]))
            lines += [Line(part, label, len(lines) + place) for place, part in enumerate(parts)]
        last = range(max(0, microbatches - _UNDER_WAY), microbatches)
        lines.append(Line(ending([base + number for number in last]), label, len(lines)))
    if trains:
        lines.append(Line(reduction(stage, microbatches), "reduce", len(lines)))
    return Program(lines, [stage] if trains else [])


def of_one_f_one_b(
    stage: Any, stages: int, microbatches: int, *, calls: Calls, trains: bool, way: Shortcut = Shortcut.NONE
) -> Program:
    """Fill, one backward and one forward by turns, drain. What goes to a neighbour goes with what comes from it.

    Neither waits to send to the other then. Where messages do not stand in one line, nobody would: there each goes by
    itself, and receives are posted ahead.
    """
    if way and _goes_by_messages(stage):
        order = as_rows(one_f_one_b(stages, microbatches))
        return _by_messages(stage, order, microbatches, calls=calls, trains=trains, way=way)
    chain = _OneFOneB(stage, maker_of(way, {stage.stage_index: stage}, microbatches, calls, trains=trains))
    ahead = min(microbatches, stages - stage.stage_index)
    chain.fill(ahead)
    chain.alternate(ahead, microbatches)
    chain.drain(microbatches - ahead, microbatches)
    if trains:
        chain.operations.append(reduction(stage, microbatches))
    return Program([Line(each, None, place) for place, each in enumerate(chain.operations)], [stage] if trains else [])


def _goes_by_messages(stage: Any) -> bool:
    """Whether each message may go by itself, whatever others are under way."""
    return isinstance(stage, StageInference) and may_post_ahead([stage])


def _by_messages(stage: Any, order: Rows, microbatches: int, *, calls: Calls, trains: bool, way: Shortcut) -> Program:
    """The program of one stage per rank as that of any other order. Its messages go to neighbours."""
    index, stages = stage.stage_index, len(order)
    rows = compute_rows_with_transfers(order, {each: each for each in range(stages)}, stages)
    row = [*rows[index], *([_Action(index, REDUCE_GRAD)] if trains else [])]
    return of_order(
        {**rows, index: row},
        index,
        {index: stage},
        microbatches,
        calls=calls,
        trains=trains,
        way=way,
    )


#: Where the sends of a meeting are kept until the next one.
_MEETING: Final = -1
_end_meeting: Final = ending([_MEETING])


class _OneFOneB:
    """The operations of one stage of 1F1B, as they are added; one send is under way at most."""

    def __init__(self, stage: Any, maker: Maker) -> None:
        self.operations: list[Operation] = []
        self._stage = stage
        self._maker = maker
        self._sent: list[int] = []

    def fill(self, ahead: int) -> None:
        """Forwards; what the last of them makes goes with the first gradient that comes."""
        for number in range(ahead):
            self._meet("fwd_recv", received_forward=number)
            self._forward(number)
            if number < ahead - 1:
                self._send(send_forward, number, "fwd_send")
        self._end_send()

    def alternate(self, ahead: int, microbatches: int) -> None:
        """A backward and a forward by turns, until the forwards are over."""
        for number in range(microbatches - ahead + 1):
            self._meet("fwd_send_bwd_recv", sent_forward=number + ahead - 1, received_backward=number)
            self._backward(number)
            if number + ahead < microbatches:
                self._meet("bwd_send_fwd_recv", sent_backward=number, received_forward=number + ahead)
                self._forward(number + ahead)

    def drain(self, done: int, microbatches: int) -> None:
        """The backwards that are left, after the one that is ``done`` and not sent."""
        self._send(send_backward, done, "bwd_send")
        for number in range(done + 1, microbatches):
            self._meet("bwd_recv", received_backward=number)
            self._backward(number)
            self._send(send_backward, number, "bwd_send")
        self.operations.append(_end_meeting)
        self._end_send()

    def _forward(self, number: int) -> None:
        self.operations.append(self._maker.forward(self._stage, number, receives=False))

    def _backward(self, number: int) -> None:
        self.operations.append(self._maker.backward(self._stage, number, receives=False))

    def _send(self, make: Callable[..., Operation], number: int, told: str) -> None:
        self._end_send()
        place = len(self.operations)
        self._sent.append(place)
        self.operations.append(make(self._stage, number, place, told))

    def _end_send(self) -> None:
        if self._sent:
            self.operations.append(ending([self._sent.pop()]))

    def _meet(self, told: str, **microbatches: int) -> None:
        self.operations.append(_meeting(self._stage, told, **microbatches))


def _meeting(
    stage: Any,
    told: str,
    *,
    sent_forward: int | None = None,
    sent_backward: int | None = None,
    received_forward: int | None = None,
    received_backward: int | None = None,
) -> Operation:
    """Send and receive together, each if there is a microbatch for it, and wait for what is received.

    What is sent is waited for before the next time, where it has a work of its own.
    """

    def meet(step: Step) -> None:
        sent: list[Any] = []
        received: list[Any] = []
        if sent_forward is not None:
            sent += stage.get_fwd_send_ops(sent_forward)
        if sent_backward is not None:
            sent += stage.get_bwd_send_ops(sent_backward)
        if received_forward is not None:
            received += stage.get_fwd_recv_ops(received_forward)
        if received_backward is not None:
            received += stage.get_bwd_recv_ops(received_backward)
        _end_meeting(step)
        if sent or received:
            works = step.post(sent + received, told)
            if received and len(works) == len(sent) + len(received):
                step.sends[_MEETING] = works[: len(sent)]
                works = works[len(sent) :]
            step.wait(works)

    return meet
