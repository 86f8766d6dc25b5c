"""Whether a row of the drop-in can run on the native operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.ir.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    SHARDING,
    Action,
)
from penstock.pipelining._stage.transfers import spec_of
from penstock.pipelining._utils import _derive_grad_metas, _TensorMeta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def can_run_natively(row: Sequence[Action], stages: Mapping[int, Any], microbatches: int, *, trains: bool) -> bool:
    """Whether all that goes between these stages and others is one plain tensor, and a row has all that it needs."""
    return (
        (trains or not torch.is_grad_enabled())  # an evaluation with gradients leaves them in fwd_cache
        and is_self_contained(row, stages, microbatches, trains=trains)
        and all(
            isinstance(stage.submod, torch.nn.Module)
            and _has_plain_inputs(stage, microbatches, trains)
            and _has_plain_outputs(stage, microbatches, trains)
            for stage in stages.values()
        )
    )


def facts_of(stage: Any) -> tuple[Any, ...]:
    """List what native operations of a stage depend on, other than the row; they are rebuilt when it changes."""
    return (
        stage.submod,
        stage._stage_meta,
        stage._other_metas,
        stage._kinds,
        stage._inference_mode,
        stage.stage_index_to_group_rank,
        torch.is_grad_enabled(),
    )


def _has_plain_inputs(stage: Any, microbatches: int, trains: bool) -> bool:
    if stage.is_first:
        return True
    infos = stage.args_recv_info.values()
    return (
        len(infos) == microbatches
        and all(
            len(each) == 1 and not each[0].is_root_arg and each[0].source == stage.stage_index - 1 for each in infos
        )
        and _are_plain(stage, "inputs", "input_grads", microbatches, trains)
    )


def _has_plain_outputs(stage: Any, microbatches: int, trains: bool) -> bool:
    if stage.is_last:
        return True
    return stage.act_send_info == {0: [stage.stage_index + 1]} and _are_plain(
        stage, "outputs", "output_grads", microbatches, trains
    )


def _are_plain(stage: Any, values: str, gradients: str, microbatches: int, trains: bool) -> bool:
    """Whether each microbatch has one value, and the gradient that follows from it."""
    known = [stage._metas_of(microbatch) for microbatch in range(microbatches)]
    metas = [getattr(each, values) for each in known]
    if not all(each is not None and len(each) == 1 and type(each[0]) is _TensorMeta for each in metas):
        return False
    if len({each[0].requires_grad for each in metas}) > 1:
        return False
    return not trains or all(
        (given := getattr(each, gradients)) is not None and _same(given, _derive_grad_metas(value))
        for each, value in zip(known, metas, strict=True)
    )


def _same(given: Sequence[Any], derived: Sequence[Any]) -> bool:
    if len(given) != len(derived):
        return False
    return all(
        (one is None) == (other is None) and (one is None or spec_of(one) == spec_of(other))
        for one, other in zip(given, derived, strict=True)
    )


def is_self_contained(row: Sequence[Action], stages: Mapping[int, Any], microbatches: int, *, trains: bool) -> bool:
    """Whether every action of a row finds what it needs in the row itself, and nothing is left over at its end."""
    place: dict[tuple[Any, ...], int] = {}
    for position, action in enumerate(row):
        for part in action.parts:
            if part[:3] in place or part.stage_index not in stages or part.computation_type is OVERLAP_F_B:
                return False
            if part.computation_type not in SHARDING and part.microbatch_index not in range(microbatches):
                return False
            place[part[:3]] = position
    return all(
        _is_complete(place, stage, microbatch, stages, trains=trains)
        for stage in stages.values()
        for microbatch in range(microbatches)
    )


def _is_complete(
    place: Mapping[tuple[Any, ...], int], stage: Any, microbatch: int, stages: Mapping[int, Any], *, trains: bool
) -> bool:
    index = stage.stage_index

    def are_in_order(*kinds: Any) -> bool:
        found = [place.get((index, kind, microbatch), -1) for kind in kinds]
        return found[0] >= 0 and found == sorted(found)

    before, after = index - 1, index + 1
    receives = [] if stage.is_first or before in stages else [RECV_F]
    sends = [] if stage.is_last or after in stages else [SEND_F]
    if not are_in_order(*receives, FORWARD, *sends):
        return False
    if not trains:
        return True
    gradient_receives = [] if stage.is_last or after in stages else [RECV_B]
    gradient_sends = [] if stage.is_first or before in stages else [SEND_B]
    if are_in_order(FORWARD, FULL_BACKWARD):
        return are_in_order(*gradient_receives, FULL_BACKWARD, *gradient_sends)
    return are_in_order(FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) and are_in_order(
        *gradient_receives, BACKWARD_INPUT, *gradient_sends
    )
