"""Agrees on what goes over each link from examples of what stages return."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.errors import MetadataError, StageError
from penstock.execution.autograd import is_differentiable
from penstock.execution.framing import decode_numbers, encode_numbers, join_parts, split_parts
from penstock.execution.value_spec import ValueSpec, describe, mismatch
from penstock.execution.wire_format import decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.execution.stage import Stage
    from penstock.runtime.shape_negotiation import Metas
    from penstock.runtime.transport.protocol import Transport
    from penstock.runtime.wiring import Wiring


def specs_from_examples(
    examples: Mapping[int, Any], stages: Mapping[int, Stage], wiring: Wiring, transport: Transport, microbatches: int
) -> Metas:
    """Describe the given examples: the output of each stage but the last, for a microbatch. All ranks call it.

    If no tensor of an example needs a gradient, all that can have one do, unless no stage up to there has a parameter
    that needs one.
    """
    touching = wiring.touching(stages)
    found: dict[int, ValueSpec] = {}
    for index in sorted({link.source for link in touching}):
        if index not in examples:
            raise StageError(
                f"shapes has no example output of stage {index}; add {index}: torch.empty(..., device='meta')",
                stage=index,
            )
        found[index] = describe(examples[index])
    mine = [index for index, stage in stages.items() if any(one.requires_grad for one in stage.module.parameters())]
    trained = wiring.reached_from(_compare(found, mine, wiring, transport))
    metas: Metas = {}
    for index, whole in found.items():
        outputs = wiring.outputs(index)
        adds = index in trained and not any(one.requires_grad for one in whole.tensors)
        for link, meta, returning in zip(outputs.links, *outputs.describe(examples[index]), strict=True):
            if link in touching:
                metas[link.source, link.target] = [_with_gradients(meta, returning) if adds else meta] * microbatches
    return metas


def _compare(metas: dict[int, ValueSpec], trained: Sequence[int], wiring: Wiring, transport: Transport) -> set[int]:
    """Check that ranks were given the same examples; return the stages of all ranks that are trained."""
    mine = [encode_numbers(sorted(metas)), encode_numbers(trained), *(encode(metas[stage]) for stage in sorted(metas))]
    found: set[int] = set()
    for rank, data in enumerate(transport.exchange(join_parts(mine))):
        try:
            first, second, *parts = split_parts(data)
            described, theirs_trained = (_read_stages(part, len(wiring.rank_of)) for part in (first, second))
            theirs = dict(zip(described, map(decode, parts), strict=True))
        except (ValueError, MetadataError) as damage:
            raise MetadataError(f"could not decode rank {rank}'s example shapes: {damage}") from damage
        found.update(theirs_trained)
        for stage in sorted(metas.keys() & theirs.keys()):
            target = wiring.outputs(stage).links[0].target
            error = mismatch(
                theirs[stage],
                metas[stage],
                sender=f"stage {stage}, by rank {transport.rank}'s example,",
                receiver=f"stage {target}, by rank {rank}'s example,",
            )
            if error is not None:
                raise error
    return found


def _read_stages(data: bytes, stages: int) -> tuple[int, ...]:
    found = decode_numbers(data)
    if not all(0 <= stage < stages for stage in found):
        raise MetadataError(f"it is about stages {list(found)}, but there are {stages} stages (0 to {stages - 1})")
    return found


def _with_gradients(meta: ValueSpec, returning: Sequence[bool]) -> ValueSpec:
    """Let every tensor need a gradient that can have one, and that gets one back."""
    tensors = tuple(
        replace(one, requires_grad=returns and is_differentiable(one.dtype))
        for one, returns in zip(meta.tensors, returning, strict=True)
    )
    return replace(meta, tensors=tensors)
