"""A schedule as rows of actions for every rank, and those as a picture.

::

    ops = get_schedule_ops("InterleavedZeroBubble", 4, 8, add_spacing=True)
    visualize_schedule(ops, "schedule.png")

More can be seen in ``penstock view`` and ``Timeline.write``; this is for programs that have used torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import RunError, SizeError
from penstock.ir.actions import ComputationType as _ComputationType
from penstock.ir.dependencies import needs
from penstock.pipelining._schedule.passes import OrderError
from penstock.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from penstock.ir.actions import Action
    from penstock.pipelining._schedule.actions import _Action


class OpKey(NamedTuple):
    """What is done once in a step."""

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int


class _ComputationTypeVisual:
    """How a type of action is drawn, and how many steps it takes."""

    def __init__(self, color: str, text: str = "", width: int = 1) -> None:
        self.color = color
        self.width = width
        self.text = text


action_type_to_color_mapping = {
    _ComputationType.FORWARD: _ComputationTypeVisual("blue", "Forward"),
    _ComputationType.BACKWARD_INPUT: _ComputationTypeVisual("teal", "Backward Input"),
    _ComputationType.BACKWARD_WEIGHT: _ComputationTypeVisual("green", "Backward Weight"),
    _ComputationType.FULL_BACKWARD: _ComputationTypeVisual("orange", "Full Backward", 2),
    _ComputationType.OVERLAP_F_B: _ComputationTypeVisual("purple", "Overlap F+B", 3),
}


class StagesPerRankError(SizeError, AssertionError):
    """The schedule does not allow this number of stages per rank."""


@dataclass
class _StandIn:
    """As much of a stage as a schedule asks for when it is made."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    group: Any = None
    submod: Any = None
    has_backward: bool = False


