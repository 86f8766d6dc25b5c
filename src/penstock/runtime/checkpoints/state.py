"""The state of a pipeline as a dictionary for ``torch.distributed.checkpoint``, by the names of the unsplit model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.model_state import collect_model, fit_tensor, parameter_names, prepare_model
from penstock.runtime.checkpoints.optimizer_state import as_list, collect_optimizers, prepare_optimizers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.execution.stage import Stage
    from penstock.runtime.checkpoints.names import StateNames

MODEL, OPTIMIZER = "model", "optimizer"


def collect_state(stages: Collection[Stage], names: StateNames, optimizer: Any) -> dict[str, Any]:
    """Return what the stages and the optimizers of this rank hold, by name; tensors are not copied."""
    found: dict[str, Any] = {MODEL: collect_model(stages, names)}
    if optimizer is not None:
        found[OPTIMIZER] = collect_optimizers(as_list(optimizer), parameter_names(stages, names))
    return found


def restore_state(stages: Collection[Stage], names: StateNames, state: Mapping[str, Any], optimizer: Any) -> None:
    """Load the stages and the optimizers of this rank with such a dictionary, which may hold more than they need."""
    wanted = [MODEL] if optimizer is None else [MODEL, OPTIMIZER]
    missing = [part for part in wanted if part not in state]
    if missing:
        raise CheckpointError(f"the state has no {missing[0]!r}; pass what pipe.state_dict(...) has returned")
    load_model = prepare_model(stages, names, state[MODEL])
    if optimizer is None:
        load_model()
        return
    copied = pytree.tree_map_only(torch.Tensor, torch.clone, dict(state[OPTIMIZER]))
    load_optimizers = prepare_optimizers(as_list(optimizer), parameter_names(stages, names), copied, fit_tensor)
    load_model()
    load_optimizers()
