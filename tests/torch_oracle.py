"""What the installed torch makes of a schedule: the orders that its classes generate, and that its step() runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.distributed.pipelining import schedules as upstream

#: Each rank's actions as text, idle steps and gradient reductions left out.
Order = list[list[str]]


def counting_stage(ranks: int, stages: int, index: int = 0) -> Any:
    """A stage that only counts: torch's schedules ask it for no more, and a real one needs a process group."""
    return SimpleNamespace(
        group_rank=index % ranks, group_size=ranks, num_stages=stages, stage_index=index, submod=None
    )


def instance(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, *, lowered: bool = False, defer: bool = False
) -> Any:
    """A schedule object of torch's, made by its own constructor; its lowering is slow, and left out unless wanted."""
    kind = upstream.get_schedule_class(name)
    stage = counting_stage(ranks, ranks * stages_per_rank)
    if issubclass(kind, upstream.PipelineScheduleSingle):
        return kind(stage, microbatches)
    if lowered:
        return kind([stage] * stages_per_rank, microbatches, defer_pp_recv=defer)
    with mock.patch.object(upstream._PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
        return kind([stage] * stages_per_rank, microbatches)


def generated_order(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Order:
    """The order in torch's own IR. Raises ValueError for the sizes that torch forbids."""
    rows = instance(name, ranks, microbatches, stages_per_rank).pipeline_order
    return [
        [str(action) for action in rows[rank] if action is not None and "REDUCE_GRAD" not in str(action)]
        for rank in range(ranks)
    ]


def executed_order(kind: type, ranks: int, microbatches: int) -> Order:
    """The order in which a single-stage schedule of torch's calls the stage in step(), rank by rank."""
    order = []
    for rank in range(ranks):
        stage = counting_stage(ranks, ranks, rank)
        calls: list[str] = []

        def forward(microbatch: int, *_: Any, rank: int = rank, calls: list[str] = calls, **__: Any) -> None:
            calls.append(f"{rank}F{microbatch}")

        def backward(microbatch: int, *_: Any, rank: int = rank, calls: list[str] = calls, **__: Any) -> None:
            calls.append(f"{rank}B{microbatch}")

        stage.forward_one_chunk = forward
        stage.backward_one_chunk = backward
        for transfer in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
            setattr(stage, f"get_{transfer}_ops", lambda _: [])
        stage.clear_runtime_states = stage.perform_reduce_grad = lambda *_: None
        stage.is_last = stage.is_first = stage.has_backward = False
        schedule = kind(stage, microbatches, loss_fn=lambda *_: None)
        with mock.patch.object(kind, "_initialize_stage"):
            schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        order.append(calls)
    return order


def upstream_rows(schedule: Any) -> dict[int, list[Any]]:
    """A schedule of ours as torch's own actions."""
    return {
        rank: [None if cell is None else upstream._Action.from_str(str(cell)) for cell in row]
        for rank, row in enumerate(schedule.actions)
    }


def text(rows: dict[int, list[Any]]) -> Order:
    """Torch's rows as text."""
    return [[str(action) for action in rows[rank]] for rank in sorted(rows)]
