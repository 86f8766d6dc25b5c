"""Writes a plan for torchtitan: fields of its ``ParallelismConfig``, and the schedule as CSV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.ir.formats.torch_csv import csv_from_schedule
from penstock.planning.frameworks.csv_loading import loading_of
from penstock.planning.frameworks.settings import CSV_NAME, Settings

if TYPE_CHECKING:
    from penstock.planning.frameworks.settings import Request

_FILE = "torchtitan.toml"


def settings(request: Request) -> Settings:
    """Write the fields as TOML."""
    loading = loading_of(request, "torchtitan")
    fields: dict[str, object] = {
        "pipeline_parallel_degree": loading.schedule.ranks,
        "pipeline_parallel_schedule": loading.schedule_name,
        "pipeline_parallel_schedule_csv": CSV_NAME,
        "pipeline_parallel_microbatch_size": 1,
    }
    if loading.names is not None:
        fields["module_fqns_per_model_part"] = [list(part) for part in loading.names]
    lines = [f"{field} = {json.dumps(value)}" for field, value in fields.items()]
    batch = f"local_batch_size = {loading.schedule.microbatches}"
    text = "\n".join(["[parallelism]", *lines, "", "[training]", batch, ""])
    notes = (
        *loading.notes,
        f"training.local_batch_size / parallelism.pipeline_parallel_microbatch_size must stay "
        f"{loading.schedule.microbatches}, the number of microbatches",
        "with a CSV, pipeline_parallel_schedule only decides where stages are placed",
        "versions without TOML files take the same fields as --parallelism.NAME, or in ParallelismConfig",
    )
    files = {_FILE: text, CSV_NAME: csv_from_schedule(loading.schedule)}
    return Settings("torchtitan", text, files, notes, loading.schedule, loading.value, request.planned)
