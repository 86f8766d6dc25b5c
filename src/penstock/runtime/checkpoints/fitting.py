"""Compares a checkpoint with the stages of a pipeline: one of another model is refused as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import CheckpointError
from penstock.execution.ties import near_matches
from penstock.runtime.checkpoints.contents import model_name
from penstock.runtime.checkpoints.names import entries_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.execution.stage import Stage
    from penstock.runtime.checkpoints.index import Checkpoint
    from penstock.runtime.checkpoints.names import StateNames

_PREFIX = model_name("")


def wanted_of(stages: Iterable[Stage], names: StateNames) -> Iterator[tuple[str, Any]]:
    """Yield what the stages hold, with all names that it may have in a checkpoint, the first one first."""
    for stage in stages:
        for name, _, value in entries_of(stage.module):
            yield names.name(stage.index, name), value


def names_in(checkpoint: Checkpoint, name: str, names: StateNames) -> list[str]:
    """Find the names that a part of the model has in a checkpoint: several if it was no tie when that was saved."""
    return [one for one in names.names_of(name) if has_part(checkpoint, one)]


def has_part(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a checkpoint has a part of the model."""
    return model_name(name) in checkpoint.tensors or model_name(name) in checkpoint.values


def compare(checkpoint: Checkpoint, stages: Iterable[Stage], names: StateNames) -> dict[str, list[str]]:
    """Compare the stages of this rank with a checkpoint: what fits, what is missing there, what has another shape."""
    found: dict[str, list[str]] = {"used": [], "missing": [], "misshapen": []}
    for name, value in wanted_of(stages, names):
        there = names_in(checkpoint, name, names)
        found["used"] += there
        if not there:
            found["missing"].append(name)
        for one in there:
            saved = checkpoint.tensors.get(model_name(one))
            if saved is not None and isinstance(value, torch.Tensor) and saved.shape != tuple(value.shape):
                shapes = f"{list(value.shape)} in this pipeline, but {list(saved.shape)} in the checkpoint"
                found["misshapen"].append(f"{one} has shape {shapes}")
    return found


def check_fit(checkpoint: Checkpoint, ranks: Sequence[dict[str, list[str]]]) -> None:
    """Raise unless the stages of all ranks together are what was saved."""
    missing, used, misshapen = (
        list(dict.fromkeys(one for rank in ranks for one in rank[kind])) for kind in ("missing", "used", "misshapen")
    )
    known = [
        name.removeprefix(_PREFIX) for name in (*checkpoint.tensors, *checkpoint.values) if name.startswith(_PREFIX)
    ]
    unused = [name for name in known if name not in set(used)]
    wrong = []
    if unused:
        wrong.append(f"it has {_first(unused)}, which this pipeline does not have")
    if misshapen:
        wrong.append(_first(misshapen))
    if missing:
        wrong.append(f"it lacks {_first(missing)}{near_matches(missing[0], unused or known)}")
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path} was saved from a different model: {'; '.join(wrong)}", path=str(checkpoint.path)
        )


def _first(names: Sequence[str]) -> str:
    return names[0] + (f", and {len(names) - 1} more" if len(names) > 1 else "")
