"""Writes a plan for ``torch.distributed.pipelining``: any schedule on any placement, as CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.ir.formats.torch_csv import csv_from_schedule
from penstock.planning.frameworks.settings import CSV_NAME, Settings

if TYPE_CHECKING:
    from penstock.planning.frameworks.settings import Request


def settings(request: Request) -> Settings:
    """Write the schedule as CSV, and the lines that load it."""
    schedule = request.schedule
    rows = "\n".join(
        f"# rank {rank}: a PipelineStage for {_listed(stages)}" for rank, stages in enumerate(schedule.placement.rows)
    )
    parts = (
        ""
        if request.names is None
        else "".join(f"# stage {stage}: {', '.join(names)}\n" for stage, names in enumerate(request.names))
    )
    text = f"""from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

{rows}
{parts}schedule = _PipelineScheduleRuntime(stages, n_microbatches={schedule.microbatches}, loss_fn=loss_fn)
schedule._load_csv("{CSV_NAME}")
"""
    notes = ("_PipelineScheduleRuntime is private to torch; torchtitan and NeMo AutoModel load CSV files with it, too",)
    files = {CSV_NAME: csv_from_schedule(schedule)}
    return Settings("torch", text, files, notes, schedule, request.planned, request.planned)


def _listed(stages: tuple[int, ...]) -> str:
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
