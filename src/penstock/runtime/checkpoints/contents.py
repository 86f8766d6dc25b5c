"""Collects what a rank saves: tensors and values by name, and what is the rank's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from penstock.errors import CheckpointError
from penstock.execution.stage import device_of
from penstock.runtime.checkpoints.data_files import Piece
from penstock.runtime.checkpoints.encoding import encode
from penstock.runtime.checkpoints.random_states import random_states
from penstock.runtime.checkpoints.state import MODEL, OPTIMIZER, collect_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.runtime.engine import Engine

#: What is kept for each rank, beside the states of its random number generators.
RANDOM, SCHEDULER, SCALER, EXTRA = "random", "scheduler", "scaler", "extra"
#: The only name of what there is one of.
STATE = "state"


class Contents(NamedTuple):
    """What a rank saves.

    Attributes:
        pieces: tensors, or this rank's shards of them.
        values: what is no tensor, encoded, by name.
        own: what belongs to the rank, encoded, by kind and name.
    """

    pieces: list[Piece]
    values: dict[str, Any]
    own: dict[str, dict[str, Any]]

    @property
    def names(self) -> list[str]:
        """The names of all pieces and values."""
        return [piece.key for piece in self.pieces] + list(self.values)


def collect_contents(
    engine: Engine, optimizer: Any, scheduler: Any, scaler: Any, extra: Mapping[str, Any] | None
) -> Contents:
    """Collect what this rank has. Tensors are those of the pipeline, not copies."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    state = collect_state(engine.stages.values(), engine.state_names(), optimizer)
    for name, value in _flatten(state):
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            values[name] = encode(value, name)
    own: dict[str, dict[str, Any]] = {RANDOM: random_states(devices_of(engine)), EXTRA: {}}
    for kind, part in ((SCHEDULER, scheduler), (SCALER, scaler)):
        own[kind] = {} if part is None else {STATE: encode(part.state_dict(), f"the state of the {kind}")}
    for key, value in (extra or {}).items():
        own[EXTRA][key] = encode(value.state_dict() if is_stateful(value) else value, f"extra[{key!r}]")
    return Contents(list(_pieces(tensors)), values, own)


def devices_of(engine: Engine) -> set[torch.device]:
    """Find where the stages of this rank are."""
    return {device_of(engine.stages)} if engine.stages else set()


def is_stateful(value: Any) -> bool:
    """Whether an object has a state to save and to load, as samplers and data loaders have."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def state_name(name: str, path: tuple[Any, ...]) -> str:
    """Name a part of the state of an optimizer."""
    return ".".join((OPTIMIZER, "state", name, *map(str, path)))


def options_name(name: str) -> str:
    """Name the options of a parameter's group."""
    return f"{OPTIMIZER}.param_groups.{name}"


def model_name(name: str) -> str:
    """Name a part of the model."""
    return f"{MODEL}.{name}"


def _flatten(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield everything in a state dict with its name in a checkpoint, as torch.distributed.checkpoint names it."""
    for name, value in state[MODEL].items():
        yield model_name(name), value
    for name, options in state.get(OPTIMIZER, {}).get("param_groups", {}).items():
        yield options_name(name), options
    for name, held in state.get(OPTIMIZER, {}).get("state", {}).items():
        for path, value in _leaves(held):
            yield state_name(name, path), value


def _leaves(held: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in held.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _pieces(tensors: dict[str, Any]) -> Iterator[Piece]:
    """Yield tensors, or this rank's shards of them, as torch.distributed.checkpoint divides them."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors)
    for item in planner.create_local_plan().items:
        tensor = planner.resolve_data(item)
        if item.tensor_data is None or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{item.index.fqn} is a {type(tensors[item.index.fqn])}, which cannot be saved")
        whole = tuple(item.tensor_data.size)
        if tensor.numel() or not all(whole):  # a rank may have an empty shard of a tensor
            yield Piece(item.index.fqn, whole, tuple(item.tensor_data.chunk.offsets), tensor.detach())
