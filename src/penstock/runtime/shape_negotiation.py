"""Agrees on what goes over each edge, from a dry run through the stages or from examples."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import MetadataError, StageError
from penstock.execution.dry_run import Call, find_changes, find_output
from penstock.execution.microbatch_kinds import Kinds, find_kinds
from penstock.execution.value_spec import ValueSpec, describe, mismatch
from penstock.execution.wire_format import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from penstock.execution.stage import Stage
    from penstock.runtime.transport.protocol import Transport

_COUNT: Final = struct.Struct("<I")
#: By the stage that an edge comes from: what each microbatch looks like.
Metas = dict[int, list[ValueSpec]]


def infer_specs(
    stages: Mapping[int, Stage],
    rank_of: Sequence[int],
    transport: Transport,
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    samples: Sequence[int] | None,
) -> tuple[Metas, Sequence[int] | None]:
    """Agree on what goes over every edge to or from the stages of this rank. All ranks of the pipeline call it.

    Each stage is run once for every kind of microbatch, the first stage with the real arguments, the others with zeros
    of the announced shapes; then it announces to the next one its output's shapes, and each microbatch's samples. The
    first one knows the latter, the others receive it.
    """
    metas: Metas = {}
    rank = transport.rank
    previous: tuple[Kinds, list[ValueSpec]] = ((), [])
    for index in sorted(stages):
        if index == 0:
            kinds, found = find_kinds(args, kwargs)[0], list[ValueSpec]()
        elif rank_of[index - 1] == rank:
            kinds, found = previous
        else:
            kinds, samples, found = _heard(transport.receive_bytes(rank_of[index - 1]), index, len(kwargs))
        if index > 0:
            metas[index - 1] = [found[kind] for kind in kinds]
        calls = [
            Call(args[first], kwargs[first])
            if index == 0
            else Call.with_zeros(found[kind], stages[index].device, kwargs[first])
            for kind, first in enumerate(map(kinds.index, range(max(kinds) + 1)))
        ]
        if index == len(rank_of) - 1:
            find_changes(stages[index], calls[0])
            break
        outcomes = [find_output(stages[index], call) for call in calls]
        previous = kinds, outcomes
        metas[index] = [outcomes[kind] for kind in kinds]
        if rank_of[index + 1] != rank:
            transport.send_bytes(rank_of[index + 1], _written(kinds, samples, outcomes))
    return metas, samples


def specs_from_examples(
    examples: Mapping[int, Any], stages: Mapping[int, Stage], count: int, transport: Transport, microbatches: int
) -> Metas:
    """Describe the given examples: the output of each stage but the last, for a microbatch. All ranks call it.

    If no tensor of an example needs a gradient, all that can have one do, unless no stage up to there has a parameter
    that needs one.
    """
    found: dict[int, ValueSpec] = {}
    for index in sorted({neighbour for stage in stages for neighbour in (stage - 1, stage)}):
        if not 0 <= index < count - 1:
            continue
        if index not in examples:
            raise StageError(
                f"shapes has no example output of stage {index}; add {index}: torch.empty(..., device='meta')",
                stage=index,
            )
        found[index] = describe(examples[index])
    trained = [index for index, stage in stages.items() if any(one.requires_grad for one in stage.module.parameters())]
    first = _compared(found, min(trained, default=count), transport)
    return {index: [_with_gradients(meta) if first <= index else meta] * microbatches for index, meta in found.items()}


def last_modifying(stages: Mapping[int, Stage], transport: Transport) -> int:
    """Find the last stage of the pipeline that modifies its inputs in place; 0 if none does. All ranks call it."""
    mine = max((index for index, stage in stages.items() if stage.changes_inputs), default=0)
    reports = transport.exchange(_COUNT.pack(mine))
    damaged = [rank for rank, data in enumerate(reports) if len(data) != _COUNT.size]
    if damaged:
        raise MetadataError(f"could not decode which stages of rank {damaged[0]} modify their inputs")
    return max(int(index) for data in reports for index in _COUNT.unpack(data))


def _compared(metas: dict[int, ValueSpec], trained: int, transport: Transport) -> int:
    """Check that the ranks at both ends of each edge were given the same; return the first trained stage."""
    mine = [part for stage, meta in sorted(metas.items()) for part in (_COUNT.pack(stage), encode(meta))]
    for rank, data in enumerate(transport.exchange(_joined([_COUNT.pack(trained), *mine]))):
        try:
            first, *parts = _parts(data)
            trained = min(trained, *_COUNT.unpack(first))
            pairs = zip(parts[::2], parts[1::2], strict=True)
            theirs = {_COUNT.unpack(stage)[0]: decode(meta) for stage, meta in pairs}
        except (ValueError, struct.error, MetadataError) as damage:
            raise MetadataError(f"could not decode rank {rank}'s example shapes: {damage}") from damage
        for stage in sorted(metas.keys() & theirs.keys()):
            error = mismatch(
                theirs[stage],
                metas[stage],
                sender=f"stage {stage}, by rank {transport.rank}'s example,",
                receiver=f"stage {stage + 1}, by rank {rank}'s example,",
            )
            if error is not None:
                raise error
    return trained


def _with_gradients(meta: ValueSpec) -> ValueSpec:
    if any(one.requires_grad for one in meta.tensors):
        return meta
    tensors = tuple(replace(one, requires_grad=_differentiable(one.dtype)) for one in meta.tensors)
    return replace(meta, tensors=tensors)


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _written(kinds: Kinds, samples: Sequence[int] | None, metas: Sequence[ValueSpec]) -> bytes:
    data = _joined([_numbers(kinds), _numbers(samples or ()), *map(encode, metas)])
    return _COUNT.pack(zlib.crc32(data)) + data


def _numbers(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(_COUNT.pack(len(part)) + part for part in parts)


def _heard(data: bytes, stage: int, microbatches: int) -> tuple[Kinds, Sequence[int] | None, list[ValueSpec]]:
    """Decode what the previous stage announced."""
    try:
        kinds, samples, metas = _read(data)
        if len(kinds) != microbatches or len(samples) not in (0, microbatches):
            raise MetadataError(f"{len(kinds)} microbatches were announced, but there are {microbatches}")
    except MetadataError as error:
        message = f"stage {stage} cannot use the shapes that stage {stage - 1} announced: {error}"
        raise MetadataError(message) from error
    return kinds, samples or None, metas


def _read(data: bytes) -> tuple[Kinds, tuple[int, ...], list[ValueSpec]]:
    if len(data) < _COUNT.size or _COUNT.unpack_from(data)[0] != zlib.crc32(data[_COUNT.size :]):
        raise MetadataError("checksum mismatch")
    parts = list(_parts(data[_COUNT.size :]))
    if len(parts) < 3 or len(parts[0]) % _COUNT.size or len(parts[1]) % _COUNT.size:
        raise MetadataError("the shape announcement could not be decoded; do all ranks run the same penstock version?")
    kinds, samples = (tuple(number for (number,) in _COUNT.iter_unpack(part)) for part in parts[:2])
    metas = [decode(part) for part in parts[2:]]
    if set(kinds) != set(range(len(metas))):
        raise MetadataError(f"{len(metas)} kinds of microbatches were described, but others occur")
    return kinds, samples, metas


def _parts(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        if len(data) - at < _COUNT.size:
            raise MetadataError("an announcement of shapes is cut off")
        (length,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        if len(data) - at < length:
            raise MetadataError("an announcement of shapes is cut off")
        yield data[at : at + length]
        at += length
