"""Saves a pipeline: ``penstock.save``.

Every rank writes one data file. Rank 0 makes the folder first, and renames it when all files are on disk.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints import folders
from penstock.runtime.checkpoints.background import Saving
from penstock.runtime.checkpoints.channel import run_on_all, same_for_all
from penstock.runtime.checkpoints.contents import collect_contents
from penstock.runtime.checkpoints.data_files import in_order, write_pieces
from penstock.runtime.checkpoints.index import RankIndex, data_file, write_list, write_rank_index
from penstock.runtime.checkpoints.saves import saves_of
from penstock.runtime.checkpoints.snapshot import Snapshot

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from penstock.runtime.checkpoints.channel import Channel
    from penstock.runtime.checkpoints.contents import Contents
    from penstock.runtime.pipeline import Pipeline


def save(
    pipe: Pipeline,
    folder: str | os.PathLike[str],
    *,
    step: int,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    wait: bool = True,
) -> Saving:
    """Save a pipeline between two steps, so that ``penstock.load`` can go on, on this layout or any other one.

    All ranks call it, and those of all replicas under FSDP or DDP. The checkpoint is ``folder/step-100`` once it is
    complete; before, and if anything fails, the earlier ones are as they were.

    Args:
        pipe: the pipeline.
        folder: where the checkpoints of the run are; every rank must see the same one.
        step: how many steps have been trained.
        optimizer: the optimizer of this rank, or a list of several.
        scheduler: the learning rate scheduler of this rank.
        scaler: the gradient scaler of this rank.
        extra: anything else, by name: plain data, or objects with ``state_dict`` and ``load_state_dict``, e.g. the
            position in the data. Ranks may have different ones.
        keep: how many complete checkpoints to keep, this one included; older ones are removed afterwards. By default,
            all.
        wait: whether to return when the checkpoint is complete. If not, this copies the state to the memory of the
            host, and a thread writes it while training goes on. An error is raised by the next save or load, by the
            end of the pipeline, or by ``wait()`` of what this returns.

    Returns:
        The save: ``path`` is where the checkpoint is when it is complete, ``done`` whether the save has ended, and
        ``wait()`` returns when it has.

    Raises:
        CheckpointError: something cannot be saved; every rank raises it.
    """
    engine, target = pipe._engine, Path(folder).absolute()
    engine.begin_call("save()")
    saves = saves_of(engine)
    if not saves.is_complete:
        raise CheckpointError("the replicas of this pipeline are known after its first step; save it then")
    saves.settle()
    contents: list[Contents] = []
    digests: list[int] = []

    def prepare() -> bytes:
        _check(step, keep)
        contents.append(collect_contents(engine, optimizer, scheduler, scaler, extra))
        call = {"folder": str(target), "step": step, "keep": keep, "wait": wait}
        return json.dumps([call, zlib.crc32("\n".join(contents[0].names).encode())]).encode()

    def begin(parts: Sequence[bytes]) -> list[bytes]:
        asked = [json.loads(part) for part in parts]
        _check_agreement([call for call, _ in asked])
        digests.extend(digest for _, digest in asked)
        folders.begin(target, step)
        return same_for_all(saves.channel, json.dumps(saves.knows(digests)).encode())

    known = json.loads(run_on_all(saves.channel, prepare, begin))
    mine = saves.names_to_write(contents[0].names, digests, known=known)
    stages = sorted(engine.stages)
    saving = Saving(folders.place_of(target, step), step)

    def write(snapshot: Callable[[], Snapshot]) -> None:
        index = RankIndex(stages, saves.replica, [], _only(contents[0].values, mine), contents[0].own)
        _write(saves.channel, target, step, keep, snapshot, index)

    pieces = in_order([piece for piece in contents[0].pieces if piece.key in mine])
    if wait:
        saving.run(lambda: write(lambda: Snapshot(pieces)))
    else:
        copied = _attempt(lambda: saves.snapshots.take(pieces))
        saves.last = saving
        saving.start(lambda: write(copied))
    return saving


def _write(
    channel: Channel,
    folder: Path,
    step: int,
    keep: int | None,
    snapshot: Callable[[], Snapshot],
    index: RankIndex,
) -> None:
    """Write what this rank has; when all ranks have, the checkpoint is complete."""
    part = folders.part_of(folder, step)

    def work() -> bytes:
        chunks = write_pieces(data_file(part, channel.rank), *snapshot())
        return json.dumps(write_rank_index(part, channel.rank, index._replace(chunks=chunks))).encode()

    def complete(parts: Sequence[bytes]) -> list[bytes]:
        write_list(part, step, [json.loads(checksum) for checksum in parts])
        folders.finish(folder, step, keep)
        return same_for_all(channel, b"")

    try:
        run_on_all(channel, work, complete)
    except BaseException:
        if channel.rank == 0:
            folders.discard(folder, step)
        raise


def _check(step: Any, keep: Any) -> None:
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step must be the number of steps trained, 0 or more, not {step!r}")
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise CheckpointError(f"keep must be at least 1, or None to keep all checkpoints, not {keep!r}")


def _check_agreement(calls: Sequence[Mapping[str, Any]]) -> None:
    for rank, call in enumerate(calls):
        for name, value in call.items():
            if value != calls[0][name]:
                raise CheckpointError(
                    f"rank {rank} saves with {name}={value!r}, rank 0 with {name}={calls[0][name]!r}; pass the same on "
                    "all ranks",
                    rank=rank,
                )


def _only(values: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _attempt(function: Callable[[], Snapshot]) -> Callable[[], Snapshot]:
    """Call a function now; what it returns or raises comes out later, where all ranks learn of it."""
    try:
        result = function()
    except Exception as error:
        raised = error

        def fail() -> Snapshot:
            raise raised

        return fail
    return lambda: result
