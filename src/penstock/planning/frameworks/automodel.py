"""Writes a plan for NeMo AutoModel: the ``pipeline`` block of its recipes, and the schedule as CSV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.ir.formats.torch_csv import csv_from_schedule
from penstock.planning.frameworks.csv_loading import loading_of
from penstock.planning.frameworks.settings import CSV_NAME, Settings

if TYPE_CHECKING:
    from penstock.planning.frameworks.settings import Request

_FILE = "automodel.yaml"


def settings(request: Request) -> Settings:
    """Write the fields as YAML."""
    loading = loading_of(request, "NeMo AutoModel")
    lines = [
        "distributed:",
        "  strategy: fsdp2",
        f"  pp_size: {loading.schedule.ranks}",
        "  pipeline:",
        f"    pp_schedule: {loading.schedule_name}",
        f"    pp_schedule_csv: {CSV_NAME}",
        "    pp_microbatch_size: 1",
        f"    pp_batch_size: {loading.schedule.microbatches}",
    ]
    if loading.names is not None:
        lines.append("    module_fqns_per_model_part:")
        lines += [f"      - {json.dumps(list(part))}" for part in loading.names]
    text = "\n".join([*lines, ""])
    notes = (
        *loading.notes,
        f"pp_batch_size / pp_microbatch_size must stay {loading.schedule.microbatches}, the number of microbatches",
        "with a CSV, pp_schedule only decides where stages are placed",
    )
    files = {_FILE: text, CSV_NAME: csv_from_schedule(loading.schedule)}
    return Settings("automodel", text, files, notes, loading.schedule, loading.value, request.planned)
