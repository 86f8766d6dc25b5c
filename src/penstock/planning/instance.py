"""Lays out a planning problem for the kernels: arrays only, indexed by stage, rank or token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.planning.orders import KINDS, B, F, I, W

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.simulation.problem import Inputs, Problem

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

#: The tolerance of memory limits, as a share: anything below is rounding.
ROUNDING: Final = 1e-9


class Instance(NamedTuple):
    """A problem as the kernels read it.

    Attributes:
        microbatches: the number of microbatches.
        dispatch: how long a rank takes to start any action.
        rank_of: the rank of each stage.
        stages_first: where the stages of each rank begin in ``stages_of``.
        stages_of: the stages of each rank, ascending.
        time: how long each token takes.
        release: the memory that each token releases at its end.
        activation: the memory that F of each stage takes.
        splits: whether the backward of each stage may be split.
        forward_first: where the inputs of F of each stage begin.
        forward_stage: the stages whose F they come from.
        forward_delay: how long they are in flight.
        backward_first: where the inputs of I or B of each stage begin.
        backward_stage: the stages whose I or B they come from.
        backward_delay: how long they are in flight.
        forward_users_first: where the users of F of each stage begin.
        forward_users: the stages whose F wait for it.
        backward_users_first: where the users of I or B of each stage begin.
        backward_users: the stages whose I or B wait for it.
        budget: the memory of each rank for activations.
    """

    microbatches: int
    dispatch: float
    rank_of: Ints
    stages_first: Ints
    stages_of: Ints
    time: Floats
    release: Floats
    activation: Floats
    splits: NDArray[np.bool_]
    forward_first: Ints
    forward_stage: Ints
    forward_delay: Floats
    backward_first: Ints
    backward_stage: Ints
    backward_delay: Floats
    forward_users_first: Ints
    forward_users: Ints
    backward_users_first: Ints
    backward_users: Ints
    budget: Floats


def instance_of(problem: Problem) -> Instance:
    """Return the arrays of a problem."""
    stages, rank_of = problem.stages, problem.rank_of
    time, release = np.zeros((stages, KINDS)), np.zeros((stages, KINDS))
    for kind, amount in ((F, problem.forward), (I, problem.input), (W, problem.weight), (B, problem.whole)):
        time[:, kind] = amount
    for kind, amount in ((I, problem.input_release), (W, problem.weight_release), (B, problem.activation)):
        release[:, kind] = amount
    forward, backward = problem.forward_inputs, problem.backward_inputs
    return Instance(
        problem.microbatches,
        problem.dispatch,
        rank_of,
        np.searchsorted(np.sort(rank_of), np.arange(problem.ranks + 1)),
        np.argsort(rank_of, kind="stable"),
        time.ravel(),
        release.ravel(),
        problem.activation,
        problem.splits,
        *forward,
        *backward,
        *_users(forward, stages),
        *_users(backward, stages),
        problem.budget * (1 + ROUNDING) + ROUNDING * problem.activation.max(initial=0.0),
    )


def _users(inputs: Inputs, stages: int) -> tuple[Ints, Ints]:
    """Return who waits for each stage, given whom each stage waits for."""
    waiting = np.repeat(np.arange(stages), np.diff(inputs.first))
    order = np.argsort(inputs.stage, kind="stable")
    return np.searchsorted(inputs.stage[order], np.arange(stages + 1)), waiting[order]
