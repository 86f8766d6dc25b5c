"""Sums up what the actions of recorded steps took, by the compute action that each of them serves.

A rank posts the sends and receives of an action itself, and starts one action after the other. That is time of its
core, like the action's own; so a cost of F is the whole time that its rank spends for an F, without waiting.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    UNSHARD,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.ir.actions import Action, ComputationType

#: The field of ``Costs`` for each type of action that a rank is busy with.
FIELDS: Final[Mapping[ComputationType, str]] = {
    FORWARD: "forward",
    FULL_BACKWARD: "backward",
    BACKWARD_INPUT: "backward_input",
    BACKWARD_WEIGHT: "backward_weight",
    UNSHARD: "unshard",
    REDUCE_GRAD: "reduce",
}
_OF_FORWARD: Final = (SEND_F, RECV_F)
_OF_BACKWARD: Final = (SEND_B, RECV_B)

#: A field of ``Costs``, and a stage.
Key = tuple[str, int]


class TimedAction(NamedTuple):
    """An action as it ran on this rank.

    Attributes:
        action: the action; the parts of an overlap are separate.
        begin: when it began, in seconds from the start of the step.
        end: when it ended.
        waited: how many of these seconds it waited for transfers.
        start: when its last wait had ended, or when it began.
        held: for how long its rank waited for sends between the action before and this one.
    """

    action: Action
    begin: float
    end: float
    waited: float
    start: float
    held: float

    @property
    def own(self) -> float:
        """How long it took, without waiting for transfers."""
        return self.end - self.begin - self.waited


def mean_times(step: Sequence[TimedAction], starts: Sequence[float]) -> dict[Key, float]:
    """Return how long a rank was busy with an action of each type and stage, on average over a step.

    Args:
        step: its actions, in order.
        starts: for each of them, how long the rank took to get to it, without waiting.
    """
    counts, times = _sums(step, starts)
    return {key: times[key] / count for key, count in counts.items()}


def busy_time(step: Sequence[TimedAction], starts: Sequence[float]) -> float:
    """Return how long a rank was busy in a step."""
    counts, times = _sums(step, starts)
    return sum(times[key] for key in counts)


def _sums(step: Sequence[TimedAction], starts: Sequence[float]) -> tuple[dict[Key, int], dict[Key, float]]:
    """Return the number of actions of each type and stage, and how long they and all that serves them took."""
    backward = {
        (timed.action.stage_index, timed.action.microbatch_index): FIELDS[timed.action.computation_type]
        for timed in step
        if timed.action.computation_type in (FULL_BACKWARD, BACKWARD_INPUT)
    }
    counts: dict[Key, int] = defaultdict(int)
    times: dict[Key, float] = defaultdict(float)
    for timed, start in zip(step, starts, strict=True):
        action, kind = timed.action, timed.action.computation_type
        field = FIELDS.get(kind)
        if field is not None:
            counts[field, action.stage_index] += 1
        elif kind in _OF_FORWARD:
            field = "forward"
        elif kind in _OF_BACKWARD:
            field = backward.get((action.stage_index, action.microbatch_index))
        if field is not None:
            times[field, action.stage_index] += timed.own + start
    return counts, times


def fields_of_costs(times: Mapping[Key, float], stages: int) -> dict[str, list[float]]:
    """Return the fields of ``Costs`` for actions, given what each type takes on each stage.

    If a backward only ran whole, I and W get half of it each.
    """
    names = {field for field, _ in times}
    given = {
        field: [max(0.0, times.get((field, stage), 0.0)) for stage in range(stages)]
        for field in FIELDS.values()
        if field in names
    }
    whole, inputs = given.get("backward"), given.get("backward_input")
    if inputs is None:
        half = [each / 2 for each in whole] if whole is not None else [0.0] * stages
        given.update(backward_input=half, backward_weight=half)
    elif whole is not None:
        halves = [one + other for one, other in zip(inputs, given.get("backward_weight", [0.0] * stages), strict=True)]
        given["backward"] = [times.get(("backward", stage), halves[stage]) for stage in range(stages)]
    return given
