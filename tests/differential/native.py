"""Cases on ``penstock.runtime.Pipeline``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import penstock as ps
from differential.cases import LOOP, NATIVE_SCHEDULES, Case
from differential.forms import FORMS
from differential.models import Batch, Loss, StageModule, build, weigh
from differential.observing import Result, finish, observe
from differential.reference import forward
from penstock.runtime import Microbatches, Pipeline, Stage, TensorChunkSpec, run_in_threads


def schedule_of(case: Case) -> ps.Schedule:
    if case.order is not None:
        return ps.Schedule(case.order, placement=ps.Placement(case.rank_of, case.ranks))
    several = {"stages_per_rank": len(case.rank_of) // case.ranks} if NATIVE_SCHEDULES[case.schedule] == LOOP else {}
    return ps.build(case.schedule, ranks=case.ranks, microbatches=case.microbatches, **several)


def run_threads(case: Case) -> list[Result]:
    """The result of each rank."""
    schedule = schedule_of(case)
    modules = [build(case) for _ in range(case.ranks)]  # here, since random numbers are those of the process
    shapes = shapes_of(case)
    results = [Result() for _ in range(case.ranks)]

    def worker(transport: Any) -> None:
        rank = transport.rank
        run_rank(case, rank, results[rank], modules[rank], schedule, shapes, transport=transport)

    with suppress(Exception):  # which are in the results
        run_in_threads(worker, case.ranks, timeout=60)
    return results


def run_process(case: Case, rank: int, group: Any, result: Result) -> None:
    """Run one rank, in a process."""
    run_rank(case, rank, result, build(case), schedule_of(case), shapes_of(case), group=group, timeout=30)


def shapes_of(case: Case) -> Any:
    """How a pipeline knows the shapes: if they are given, what each stage returns for one microbatch."""
    if case.shapes != "given":
        return case.shapes
    batch = Batch(case, case.first_step or 0)
    values = forward(case, build(case), batch.microbatches()[0], batch.split(batch.scale)[0])
    return {
        index: tree_map_only(torch.Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), value)
        for index, value in enumerate(values[:-1])
    }


def run_rank(
    case: Case,
    rank: int,
    result: Result,
    modules: list[StageModule],
    schedule: ps.Schedule,
    shapes: Any,
    **where: Any,
) -> None:
    mine = {index: modules[index] for index in case.stages_of(rank)}
    stages = [
        Stage(index, module, changes_inputs="changes" in FORMS[module.plan.takes].marks if index else False)
        for index, module in mine.items()
    ]
    options: dict[str, Any] = {"args_spec": (TensorChunkSpec(1),)} if case.given == "columns" else {}
    if case.reduction == "weighted":
        options["loss_weight"] = weigh
    with (
        result.note_errors(),
        Pipeline(
            stages,
            schedule,
            loss_fn=Loss(case),
            loss_reduction=case.reduction,
            shapes=shapes,
            share_losses=case.shares_losses,
            allow_untrained=case.allows_untrained,
            **options,
            **where,
        ) as pipe,
    ):
        for number, call in enumerate(case.calls):
            batch = Batch(case, number)
            args = batch.args
            if case.given == "split":
                args = (Microbatches([one for (one,) in batch.microbatches()]),)
            losses: list[torch.Tensor] = []
            output = getattr(pipe, call.kind)(
                *(args if pipe.has_first else ()),
                target=batch.target if pipe.has_last else None,
                losses=losses if call.losses else None,
                **batch.kwargs(rank),
                **({} if call.outputs else {"return_outputs": False}),
            )
            result.calls.append(observe(mine, batch if pipe.has_first else None, output, losses))
            if call.kind == "step":
                finish(mine.values(), call.after)
