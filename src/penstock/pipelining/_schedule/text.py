"""Orders for people: as a grid of text, step by step in a simulation, and as a trace."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ScheduleError
from penstock.ir.actions import COMPUTE, SHARDING, ComputationType
from penstock.ir.dependencies import NEEDS, TRANSFERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    from penstock.pipelining._schedule.actions import _Action
    from penstock.pipelining._schedule.rows import Rows


def _format_pipeline_order(
    pipeline_order: Mapping[int, Sequence[_Action | None]], error_step_number: int | None = None
) -> str:
    """Draw a line per step and a column per rank; one step may be pointed at.

    >>> from penstock.pipelining._schedule.actions import _Action
    >>> order = {0: [_Action.from_str("0F0"), None], 1: [None, _Action.from_str("1F0")]}
    >>> [line.rstrip() for line in _format_pipeline_order(order).splitlines()]
    ['        Rank 0 Rank 1', 'Step 0: 0F0', 'Step 1:        1F0']
    """
    rows = [
        ["" if action is None else str(action) for action in pipeline_order[rank]] for rank in sorted(pipeline_order)
    ]
    steps = max(map(len, rows), default=0)
    labels = [f"Step {step:0{len(str(steps - 1))}}" for step in range(steps)]
    names = [f"Rank {number}" for number in range(len(rows))]
    widths = [max(map(len, [name, *labels[:1], *row])) for name, row in zip(names, rows, strict=True)]
    head = " " * (len(labels[0]) + 2 if labels else 0)
    lines = [head + " ".join(f"{name:<{width}}" for name, width in zip(names, widths, strict=True))]
    for step, cells in enumerate(zip_longest(*rows, fillvalue="")):
        line = f"{labels[step]}: " + " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(line + (" <-- ERROR HERE" if step == error_step_number else ""))
    return "\n".join(lines) + "\n"


class StuckError(ScheduleError):
    """A schedule in which some rank would wait forever."""


def _simulate_comms_compute(
    pipeline_order: Mapping[int, Sequence[_Action | None]], stage_to_rank: Callable[[int], int], num_stages: int
) -> Rows:
    """Every rank's actions with None where it waits, if each rank runs at most one action a step.

    Raises:
        ValueError: the schedule is not progressing.
    """
    left = {rank: [action for action in pipeline_order[rank] if action is not None] for rank in sorted(pipeline_order)}
    simulated: Rows = {rank: [] for rank in left}
    done: dict[int, set[tuple[object, ...]]] = {rank: set() for rank in left}
    place = dict.fromkeys(left, 0)

    def step_of(rank: int) -> _Action | None:
        action = left[rank][place[rank]]
        if not all(_is_ready(leaf, done, stage_to_rank, num_stages) for leaf in action.parts):
            return None
        done[rank].update(action.parts)
        place[rank] += 1
        return action

    def unfinished() -> list[int]:
        return [rank for rank in left if place[rank] < len(left[rank])]

    while waiting := unfinished():
        for rank in waiting:
            simulated[rank].append(step_of(rank))
        if all(simulated[rank][-1] is None for rank in waiting):
            heads = ", ".join(f"rank {rank} at {left[rank][place[rank]]}" for rank in waiting)
            raise StuckError(f"the schedule is not progressing: {heads}\n{_format_pipeline_order(simulated)}")
        for rank in unfinished():  # what a higher rank did may have been what this one waited for
            if simulated[rank][-1] is None:
                simulated[rank][-1] = step_of(rank)
    return simulated


_SEND = {transfer.send: transfer for transfer in TRANSFERS}
_RECEIVE = {transfer.receive: transfer for transfer in TRANSFERS}


def _is_ready(
    leaf: _Action, done: Mapping[int, set[tuple[object, ...]]], rank_of: Callable[[int], int], stages: int
) -> bool:
    stage, kind, microbatch, _ = leaf

    def any_done(of_stage: int, kinds: Sequence[ComputationType], rank: int) -> bool:
        return any((of_stage, each, microbatch, None) in done[rank] for each in kinds)

    if kind in SHARDING:
        return True
    if sent := _SEND.get(kind):
        return any_done(stage, sent.made_by, rank_of(stage))
    if received := _RECEIVE.get(kind):
        peer = stage - received.stage_offset
        return any_done(peer, [received.send], rank_of(peer))
    if kind not in COMPUTE:
        raise StuckError(f"{leaf} is not an action that can be simulated")
    for need in NEEDS[kind]:
        other = stage + need.stage_offset
        if need.stage_offset == 0 or not 0 <= other < stages:
            continue
        receive = next(transfer.receive for transfer in TRANSFERS if kind in transfer.needed_by)
        home = rank_of(stage)
        if not any_done(stage, [receive], home) and not any_done(other, need.any_of, home):
            return False
    return True


def _dump_chrometrace(schedule: Mapping[int, Sequence[_Action | None]], filename: str | PathLike[str]) -> None:
    """Write a trace of the order for Perfetto and ``chrome://tracing``: every action takes one microsecond."""
    events = [
        {
            "name": str(action),
            "cat": "computation" if action.is_compute else "communication",
            "ph": "X",
            "pid": rank,
            "tid": rank,
            "ts": step,
            "dur": 1,
        }
        for rank in sorted(schedule)
        for step, action in enumerate(schedule[rank])
        if action is not None
    ]
    Path(filename).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
