"""Agrees on what goes over each link, from a dry run through the stages or from examples."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.errors import MetadataError, StageError
from penstock.execution.dry_run import Call, find_changes, find_output
from penstock.execution.framing import decode_numbers, encode_numbers, join_parts, split_parts
from penstock.execution.microbatch_kinds import Kinds, find_kinds
from penstock.execution.value_spec import ValueSpec, describe, mismatch
from penstock.execution.wire_format import decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from penstock.execution.stage import Stage
    from penstock.runtime.transport.protocol import Transport

#: By the stage that a link comes from: what each microbatch looks like.
Metas = dict[int, list[ValueSpec]]


def infer_specs(
    stages: Mapping[int, Stage],
    rank_of: Sequence[int],
    transport: Transport,
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    samples: Sequence[int] | None,
) -> tuple[Metas, Sequence[int] | None]:
    """Agree on what goes over every link to or from the stages of this rank. All ranks of the pipeline call it.

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
    reports: list[int] = []
    for rank, data in enumerate(transport.exchange(encode_numbers([mine]))):
        try:
            (last,) = decode_numbers(data)
        except (ValueError, MetadataError) as damage:
            message = f"could not decode which stages of rank {rank} modify their inputs: {damage}"
            raise MetadataError(message) from damage
        reports.append(last)
    return max(reports)


def _compared(metas: dict[int, ValueSpec], trained: int, transport: Transport) -> int:
    """Check that the ranks at both ends of each link were given the same; return the first trained stage."""
    mine = join_parts([encode_numbers([trained, *sorted(metas)]), *(encode(metas[stage]) for stage in sorted(metas))])
    for rank, data in enumerate(transport.exchange(mine)):
        try:
            numbers, *parts = split_parts(data)
            first, *described = decode_numbers(numbers)
            trained = min(trained, first)
            theirs = dict(zip(described, map(decode, parts), strict=True))
        except (ValueError, MetadataError) as damage:
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
    return join_parts([encode_numbers(kinds), encode_numbers(samples or ()), *map(encode, metas)])


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
    parts = split_parts(data)
    if len(parts) < 3:
        raise MetadataError(f"{len(parts)} parts are too few for an announcement of shapes")
    kinds, samples = map(decode_numbers, parts[:2])
    metas = [decode(part) for part in parts[2:]]
    if set(kinds) != set(range(len(metas))):
        raise MetadataError(f"{len(metas)} kinds of microbatches were described, but others occur")
    return kinds, samples, metas
