"""Cases on ``penstock.pipelining``."""

from __future__ import annotations

from typing import Any

import torch

from differential.cases import CUSTOM, Case
from differential.models import Batch, Loss, build
from differential.observing import Result, finish, observe
from differential.reference import forward
from penstock.pipelining import schedules
from penstock.pipelining.microbatch import TensorChunkSpec
from penstock.pipelining.stage import PipelineStage

SINGLE = ("GPipe", "1F1B")


def run_process(case: Case, rank: int, group: Any, result: Result) -> None:
    """Run one rank, in a process."""
    mine = {index: module for index, module in enumerate(build(case)) if case.rank_of[index] == rank}
    examples = examples_of(case)
    stages = [
        PipelineStage(module, index, len(case.stages), torch.device("cpu"), group=group, **examples.get(index, {}))
        for index, module in mine.items()
    ]
    schedule = schedule_of(case, stages)
    has_first, has_last = 0 in mine, len(case.stages) - 1 in mine
    for number, call in enumerate(case.calls):
        batch = Batch(case, number)
        losses: list[torch.Tensor] = []
        given = {"target": batch.target, "losses": losses if call.losses else None} if has_last else {}
        args, named = batch.args if has_first else (), batch.kwargs(rank)
        if case.given == "split":
            args, named = (), {}
            given = {"losses": given.get("losses"), "arg_mbs": batch.microbatches() if has_first else None,
                     "target_mbs": batch.split(batch.target) if has_last else None}  # fmt: skip
            if not has_first and not has_last:
                given = {}
        if not call.outputs:
            given["return_outputs"] = False
        output = getattr(schedule, call.kind)(*args, **named, **given)
        result.calls.append(observe(mine, batch if has_first else None, output, losses))
        if call.kind == "step":
            finish(mine.values(), call.after)


def schedule_of(case: Case, stages: list[PipelineStage]) -> Any:
    options: dict[str, Any] = {"loss_fn": Loss(case), "scale_grads": case.reduction == "mean"}
    if case.given == "columns":
        options["args_chunk_spec"] = (TensorChunkSpec(1),)
    if case.schedule == CUSTOM:
        return custom(case, stages, options)
    kind = schedules.get_schedule_class(case.schedule)
    if case.schedule == "LoopedBFS":
        options.pop("args_chunk_spec", None)  # which it does not take
    return kind(stages[0] if case.schedule in SINGLE else stages, case.microbatches, **options)


def custom(case: Case, stages: list[PipelineStage], options: dict[str, Any]) -> Any:
    """A schedule with an order of its own, in one of the two ways in which one writes it."""
    rows = {rank: [schedules._Action.from_str(one) for one in row] for rank, row in enumerate(case.order or ())}
    if case.seed % 4 == 1:
        schedule: Any = _OwnOrder(stages, case.microbatches, **options)
        schedule.pipeline_order = rows
        schedule._validate_and_set_stage_mapping(rows)
    else:
        schedule = schedules._PipelineScheduleRuntime(stages, case.microbatches, **options)
        schedule._prepare_schedule_with_comms(rows)
    return schedule


class _OwnOrder(schedules.PipelineScheduleMulti):
    use_full_backward = False


def examples_of(case: Case) -> dict[int, dict[str, Any]]:
    """What goes in and comes out of each stage for one microbatch, if that is given."""
    if case.shapes != "given" or case.has_containers:
        return {}
    batch = Batch(case, case.first_step or 0)
    args = batch.microbatches()[0]
    values = forward(case, build(case), args, batch.split(batch.scale)[0])
    examples = {}
    for index, value in enumerate(values):
        outputs = value if isinstance(value, tuple) else (value,)
        examples[index] = {
            name: tuple(one.detach().requires_grad_(one.requires_grad) for one in tensors)
            for name, tensors in (("input_args", args), ("output_args", outputs))
        }
        args = outputs
    return examples
