"""Looks up what every action of a schedule that splits the backward waits for and costs, as arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from penstock.ir.dependencies import NEEDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.ir.schedule import Schedule

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

#: No action.
NONE: Final = -1

_FIELDS: Final = {FORWARD: "forward", BACKWARD_INPUT: "backward_input", BACKWARD_WEIGHT: "backward_weight"}


@runtime_checkable
class StageCosts(Protocol):
    """The costs that are needed here; ``penstock.Costs`` has them."""

    @property
    def dispatch(self) -> float:
        """The time that a rank takes to start an action."""

    def per_stage(self, field: str, stages: int) -> Floats:
        """Return a field of ``penstock.Costs`` for each stage."""

    def transfer(self, stages: int, *, backward: bool) -> Floats:
        """Return the time of a transfer over the edge after each stage but the last."""


class ActionCosts(NamedTuple):
    """What every action of a schedule waits for and costs, by its index in ``codes``.

    Attributes:
        stage: its stage.
        awaits: the action that it waits for; if none, the index after the last one, which has always ended.
        delay: how long after the end of that action it can start.
        duration: how long it takes.
        change: the memory that it allocates at its start, or releases at its end if negative.
        owes: the weight gradient that an input gradient makes possible, or none.
        reader: the rank that waits for it.
        dispatch: how long a rank takes to start any action.
    """

    stage: Ints
    awaits: Ints
    delay: Floats
    duration: Floats
    change: Floats
    owes: Ints
    reader: Ints
    dispatch: float


def action_costs(schedule: Schedule, costs: StageCosts) -> ActionCosts:
    """Look up what the actions of a schedule that splits the backward wait for and cost."""
    codes, stages, actions = schedule.codes, schedule.stages, len(schedule.codes)
    stage, microbatch, kind = packed.stages(codes), packed.microbatches(codes), packed.types(codes)
    of_kind = {each: np.flatnonzero(kind == packed.TYPE_NUMBER[each]) for each in _FIELDS}
    # The index of each action, with an empty stage at both ends: a missing action has always ended.
    at = {each: np.full((stages + 2, schedule.microbatches), actions) for each in _FIELDS}
    for each, mine in of_kind.items():
        at[each][stage[mine] + 1, microbatch[mine]] = mine

    activation, share = costs.per_stage("activation", stages), costs.per_stage("input_release", stages)
    early = activation * share
    changes = {FORWARD: activation, BACKWARD_INPUT: -early, BACKWARD_WEIGHT: early - activation}
    awaits, duration, change = np.full(actions, actions), np.zeros(actions), np.zeros(actions)
    for each, mine in of_kind.items():
        duration[mine] = costs.per_stage(_FIELDS[each], stages)[stage[mine]]
        change[mine] = changes[each][stage[mine]]
        for need in NEEDS[each]:  # the last one counts: it has itself waited for the others
            (provider,) = at.keys() & set(need.any_of)
            found = at[provider][stage[mine] + 1 + need.stage_offset, microbatch[mine]]
            awaits[mine] = np.where(found < actions, found, awaits[mine])
    delay, reader = _transfers(schedule, awaits, costs)
    owes, inputs = np.full(actions, NONE), of_kind[BACKWARD_INPUT]
    weights = at[BACKWARD_WEIGHT][stage[inputs] + 1, microbatch[inputs]]
    owes[inputs] = np.where(weights < actions, weights, NONE)
    return ActionCosts(stage, awaits, delay, duration, change, owes, reader, costs.dispatch)


def _transfers(schedule: Schedule, awaits: Ints, costs: StageCosts) -> tuple[Floats, Ints]:
    """Return how long the input of each action is in flight, and which rank reads the output of each action."""
    stage = packed.stages(schedule.codes)
    rank = np.array(schedule.placement.rank_of)[stage]
    waiting = np.flatnonzero(awaits < len(awaits))
    waiting = waiting[rank[awaits[waiting]] != rank[waiting]]
    source, target = stage[awaits[waiting]], stage[waiting]
    forth, back = (costs.transfer(schedule.stages, backward=backward) for backward in (False, True))
    edge, delay, reader = np.minimum(source, target), np.zeros(len(rank)), rank.copy()
    delay[waiting] = np.where(source < target, forth[edge], back[edge])
    reader[awaits[waiting]] = rank[waiting]
    return delay, reader
