"""The names and the behaviour of ``torch.distributed.pipelining``: change one import.

::

    from penstock.pipelining import PipelineStage, ScheduleGPipe

Modules have the paths that they have there, so ``penstock.pipelining.schedules`` is in place of
``torch.distributed.pipelining.schedules``. Nothing of torch's package is loaded.
"""

from __future__ import annotations

try:
    import torch
except ImportError as error:
    raise ImportError("penstock.pipelining needs torch: pip install 'penstock[torch]'") from error

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    raise ImportError(
        f"penstock.pipelining needs torch 2.13 or later, but this is torch {torch.__version__}: "
        "pip install 'torch>=2.13', or keep using torch.distributed.pipelining"
    )

from penstock.pipelining._IR import Pipe, SplitPoint, pipe_split, pipeline
from penstock.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from penstock.pipelining.schedules import _ScheduleForwardOnly as _ScheduleForwardOnly  # found here, but not public
from penstock.pipelining.stage import PipelineStage, build_stage

__all__ = [
    "Pipe",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "build_stage",
    "pipe_split",
    "pipeline",
]
