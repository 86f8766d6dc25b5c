"""Tensors compared with their descriptions, and arguments with what a stage can take."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.distributed.tensor import DTensor

from penstock.pipelining._stage.meshes import PipeliningMetadataError
from penstock.pipelining._stage.metadata import extract_tensor_meta

if TYPE_CHECKING:
    from penstock.pipelining._stage.metadata import TensorMeta

_INFERRED = "the inferred metadata is used"


@overload
def validate_and_normalize_to_tuple(
    args: torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor] | None, allow_none: Literal[False] = ...
) -> tuple[torch.Tensor, ...] | None: ...


@overload
def validate_and_normalize_to_tuple(
    args: torch.Tensor | tuple[torch.Tensor | None, ...] | list[torch.Tensor | None] | None,
    allow_none: Literal[True] = ...,
) -> tuple[torch.Tensor | None, ...] | None: ...


def validate_and_normalize_to_tuple(
    args: torch.Tensor
    | tuple[torch.Tensor, ...]
    | tuple[torch.Tensor | None, ...]
    | list[torch.Tensor]
    | list[torch.Tensor | None]
    | None,
    allow_none: bool = False,
) -> tuple[torch.Tensor | None, ...] | None:
    """Make a tuple of tensors; None stays None.

    >>> validate_and_normalize_to_tuple([torch.tensor(1), None], allow_none=True)
    (tensor(1), None)
    """
    if args is None:
        return None
    if isinstance(args, torch.Tensor):
        return (args,)
    given: Any = args
    if not isinstance(given, (tuple, list)):
        raise PipeliningMetadataError(
            f"a stage takes a tensor, or a tuple or list of them, not a {type(given).__name__}; "
            "pass anything else as a keyword argument"
        )
    for index, value in enumerate(given):
        if not (isinstance(value, torch.Tensor) or (allow_none and value is None)):
            found = "None" if value is None else f"of type {type(value).__name__}"
            raise PipeliningMetadataError(
                f"argument {index} of a stage is {found}, but must be a tensor; pass it as a keyword argument"
            )
    return tuple(given) if isinstance(given, list) else given


def validate_metadata(
    desc: str,
    expected: TensorMeta,
    actual: torch.Tensor | TensorMeta,
    *,
    raise_on_mismatch: bool = False,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """Describe what differs between a tensor, or its description, and what it should be.

    >>> meta = extract_tensor_meta(torch.ones(2))
    >>> validate_metadata("input 0", meta, torch.ones(3))
    ['shape mismatch: torch.Size([2]) vs torch.Size([3])']

    Args:
        desc: what is compared, for the message.
        expected: what it should be.
        actual: what it is.
        raise_on_mismatch: raise a PipeliningMetadataError if anything differs.
        warn_on_mismatch: warn then.
    """
    found = extract_tensor_meta(actual) if isinstance(actual, torch.Tensor) else actual
    if type(expected) is type(found):
        what, differences = "Metadata mismatch", expected.get_diff(found)
    else:
        what, differences = (
            "Metadata type mismatch",
            [f"type: expected {type(expected).__name__}, got {type(found).__name__}"],
        )
    if differences and raise_on_mismatch:
        raise PipeliningMetadataError(f"{desc}: {'; '.join(differences)}")
    if differences and warn_on_mismatch:
        warnings.warn(f"{desc}: {what}: {'; '.join(differences)}; {_INFERRED}", UserWarning, stacklevel=2)
    return differences


def validate_tensors_metadata(
    desc: str,
    expected: tuple[TensorMeta | None, ...],
    actual: tuple[torch.Tensor | TensorMeta | None, ...],
    *,
    raise_on_mismatch: bool = True,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """Compare several tensors with what they should be; None must meet None.

    Args:
        desc: what is compared, for the message.
        expected: what they should be.
        actual: what they are.
        raise_on_mismatch: raise a PipeliningMetadataError at the first that differs.
        warn_on_mismatch: warn of each that differs.
    """

    def found(difference: str) -> list[str]:
        if raise_on_mismatch:
            raise PipeliningMetadataError(difference)
        if warn_on_mismatch:
            warnings.warn(difference, UserWarning, stacklevel=3)
        return [difference]

    if len(expected) != len(actual):
        return found(f"{desc}: expected {len(expected)} tensors, got {len(actual)}")
    differences: list[str] = []
    for index, (want, have) in enumerate(zip(expected, actual, strict=True)):
        place = f"{desc}[{index}]"
        if want is not None and have is not None:
            differences += validate_metadata(
                place, want, have, raise_on_mismatch=raise_on_mismatch, warn_on_mismatch=warn_on_mismatch
            )
        elif want is not have:
            differences += found(f"{place}: expected {_kind(want)}, got {_kind(have)}")
    return differences


def validate_static_arg_grad_correspondence(
    stage_index: int, args: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor | None, ...], is_input: bool
) -> None:
    """Compare the example tensors of a stage with the gradients that were given for them.

    A gradient for a tensor without, or a plain one for a distributed tensor, is an error; one that is missing may be
    right at the ends of the pipeline, so it is a warning.

    Args:
        stage_index: the stage, for the message.
        args: its inputs, or its outputs.
        grads: a gradient or None for each.
        is_input: which of the two they are.
    """
    kind = "input" if is_input else "output"
    if len(args) != len(grads):
        raise PipeliningMetadataError(
            f"stage {stage_index} has {len(args)} {kind}_args but {len(grads)} {kind}_grads; pass one for each, and "
            "None for a tensor that needs no gradient"
        )
    for index, (tensor, gradient) in enumerate(zip(args, grads, strict=True)):
        place = f"stage {stage_index}: {kind}_args[{index}]"
        if not tensor.requires_grad and gradient is not None:
            raise PipeliningMetadataError(
                f"{place} has requires_grad=False, but {kind}_grads[{index}] is a {type(gradient).__name__}; "
                "write None for it"
            )
        if tensor.requires_grad and gradient is None:
            warnings.warn(
                f"{place} has requires_grad=True, but {kind}_grads[{index}] is None; that is correct only at the ends "
                "of the pipeline",
                UserWarning,
                stacklevel=2,
            )
        if isinstance(tensor, DTensor) and gradient is not None and not isinstance(gradient, DTensor):
            raise PipeliningMetadataError(
                f"{place} is a DTensor, but {kind}_grads[{index}] is a {type(gradient).__name__}; pass a DTensor "
                "(it may have other placements), or None"
            )


def _kind(value: object) -> str:
    return "None" if value is None else "metadata"