def get_schedule_ops(
    schedule: str | type[_PipelineSchedule],
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> list[list[_Action | None]]:
    """The actions of every rank.

    >>> get_schedule_ops("GPipe", 2, 2)
    [[0F0, 0F1, 0B0, 0B1, 0REDUCE_GRAD], [1F0, 1F1, 1B0, 1B1, 1REDUCE_GRAD]]

    Args:
        schedule: a class of schedules, or its name.
        pp_degree: how many ranks there are.
        num_microbatches: how many microbatches.
        num_stages_per_rank: how many stages a rank has; by default 1 or 2, by the class.
        add_spacing: show what waits for what, see ``add_schedule_op_spacing``.
        with_comms: as it is run: with sends, receives and all that is added to it.
        defer_pp_recv: with receives right before what needs them; counts with ``with_comms``.
    """
    if add_spacing and with_comms:
        raise ValueError("spacing applies to compute actions only; pass add_spacing or with_comms, not both")
    schedule_class: Any = get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    stages = _stand_ins(schedule_class, pp_degree, num_stages_per_rank)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    made = schedule_class(stages[0] if single else stages, num_microbatches)
    rows = made.pipeline_order
    if not rows:
        raise OrderError(f"{schedule_class.__name__} has no pipeline_order to show; fill it in the constructor")
    listed = [list(rows[rank]) for rank in range(pp_degree)]
    if not (with_comms or add_spacing):
        return listed
    # Rows of a class with one stage on a rank hold its reductions, too.
    compute = [[action for action in row if action is not None and action.is_compute_op] for row in listed]
    if add_spacing:
        return add_schedule_op_spacing(compute)
    runtime = _PipelineScheduleRuntime(stages, num_microbatches, defer_pp_recv=defer_pp_recv)
    runtime._prepare_schedule_with_comms(dict(enumerate(compute if single else listed)))
    return [list(runtime.pipeline_order_with_comms[rank]) for rank in range(pp_degree)]


def add_schedule_op_spacing(schedule: list[list[_Action | None]]) -> list[list[_Action | None]]:
    """The rows with a None for every step in which a rank waits; an action is placed where it begins.

    >>> from penstock.pipelining.schedules import _Action
    >>> rows = [["0F0", "0B0"], ["1F0", "1B0"]]
    >>> add_schedule_op_spacing([[_Action.from_str(text) for text in row] for row in rows])
    [[0F0, None, None, None, 0B0], [None, 1F0, 1B0, None]]
    """
    if not schedule:
        return schedule
    return _Spacing(schedule).run()


def visualize_schedule(schedule: list[list[_Action | None]], filename: str | None = None) -> None:
    """Draw the rows, each action as wide as it takes steps; into a file, or on the screen."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(max(map(len, schedule)) + 2, len(schedule) + 2))
    _draw(axes, schedule)
    if filename is None:
        plt.show()
        return
    figure.savefig(filename, bbox_inches="tight")
    plt.close(figure)


def _stand_ins(kind: Any, ranks: int, per_rank: int | None) -> list[Any]:
    if not isinstance(kind, type):
        raise TypeError(f"{kind!r} is not a class of schedules or the name of one; pass e.g. 'GPipe' or type(schedule)")
    if not issubclass(kind, (PipelineScheduleSingle, PipelineScheduleMulti)):
        raise ValueError(
            f"{kind!r} is not a class of schedules; pass a subclass of PipelineScheduleSingle or PipelineScheduleMulti"
        )
    single = issubclass(kind, PipelineScheduleSingle)
    count = (1 if single else 2) if per_rank is None else per_rank
    if count != 1 if single else count < 2:
        wanted = "one stage" if single else "two stages or more"
        raise StagesPerRankError(
            f"{kind.__name__} needs {wanted} per rank, not {count}", field="num_stages_per_rank", value=count
        )
    return [_StandIn(place * ranks, count * ranks, ranks) for place in range(count)]


class _Spacing:
    """A run through rows, step by step."""

    def __init__(self, schedule: Sequence[Sequence[_Action | None]]) -> None:
        self.rows = schedule
        self.spaced: list[list[_Action | None]] = [[] for _ in schedule]
        self.next = [0] * len(schedule)
        self.free = [0] * len(schedule)
        self.ends: dict[Action, int] = {}
        self.stages = 1 + max(leaf.stage_index for row in schedule for action in row if action for leaf in action.parts)

    def run(self) -> list[list[_Action | None]]:
        """The rows with idle steps."""
        step = last = 0
        longest = max(visual.width for visual in action_type_to_color_mapping.values())
        while self._is_left():
            begun = [self._begin(rank, step) for rank in range(len(self.rows))]
            if any(begun):
                last = step
            elif step - last > longest:
                raise RunError(f"the rows deadlock: {self._stuck()}")
            for rank, free in enumerate(self.free):
                if step >= free:
                    self.spaced[rank].append(None)
            step += 1
        return self.spaced

    def _is_left(self) -> bool:
        return any(place < len(row) for place, row in zip(self.next, self.rows, strict=True))

    def _begin(self, rank: int, step: int) -> bool:
        """Have a rank go on, if it can."""
        if self.next[rank] == len(self.rows[rank]):
            return False
        action = self.rows[rank][self.next[rank]]
        if action is not None:
            if step < self.free[rank] or not self._is_ready(action, step):
                return False
            self._note(action, step)
            self.free[rank] = step + _width(action)
        self.spaced[rank].append(action)
        self.next[rank] += 1
        return True

    def _is_ready(self, action: _Action, step: int) -> bool:
        return all(
            any(one in self.ends and self.ends[one] <= step for one in providers)
            for providers in needs(action, self.stages)
        )

    def _note(self, action: _Action, step: int) -> None:
        """The parts of an overlap end one after the other."""
        for leaf in action.parts:
            step += _width(leaf)
            self.ends[leaf] = step

    def _stuck(self) -> str:
        waiting = [
            f"{row[place]} on rank {rank}"
            for rank, (place, row) in enumerate(zip(self.next, self.rows, strict=True))
            if place < len(row)
        ]
        return ", ".join(waiting)


def _width(action: Action) -> int:
    if action.computation_type not in action_type_to_color_mapping:
        raise RunError(
            f"{action} is not a compute action, so it has no width; pass rows without sends, receives and the like"
        )
    return action_type_to_color_mapping[action.computation_type].width


def _draw(axes: Axes, schedule: Sequence[Sequence[_Action | None]]) -> None:
    from matplotlib.patches import Rectangle

    ranks, longest = len(schedule), max(map(len, schedule))
    size = min(longest, ranks) + 4
    used: dict[_ComputationType, _ComputationTypeVisual] = {}
    end = 0
    for rank, row in enumerate(schedule):
        place = 0
        for action in row:
            if action is None:
                place += 1
                continue
            kind = action.computation_type
            look = action_type_to_color_mapping.get(kind, _ComputationTypeVisual("black", kind.name))
            used[kind] = look
            corner, border = (place, ranks - rank - 1), 1 if action.sub_actions is None else 2
            axes.add_patch(Rectangle(corner, look.width, 1, facecolor=look.color, edgecolor="black", linewidth=border))
            middle = (place + look.width / 2, ranks - rank - 0.5)
            axes.text(*middle, str(action), ha="center", va="center", fontsize=size, color="white")
            place += look.width
        end = max(end, place)
    axes.set(xlim=(-0.5, end + 1), ylim=(-0.5, ranks + 0.5), xticklabels=[])
    axes.set_yticks([ranks - rank - 0.5 for rank in range(ranks)])
    axes.set_yticklabels([f"Rank {rank}" for rank in range(ranks)], fontsize=size)
    shown = [Rectangle((0, 0), 1, 1, facecolor=one.color, edgecolor="black", label=one.text) for one in used.values()]
    axes.legend(handles=shown, loc="upper right", fontsize=size)
