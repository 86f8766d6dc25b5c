"""torch's schedules with our stages."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed.pipelining.schedules as torch_schedules

import penstock.pipelining.stage as our_stage


@contextmanager
def known_to_torch() -> Iterator[None]:
    """Around a step: torch's schedules ask whether a stage is of their own class."""
    theirs = torch_schedules.PipelineStage
    torch_schedules.PipelineStage = our_stage.PipelineStage  # type: ignore[misc]
    try:
        yield
    finally:
        torch_schedules.PipelineStage = theirs  # type: ignore[misc]
