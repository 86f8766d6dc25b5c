"""Runs any verified schedule over the stages of a model, on torch.distributed.

>>> from penstock.runtime import Pipeline
"""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("penstock.runtime needs torch: pip install 'penstock[torch]'") from error

import penstock.execution.microbatches.block_masks  # noqa: F401  # registers how masks are split
from penstock.execution.microbatches.specs import Microbatches, Replicate, TensorChunkSpec, register_splitter
from penstock.execution.stage import Stage
from penstock.runtime.checkpoints.reading import CheckpointReader
from penstock.runtime.custom_functions import Context
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.runtime.transport.threads import run_in_threads

__all__ = [
    "CheckpointReader",
    "Context",
    "DistributedTransport",
    "Microbatches",
    "Pipeline",
    "Replicate",
    "Stage",
    "TensorChunkSpec",
    "register_splitter",
    "run_in_threads",
]
