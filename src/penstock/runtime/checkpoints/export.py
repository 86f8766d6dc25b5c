"""Exports the model of a pipeline as one: safetensors under the names of the unsplit model.

Every rank writes its own tensors; the first one places the files when all are complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from penstock.errors import CheckpointError
from penstock.execution.distributed_tensors import full_tensor
from penstock.models.weights.shards import divide, parse_size, place_shards, write_shard
from penstock.runtime.checkpoints.channel import TransportChannel, share_results
from penstock.runtime.checkpoints.model_state import collect_model

if TYPE_CHECKING:
    import os

    from penstock.runtime.checkpoints.channel import Channel
    from penstock.runtime.engine import Engine
    from penstock.runtime.pipeline import Pipeline

#: Where files are until all are complete, in the folder that they are for.
_PART: Final = ".export.part"


def export(
    pipe: Pipeline,
    folder: str | os.PathLike[str],
    *,
    format: str = "safetensors",  # noqa: A002
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the model of a pipeline to a folder, under the names of the unsplit model. All ranks call it.

    The result is what ``save_pretrained`` of the unsplit model writes: ``from_pretrained`` reads it, and
    ``split.materialize(..., state_dict=folder)``. A tied parameter is written once. If several ranks have parameters,
    there are several files and an index; other files in the folder, such as a tokenizer's, stay. With replicas of the
    pipeline, all of them call it, and the first one writes.

    Args:
        pipe: the pipeline.
        folder: where to write; every rank must see the same one.
        format: ``"safetensors"``.
        max_shard_size: the most bytes in a file.

    Raises:
        CheckpointError: a rank cannot write; every rank raises it, and what was in the folder before is still there.
    """
    if format != "safetensors":
        raise CheckpointError(f"unknown format {format!r}; write format='safetensors'")
    engine, most, target = pipe._engine, parse_size(max_shard_size), Path(folder)
    engine.begin_call("export()")
    channel = TransportChannel(engine.transport)
    groups = {group: None for stage in engine.stages.values() if stage.parallel for group in stage.parallel.groups}
    is_first = all(dist.get_rank(group) == 0 for group in groups)
    tensors = _gather(engine, keep=is_first)
    if all(share_results(channel, lambda: is_first)):
        _write(engine, channel, tensors, target, most)
    for group in groups:  # the files are complete when this returns, on every replica
        dist.barrier(group)


def _gather(engine: Engine, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return this rank's tensors by name, if it keeps them. All ranks that hold shards of a tensor call it."""
    names = engine.state_names()
    if names.prefixed:
        raise CheckpointError(
            "these stages have tensors of one name, so there is no unsplit model with such names; make the stages with "
            "penstock.split, or save them with penstock.save"
        )
    found: dict[str, torch.Tensor] = {}
    for name, tensor in collect_model(engine.stages.values(), names).items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{name} is extra state of a module, which safetensors cannot hold")
        whole = full_tensor(tensor)
        if keep:
            found[name] = whole.detach()
    return found


def _write(engine: Engine, channel: Channel, tensors: dict[str, torch.Tensor], target: Path, most: int) -> None:
    """Write the tensors of all ranks; what several ranks have, such as one that is tied, the first of them writes."""
    part, is_first = target / _PART, engine.rank == 0

    def prepare() -> list[str]:
        if is_first:
            shutil.rmtree(part, ignore_errors=True)  # of an export that was interrupted
            part.mkdir(parents=True)
        return list(tensors)

    def write() -> list[tuple[str, dict[str, int]]]:
        mine = {name: tensor for name, tensor in tensors.items() if writer_of[name] == engine.rank}
        renamed = mine if engine.split is None else engine.split.rename_for_files(mine)
        shards = []
        for number, shard in enumerate(divide(renamed, most)):
            name = f"{engine.rank}-{number}.safetensors"
            write_shard(shard, part / name)
            shards.append((name, {key: tensor.nbytes for key, tensor in shard.items()}))
        return shards

    def place() -> None:
        if is_first:
            _place(engine, [(part / name, sizes) for shards in written for name, sizes in shards], target)
            shutil.rmtree(part)

    try:
        writer_of: dict[str, int] = {}
        for rank, names in enumerate(share_results(channel, prepare)):
            writer_of = dict.fromkeys(names, rank) | writer_of
        written = share_results(channel, write)
        share_results(channel, place)
    except BaseException:
        if is_first:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _place(engine: Engine, shards: list[tuple[Path, dict[str, int]]], target: Path) -> None:
    if engine.split is not None:
        types = (one.dtype for stage in engine.stages.values() for one in stage.module.parameters())
        engine.split.write_configuration(target, next(types, None))
    place_shards(shards, target)
