"""Programs for the engine: of any lowered order, and of the orders of one stage per rank."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from penstock.ir.actions import BACKWARD_WEIGHT, FULL_BACKWARD, RECV_B, RECV_F, REDUCE_GRAD
from penstock.pipelining._schedule_actions import _Action, _get_profiler_function_name
from penstock.pipelining._schedule_engine import (
    Calls,
    Line,
    Maker,
    Program,
    custom,
    ending,
    receive_backward,
    receive_forward,
    reduction,
    scaling,
    send_backward,
    send_forward,
)
from penstock.pipelining._schedule_passes import compute_rows_with_transfers
from penstock.pipelining._schedule_plain import PlainMaker
from penstock.pipelining._schedule_rows import as_rows
from penstock.pipelining._schedule_sends import ends_of_sends
from penstock.pipelining._schedule_shortcuts import Shortcut
from penstock.pipelining._stage_compute import is_as_written
from penstock.pipelining._stage_inference import StageInference
from penstock.pipelining._stage_transfers import is_gloo
from penstock.schedules.gpipe import gpipe
from penstock.schedules.one_f_one_b import one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.ir.actions import ComputationType
    from penstock.pipelining._schedule_engine import Custom, Operation, Step
    from penstock.pipelining._schedule_rows import Rows


#: By how many compute actions a receive is posted earlier than it stands: a message needs a moment until it can come,
#: and each that is posted has a buffer. A chain of stages, which may be there for its memory, has one more each way.
_AHEAD: Final = 4
_AHEAD_IN_CHAIN: Final = 2


class Kept:
    """A program, and what it was made from: it is made again when that has changed."""

    def __init__(self) -> None:
        self._made: dict[tuple[bool, Shortcut], tuple[Program, tuple[Any, ...]]] = {}

    def program(
        self,
        rows: Mapping[int, Sequence[Any]],
        rank: int,
        stages: Sequence[Any],
        microbatches: int,
        customs: Mapping[ComputationType, Custom],
        trains: bool,
        way: Shortcut,
        make: Callable[[], Program],
    ) -> Program:
        """The program for these rows; ``make`` makes it.

        There is one for training, one for evaluation, and of each one for every way. The row of this rank is compared
        action by action, those of others by identity and length only.
        """
        others = [rows[each] for each in rows]
        kinds = [(isinstance(stage.submod, FSDPModule), _receives_in_the_usual_way(stage)) for stage in stages]
        sizes = [microbatches, *map(len, others)]
        facts = (rows[rank], list(stages), dict(customs), [*rows], kinds, [*map(id, others)], sizes)
        program, known = self._made.get((trains, way), (None, ()))
        if program is None or facts != known[:-1]:
            program = make()
            # The rows are kept, so that none can come to have the identity of one that is gone.
            self._made[trains, way] = program, (list(rows[rank]), *facts[1:], others)
        return program


def of_order(
    rows: Mapping[int, Sequence[_Action]],
    rank: int,
    stages: Mapping[int, Any],
    microbatches: int,
    *,
    calls: Calls,
    trains: bool,
    way: Shortcut = Shortcut.NONE,
    customs: Mapping[ComputationType, Custom] | None = None,
    scales_after_backward: bool = False,
    ahead: int = _AHEAD,
) -> Program:
    """The program of one rank.

    Args:
        rows: the lowered actions of every rank.
        rank: whose program it is.
        stages: its stages by index.
        microbatches: how many there are.
        calls: how stages are called.
        trains: whether there are backwards. An evaluation asks for them too, which stages without backward ignore, but
            reduces and scales nothing.
        way: how short its way is.
        customs: functions of the user, by the type of action that they stand for.
        scales_after_backward: whether gradients are scaled after the last backward of a stage, for want of REDUCE_GRAD.
        ahead: by how many compute actions receives are posted earlier than they stand, where they may be.
    """
    customs = customs or {}
    row = rows[rank]
    maker = _maker(way, stages, microbatches, calls, trains=trains)
    ended, left = ends_of_sends(rows, rank)
    lines: list[Line] = []
    scaled: list[Any] = []
    receives: set[int] = set()
    done: Counter[int] = Counter()
    for place, action in enumerate(row):
        kind, label = action.computation_type, _get_profiler_function_name(action)
        if place in ended:
            lines.append(Line(ending(ended[place]), label, place))
        if kind in customs:
            lines.append(Line(custom(customs[kind], action), label, place))
        else:
            if kind in (RECV_F, RECV_B):
                receives.add(len(lines))
            lines.append(Line(maker.operation(action, place), label, place))
            scaled += [maker.stage(action)] if kind is REDUCE_GRAD and trains else []
        for leaf in action.leaves if scales_after_backward and trains else ():
            if leaf.computation_type in (FULL_BACKWARD, BACKWARD_WEIGHT):
                done[leaf.stage_index] += 1
                if done[leaf.stage_index] == microbatches:
                    lines.append(Line(scaling(stages[leaf.stage_index], microbatches), label, place))
                    scaled.append(stages[leaf.stage_index])
    if left:
        lines.append(Line(ending(left), None, len(row) - 1))
    if not customs and _may_post_ahead(stages.values()):
        lines = _posted_ahead(lines, receives, row, ahead)
    return Program(lines, scaled)


def _maker(way: Shortcut, stages: Mapping[int, Any], microbatches: int, calls: Calls, *, trains: bool) -> Maker:
    kind = PlainMaker if way is Shortcut.ALL else Maker
    return kind(stages, microbatches, calls, trains=trains, directly=way >= Shortcut.MESSAGES)


def _may_post_ahead(stages: Iterable[Any]) -> bool:
    """Whether receives may be posted before sends that they stand behind: where messages do not stand in one line.

    Not with a stage that has a way of its own to receive, which may rely on the order of its calls.
    """
    return dist.is_initialized() and all(
        _receives_in_the_usual_way(stage)
        and torch.device(stage.device).type == "cpu"
        and is_gloo(stage.group, torch.device("cpu"))
        for stage in stages
    )


def _receives_in_the_usual_way(stage: Any) -> bool:
    return is_as_written(stage, "get_fwd_recv_ops", "get_bwd_recv_ops", "_get_recv_ops")


def _posted_ahead(lines: Sequence[Line], receives: set[int], row: Sequence[_Action], ahead: int) -> list[Line]:
    """The lines that are receives, each moved ahead of some compute actions; they keep their order."""
    computed = [0, *accumulate(action.is_compute for action in row)]
    keys = [
        (computed[line.step] - ahead, 0, place) if place in receives else (computed[line.step], 1, place)
        for place, line in enumerate(lines)
    ]
    return [lines[place] for _, _, place in sorted(keys)]


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
    maker = _maker(way, {stage.stage_index: stage}, microbatches, calls, trains=trains)
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
    chain = _OneFOneB(stage, _maker(way, {stage.stage_index: stage}, microbatches, calls, trains=trains))
    ahead = min(microbatches, stages - stage.stage_index)
    chain.fill(ahead)
    chain.alternate(ahead, microbatches)
    chain.drain(microbatches - ahead, microbatches)
    if trains:
        chain.operations.append(reduction(stage, microbatches))
    return Program([Line(each, None, place) for place, each in enumerate(chain.operations)], [stage] if trains else [])


def _goes_by_messages(stage: Any) -> bool:
    """Whether each message may go by itself, whatever others are under way."""
    return isinstance(stage, StageInference) and _may_post_ahead([stage])


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
        ahead=_AHEAD_IN_CHAIN,
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
