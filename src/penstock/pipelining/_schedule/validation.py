"""What upstream asks of an order before it takes it, in its types of errors."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from penstock.ir.dependencies import NEEDS
from penstock.pipelining._schedule.actions import _Action
from penstock.pipelining._schedule.passes import OrderError
from penstock.pipelining._schedule.text import _format_pipeline_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.ir.actions import ComputationType

    #: The microbatches that a stage has run, by type of action.
    Done = dict[ComputationType, set[int | None]]


def _validate_schedule(
    actions: Mapping[int, Sequence[_Action | None]], pp_group_size: int, num_stages: int, num_microbatches: int
) -> dict[int, int]:
    """Find the rank of every stage, if each runs all microbatches forward and backward in a possible order.

    Raises:
        OrderError: it does not; an ``AssertionError``.
    """
    if set(actions) != set(range(pp_group_size)):
        found = ", ".join(map(str, sorted(actions)))
        raise OrderError(f"there are {pp_group_size} ranks (0 to {pp_group_size - 1}), but rows for ranks {found}")
    rank_of: dict[int, int] = {}
    done: dict[int, Done] = {stage: defaultdict(set) for stage in range(num_stages)}
    for rank, step, leaf in _leaves(actions):
        stage, kind, microbatch, _ = leaf
        where = f"rank {rank}, step {step}: {leaf}"
        if stage not in done:
            raise OrderError(
                f"{where} refers to stage {stage}, but there are {num_stages} stages (0 to {num_stages - 1})"
            )
        if rank_of.setdefault(stage, rank) != rank:
            raise OrderError(f"{where} is on rank {rank}, but stage {stage} is on rank {rank_of[stage]}")
        for need in NEEDS.get(kind, ()):
            if need.stage_offset == 0 and not any(microbatch in done[stage][provider] for provider in need.any_of):
                missing = " or ".join(f"{stage}{provider}{microbatch}" for provider in need.any_of)
                raise OrderError(
                    f"{where}, of stage {stage} and microbatch {microbatch}, comes before {missing}\n\n"
                    f"{_format_pipeline_order(actions, error_step_number=step)}"
                )
        done[stage][kind].add(microbatch)
    for stage, kinds in done.items():
        _check_complete(stage, kinds, num_microbatches)
    return rank_of


def _leaves(rows: Mapping[int, Sequence[_Action | None]]) -> Iterator[tuple[int, int, _Action]]:
    for rank, row in rows.items():
        for step, action in enumerate(row):
            if action is None:
                continue
            if not isinstance(action, _Action):
                raise OrderError(f"rank {rank}, step {step}: {action!r} is not an _Action, but a {type(action)}")
            for leaf in action.parts:
                yield rank, step, leaf


def _check_complete(stage: int, done: Done, microbatches: int) -> None:
    forward, whole, first, second = (
        len(done[kind]) for kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    counted = f"B={whole}, I={first}, W={second}"
    if forward != microbatches:
        raise OrderError(f"stage {stage} runs {forward} microbatches forward, not {microbatches}")
    if first != second:
        raise OrderError(f"stage {stage} does not run an I and a W of the same microbatches: {counted}")
    if whole + first != microbatches:
        raise OrderError(f"stage {stage} does not run {microbatches} microbatches backward: {counted}")
