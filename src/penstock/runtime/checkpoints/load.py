"""Loads a pipeline: ``penstock.load``.

Every rank reads what it needs into new tensors. Only when all ranks have succeeded does any of them use these.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints import folders
from penstock.runtime.checkpoints.channel import run_on_all, same_for_all
from penstock.runtime.checkpoints.contents import devices_of, model_name, options_name, state_name
from penstock.runtime.checkpoints.encoding import decode, dtype_from
from penstock.runtime.checkpoints.fitting import check_fit, compare, names_in, wanted_of
from penstock.runtime.checkpoints.index import Checkpoint, read_checkpoint
from penstock.runtime.checkpoints.model_state import parameter_names, prepare_model
from penstock.runtime.checkpoints.optimizer_state import as_list, options_of, prepare_optimizers
from penstock.runtime.checkpoints.own_state import OwnState, prepare_own
from penstock.runtime.checkpoints.reading import read_tensors
from penstock.runtime.checkpoints.saves import saves_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

    from penstock.execution.stage import Stage
    from penstock.runtime.checkpoints.names import StateNames
    from penstock.runtime.engine import Engine
    from penstock.runtime.pipeline import Pipeline


def load(
    pipe: Pipeline,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: MutableMapping[str, Any] | None = None,
    default: int = 0,
) -> int:
    """Load the latest complete checkpoint of a run, whatever layout has saved it. All ranks call it.

    Also restored are the states of the random number generators of torch, Python and NumPy: those of each rank, if
    the ranks have the stages that they had.

    Args:
        pipe: the pipeline.
        folder: where the checkpoints of the run are.
        step: the step to load, if not the latest.
        optimizer: the optimizer of this rank, or a list of several, over parameters that were trained before.
        scheduler: the learning rate scheduler of this rank.
        scaler: the gradient scaler of this rank.
        extra: what ``save`` got as such: values are replaced by what was saved, objects load it.
        default: what to return if there is no checkpoint.

    Returns:
        How many steps had been trained; `default` if the folder has no complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model; every rank raises it, and nothing has changed.
    """
    engine, target = pipe._engine, Path(folder).absolute()
    engine.begin_call("load()")
    saves = saves_of(engine)
    saves.settle()
    channel = saves.channel

    def choose(_: Sequence[bytes]) -> list[bytes]:
        found = folders.choose(target, step)
        return same_for_all(channel, json.dumps(None if found is None else str(found[1])).encode())

    chosen = json.loads(run_on_all(channel, lambda: b"", choose))
    if chosen is None:
        return default
    checkpoints: list[Checkpoint] = []
    loads: list[Callable[[], None]] = []

    def compare_names() -> bytes:
        checkpoints.append(read_checkpoint(Path(chosen)))
        found = compare(checkpoints[0], engine.stages.values(), engine.state_names())
        return json.dumps([found, [sorted(engine.stages), saves.replica]]).encode()

    def check(parts: Sequence[bytes]) -> list[bytes]:
        ranks = [json.loads(part) for part in parts]
        check_fit(checkpoints[0], [found for found, _ in ranks])
        is_same_layout = [place for _, place in ranks] == [list(index.place) for index in checkpoints[0].ranks]
        return same_for_all(channel, json.dumps(is_same_layout).encode())

    def read() -> bytes:
        own = OwnState(checkpoints[0], channel.rank, is_same_layout)
        loads.extend(_prepare(engine, checkpoints[0], optimizer))
        loads.extend(prepare_own(own, scheduler, scaler, extra, devices_of(engine)))
        return b""

    def apply() -> bytes:
        for one in loads:
            one()
        return b""

    is_same_layout: bool = json.loads(run_on_all(channel, compare_names, check))
    run_on_all(channel, read, lambda _: same_for_all(channel, b""))
    run_on_all(channel, apply, lambda _: same_for_all(channel, b""))
    return checkpoints[0].step


def _prepare(engine: Engine, checkpoint: Checkpoint, optimizer: Any) -> list[Callable[[], None]]:
    """Read what the stages and the optimizers of this rank need; returns what loads it."""
    names, stages, optimizers = engine.state_names(), engine.stages.values(), as_list(optimizer)
    parameters = parameter_names(stages, names)
    tensors: dict[str, torch.Tensor] = {}
    model = _model_part(checkpoint, stages, names, tensors)
    saved = _optimizer_part(checkpoint, optimizers, parameters, names, tensors)
    read_tensors(checkpoint, tensors)
    return [prepare_model(stages, names, model), prepare_optimizers(optimizers, parameters, saved)]


def _model_part(
    checkpoint: Checkpoint, stages: Iterable[Stage], names: StateNames, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Make the values of the stages, by name; the tensors among them, still without content, are noted in `tensors`."""
    found: dict[str, Any] = {}
    for name, target in wanted_of(stages, names):
        for one in names_in(checkpoint, name, names):
            key = model_name(one)
            if key in checkpoint.values:
                found[one] = decode(checkpoint.values[key])
            elif one not in found:
                found[one] = tensors[key] = torch.empty_like(target)
    return found


def _optimizer_part(
    checkpoint: Checkpoint,
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[torch.Tensor, str],
    names: StateNames,
    tensors: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Make the state of optimizers as ``prepare_optimizers`` takes it, in the same way."""
    saved: dict[str, Any] = {"state": {}, "param_groups": {}}
    if optimizers and not any(name.startswith(options_name("")) for name in checkpoint.values):
        raise CheckpointError(f"{checkpoint.path} was saved without an optimizer; load it without optimizer=")
    held = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    for parameter in held:
        name = parameters.get(parameter)
        there = (
            next((one for one in names.names_of(name) if options_name(one) in checkpoint.values), None)
            if name
            else None
        )
        if name is None or there is None or name in saved["param_groups"]:
            continue  # prepare_optimizers explains the first two
        saved["param_groups"][name] = decode(checkpoint.values[options_name(there)])
        state: dict[Any, Any] = saved["state"].setdefault(name, {})
        for path in options_of(name, saved)[1]:
            place = state
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = _state_value(checkpoint, state_name(there, path), parameter, tensors)
    return saved


def _state_value(checkpoint: Checkpoint, key: str, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Any:
    """Make a value of an optimizer's state; what has the shape of the parameter is sharded as that is."""
    if key not in checkpoint.tensors:
        return decode(checkpoint.values[key])
    saved = checkpoint.tensors[key]
    kind = dtype_from(saved.dtype)
    is_alike = saved.shape == tuple(parameter.shape)
    tensors[key] = (
        torch.empty_like(parameter.detach(), dtype=kind) if is_alike else torch.empty(saved.shape, dtype=kind)
    )
    return tensors[key]
