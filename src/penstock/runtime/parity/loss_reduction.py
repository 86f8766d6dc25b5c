"""Checks that the losses of the microbatches add up to that of the batch, by calling the loss function for it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from penstock.errors import MetadataError, MicrobatchError
from penstock.execution.microbatches.merge import merge
from penstock.execution.microbatches.split import is_presplit
from penstock.execution.preserved_state import copy_as_leaves
from penstock.runtime.parity.comparison import precision
from penstock.runtime.parity.report import Reduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.engine import Engine
    from penstock.runtime.parity.unsplit import Unsplit


def reduction_of(engine: Engine, unsplit: Unsplit, losses: Sequence[torch.Tensor], target: Any) -> Reduction:
    """Check on the rank of the last stage, and send the result to all."""
    mine = asdict(_reduced(engine, unsplit, losses, target)) if engine.has_last else {}
    report = engine.transport.exchange(json.dumps(mine).encode())[engine.schedule.placement.rank_of[-1]]
    try:
        return Reduction(**json.loads(report))
    except (TypeError, ValueError) as error:
        raise MetadataError("could not decode the losses sent by the last stage's rank") from error


def _reduced(engine: Engine, unsplit: Unsplit, losses: Sequence[torch.Tensor], target: Any) -> Reduction:
    outputs, targets = unsplit.outputs, unsplit.targets
    loss_fn: Any = engine.loss_fn
    try:
        whole_output, whole_target = _whole(engine, outputs, targets, target)
    except Exception as error:  # a splitter's merge may raise any error
        return Reduction(unchecked=str(error))
    try:
        again = [loss_fn(copy_as_leaves(output), one).detach() for output, one in zip(outputs, targets, strict=True)]
        loss = loss_fn(whole_output, whole_target)
    except Exception as error:
        return Reduction(unchecked=f"loss_fn fails for the whole batch, with {type(error).__name__}: {error}")
    if not all(_alike(one, other) for one, other in zip(again, losses, strict=True)):
        return Reduction(unchecked="loss_fn returns a different loss when called again with the same values")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return Reduction(unchecked="loss_fn does not return one number for the whole batch")
    counted = [share * float(one) for share, one in zip(unsplit.shares, losses, strict=True)]
    whole, size = float(loss.detach()), math.fsum(abs(one) for one in counted)
    return Reduction(whole, sum(counted), precision(loss) * max(size, abs(whole)))


def _whole(engine: Engine, outputs: Sequence[Any], targets: Sequence[Any], target: Any) -> tuple[Any, Any]:
    """Merge the outputs and the targets of all microbatches."""
    if any(isinstance(leaf, torch.Tensor) and leaf.ndim == 0 for leaf in pytree.tree_leaves(outputs)):
        raise MicrobatchError("the last stage returns one number per microbatch, and none for the whole batch")
    output = merge(copy_as_leaves(outputs), engine.output_spec)
    if is_presplit(output):
        raise MicrobatchError("output_spec keeps the outputs of the microbatches separate")
    if is_presplit(target):
        target = merge(targets, engine.batches.specs["target_spec"], name="target")
    return output, target


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=precision(other), atol=0.0, equal_nan=True)
