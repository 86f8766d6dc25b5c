"""Measures what every layer of the model costs, on all ranks at once, as they will compute."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from penstock.runtime.demo.events import report
from penstock.runtime.demo.model import CONTEXT, build, loss_of
from penstock.runtime.demo.text import Text
from penstock.runtime.profiling import profile

if TYPE_CHECKING:
    from collections.abc import Mapping

#: How often each time is measured.
REPEATS = 8


def profile_layers(job: Mapping[str, Any]) -> bool:
    """Profile the layers; rank 0 reports what they cost."""
    tokens, target = Text().batch(0, job["samples"], CONTEXT)
    is_first = dist.get_rank() == 0
    found = profile(
        partial(build, job["blocks"]),
        ((tokens,), {}),
        target=target,
        loss_fn=loss_of,
        per="layer",
        repeats=REPEATS,
        report=(lambda line: report("profiling", line=line)) if is_first else None,
    )
    if is_first:
        names = [name for group in found.names for name in group]
        report("profiled", costs=found.costs.to_dict(), names=names, table=found.describe())
    return True
