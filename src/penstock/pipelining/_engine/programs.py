"""Programs for the engine, of any lowered order; a program is kept until what it was made from has changed."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from penstock.execution.early_receives import Place, by_posting, computed_by
from penstock.ir.actions import BACKWARD_WEIGHT, FULL_BACKWARD, OVERLAP_F_B, RECV_B, RECV_F, REDUCE_GRAD, SEND_B, SEND_F
from penstock.pipelining._engine.methods import Calls, Maker
from penstock.pipelining._engine.operations import (
    custom,
    ending,
    scaling,
)
from penstock.pipelining._engine.plain import PlainMaker
from penstock.pipelining._engine.program import Line, Program
from penstock.pipelining._engine.selection import Shortcut
from penstock.pipelining._engine.sends import ends_of_sends
from penstock.pipelining._schedule.actions import _Action, _get_profiler_function_name
from penstock.pipelining._schedule.passes import OrderError
from penstock.pipelining._stage.compute import is_as_written
from penstock.pipelining._stage.inference import StageInference
from penstock.pipelining._stage.transfers import is_gloo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.ir.actions import ComputationType
    from penstock.pipelining._engine.program import Custom


_TRANSFERS: Final = frozenset({SEND_F, SEND_B, RECV_F, RECV_B})
#: Stands for the rank of a message where that is not known.
_SOME_RANK: Final = -1


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
    """
    customs = customs or {}
    row = rows[rank]
    _check_stages(row, stages, customs)
    maker = maker_of(way, stages, microbatches, calls, trains=trains)
    ended, left = ends_of_sends(rows, rank)
    lines: list[Line] = []
    scaled: list[Any] = []
    transfers: dict[int, _Action] = {}
    done: Counter[int] = Counter()
    for place, action in enumerate(row):
        kind, label = action.computation_type, _get_profiler_function_name(action)
        if place in ended:
            lines.append(Line(ending(ended[place]), label, place))
        if kind in customs:
            lines.append(Line(custom(customs[kind], action), label, place))
        else:
            if kind in _TRANSFERS:
                transfers[len(lines)] = action
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
    if not customs and may_post_ahead(stages.values()):
        lines = _posted_early(lines, transfers, row, stages)
    return Program(lines, scaled)


def _check_stages(row: Sequence[_Action], stages: Mapping[int, Any], customs: Mapping[ComputationType, Custom]) -> None:
    """Raise if the order of this rank is for other stages than it has."""
    parts = [part for action in row if action.computation_type not in customs for part in action.leaves]
    needed = {part.stage_index for part in parts if part.computation_type is not OVERLAP_F_B}
    if needed - stages.keys():
        raise OrderError(
            f"this rank has the stages {sorted(stages)}, and its order is for the stages {sorted(needed)}: give it "
            "PipelineStage objects of these"
        )


def maker_of(way: Shortcut, stages: Mapping[int, Any], microbatches: int, calls: Calls, *, trains: bool) -> Maker:
    """What makes the operations of these stages, by this way."""
    kind = PlainMaker if way is Shortcut.ALL else Maker
    return kind(stages, microbatches, calls, trains=trains, directly=way >= Shortcut.MESSAGES)


def may_post_ahead(stages: Iterable[Any]) -> bool:
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


def _posted_early(
    lines: Sequence[Line], transfers: Mapping[int, _Action], row: Sequence[_Action], stages: Mapping[int, Any]
) -> list[Line]:
    """The same lines with receives ahead of some compute actions. Transfers are given by the number of their line.

    The messages of a rank must be received in the order in which they are sent. If a stage may talk to others than its
    neighbours, all messages are taken for those of one rank.
    """
    computed = [0, *accumulate(map(computed_by, row))]
    known = all(isinstance(stage, StageInference) for stage in stages.values())

    def place_of(number: int, line: Line) -> Place:
        action, before = transfers.get(number), computed[line.step]
        if action is None:
            return Place(before)
        ranks = stages[action.stage_index].stage_index_to_group_rank if known else {}
        return Place.of(action, before, lambda stage: ranks.get(stage, _SOME_RANK))

    return [lines[number] for number in by_posting([place_of(*one) for one in enumerate(lines)])]
