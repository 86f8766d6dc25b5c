"""Outputs of a stage that share memory: the same tensor twice, or a tensor and a view of it.

Stages of one rank hand the memory on, so all is as in the unsplit model. Between ranks each tensor is sent for itself.
Then a stage must not modify one of them in place, for the others would not change. What shares memory is found in the
dry run, or in the examples of a stage, and is announced to the next stage, which checks the versions of these inputs. A
stage that returns shared memory without announcing it is refused, unless the next one cannot modify it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import StageError
from penstock.execution.shared_memory import are_within, find_groups, has_memory
from penstock.pipelining._utils import PipeliningMetadataError, to_local_if_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.execution.shared_memory import Groups, Kin

#: The inputs of a stage that it must not modify: in groups, each by its number, with its version.
Watched = Sequence[Sequence[tuple[int, torch.Tensor, int]]]


def find_shared(values: Sequence[Any], kin: Kin = ()) -> Groups:
    """Find which of these values share memory, by their number.

    >>> whole = torch.ones(4, 4)
    >>> find_shared([whole, 3, whole[0], torch.ones(2)])
    ((0, 2),)
    """
    dense = [(number, tensor) for number, value in enumerate(values) if (tensor := _memory_of(value)) is not None]
    if len(dense) < 2:
        return ()
    groups = find_groups([tensor for _, tensor in dense], kin)
    return tuple(tuple(dense[place][0] for place in group) for group in groups)


def kin_among(values: Sequence[Any], shared: Groups) -> Kin:
    """Get the tensors of groups of values."""
    groups = [[_memory_of(values[number]) for number in group] for group in shared]
    return [[tensor for tensor in group if tensor is not None] for group in groups]


def merge_groups(several: Iterable[Groups]) -> Groups:
    """Merge all groups that are in one of several."""
    return tuple(sorted({group for groups in several for group in groups}))


def watch(inputs: Sequence[Any], shared: Groups) -> Watched:
    """Watch the inputs that have shared memory, where they no longer do."""
    watched = []
    for group in shared:
        found = [(number, tensor) for number in group if (tensor := _memory_of(inputs[number])) is not None]
        if len({tensor.untyped_storage()._cdata for _, tensor in found}) > 1:
            watched.append([(number, one, one._version) for number, one in found if not one.is_inference()])
    return watched


def check_unmodified(watched: Watched, stage: int, microbatch: int) -> None:
    """Refuse a stage that has modified one of these inputs in place."""
    for group in watched:
        for number, tensor, version in group:
            if tensor._version != version:
                numbers = _listed([number for number, _, _ in group])
                raise StageError(
                    f"stage {stage} microbatch {microbatch}: the module modified input {number} in place. In stage "
                    f"{stage - 1}, on another rank, inputs {numbers} share memory, so all of them would change; here "
                    f"only one does. Return a clone from stage {stage - 1}, or modify a clone",
                    stage=stage,
                )


def check_announced(found: Groups, announced: Groups, stage: int, microbatch: int) -> None:
    """Refuse outputs that share memory, which the next stage does not know."""
    for group in found:
        if not are_within((group,), announced):
            raise PipeliningMetadataError(
                f"stage {stage} microbatch {microbatch}: outputs {_listed(group)} share memory, which stage "
                f"{stage + 1}, on another rank, does not know: if it modified one in place, the others would not "
                "change. Return a clone, leave input_args and output_args out, or let these examples share memory"
            )


def _memory_of(value: Any) -> torch.Tensor | None:
    """Find the tensor in whose memory a value is; of a DTensor, the part that is here. None if it has none."""
    if type(value) is not torch.Tensor:
        if not isinstance(value, torch.Tensor):
            return None
        value = to_local_if_dtensor(value, detach=True)
    return value if has_memory(value) else None


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
