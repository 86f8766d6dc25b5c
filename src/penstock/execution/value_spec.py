"""Specs of values and tensors that cross a link between stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.errors import MetadataError
from penstock.execution.shared_memory import are_within, find_groups, names
from penstock.execution.trees import (
    TENSOR,
    Branch,
    Constant,
    Path,
    Structure,
    TensorLeaf,
    collect_tensors,
    flat_tuple,
    format_path,
    paths,
    rebuild,
    structure_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.execution.shared_memory import Groups, Kin


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """All that a receiver must know of a tensor before it comes.

    >>> print(TensorSpec.of(torch.zeros(4, 128, 32)))
    float32[4, 128, 32]

    Attributes:
        shape: its sizes.
        dtype: its element type.
        requires_grad: whether a gradient comes back for it.
        stride: the layout in which it is sent: dense, in the order of dimensions that the sender's tensor has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Describe a tensor. One with holes or overlaps is described as its dense copy will be.

        >>> TensorSpec.of(torch.zeros(2, 3).T).stride, TensorSpec.of(torch.zeros(2, 6)[:, ::2]).stride
        ((1, 3), (3, 1))
        """
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            _refuse_unsupported(tensor)
        stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, stride)

    @classmethod
    @lru_cache(maxsize=1024)
    def dense(
        cls, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, *, requires_grad: bool = False
    ) -> Self:
        """Describe the dense copy of a tensor with these strides, which may have holes or overlaps.

        >>> TensorSpec.dense((2, 3), (1, 2), torch.int64).stride, TensorSpec.dense((2, 3), (1, 0), torch.int64).stride
        ((1, 2), (3, 1))
        """
        described = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return cls(tuple(shape), dtype, requires_grad, torch.empty_like(described).stride())

    def empty(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Make a tensor to receive into."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def matches(self, tensor: torch.Tensor, *, gradients: bool = True) -> bool:
        """Whether shape and element type are these; requires_grad too, if ``gradients``. Layout does not count."""
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and (not gradients or tensor.requires_grad is self.requires_grad)
        )

    def to_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor into the layout that was agreed: itself where it has it, else a copy (without history)."""
        if tensor.stride() == self.stride and not (tensor.is_conj() or tensor.is_neg()):
            return tensor
        return self.empty(tensor.device).copy_(tensor.detach())

    def __str__(self) -> str:
        return describe_tensor(self)


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """Describes what one stage passes to the next: where its tensors are, a spec of each, and all else by value.

    >>> leaves, meta = flatten((torch.ones(2), {"scale": 0.5, "mask": None}))
    >>> meta.unflatten(leaves)
    (tensor([1., 1.]), {'scale': 0.5, 'mask': None})

    Attributes:
        structure: where its tensors are, and all else.
        tensors: how each tensor looks.
        shared: which of the tensors share memory.
    """

    structure: Structure
    tensors: tuple[TensorSpec, ...]
    shared: Groups = ()

    @property
    def is_single(self) -> bool:
        """Whether the value is one tensor, and no container around it."""
        return self.structure is TENSOR

    def matches(self, value: Any, *, gradients: bool = True) -> bool:
        """Whether a value is as described, by shape and element type; ``gradients`` compares requires_grad as well.

        The layout of tensors does not count, because the sender can arrange it. Tensors that share memory must do so in
        the description, too.
        """
        return self.match(value, gradients=gradients) is not None

    def match(self, value: Any, *, gradients: bool = True, kin: Kin | None = ()) -> Sequence[torch.Tensor] | None:
        """Get the tensors of a value that ``matches``, in order; None if it does not.

        See ``find_groups`` for ``kin``; if that is None, it does not matter what shares memory.
        """
        if self.structure is TENSOR:
            fits = isinstance(value, torch.Tensor) and self.tensors[0].matches(value, gradients=gradients)
            return (value,) if fits and (not kin or are_within(find_groups((value,), kin), self.shared)) else None
        leaves = self._leaves(value)
        if leaves is None:
            return None
        for meta, tensor in zip(self.tensors, leaves, strict=True):
            if not meta.matches(tensor, gradients=gradients):
                return None
        if (
            kin is not None
            and (len(leaves) > 1 or kin)
            and (shared := find_groups(leaves, kin))
            and not are_within(shared, self.shared)
        ):
            return None
        return leaves

    def _leaves(self, value: Any) -> Sequence[torch.Tensor] | None:
        """Get the tensors of a value of this structure; None if its structure differs."""
        if type(value) is tuple and self.structure is flat_tuple(len(value)):
            return value if all(map(torch.is_tensor, value)) else None
        found: list[torch.Tensor] = []
        return found if collect_tensors(self.structure, value, found) else None

    def unflatten(self, leaves: Sequence[torch.Tensor]) -> Any:
        """Rebuild the value, with these tensors in it."""
        if len(leaves) != len(self.tensors):
            raise MetadataError(f"{len(leaves)} tensors for a value that has {len(self.tensors)}")
        if self.structure is TENSOR:
            return leaves[0]
        return rebuild(self.structure, iter(leaves))


def flatten(value: Any, kin: Kin = ()) -> tuple[tuple[torch.Tensor, ...], ValueSpec]:
    """Flatten a value to its tensors in order, and the spec from which it can be rebuilt.

    See ``find_groups`` for ``kin``.
    """
    if isinstance(value, torch.Tensor):
        return (value,), ValueSpec(TENSOR, (TensorSpec.of(value),), find_groups((value,), kin) if kin else ())
    found: list[torch.Tensor] = []
    structure = structure_of(value, found)
    tensors = tuple([TensorSpec.of(tensor) for tensor in found])
    return tuple(found), ValueSpec(structure, tensors, find_groups(found, kin) if len(found) > 1 or kin else ())


def describe(value: Any, kin: Kin = ()) -> ValueSpec:
    """Describe a value. See ``find_groups`` for ``kin``."""
    return flatten(value, kin)[1]


def as_wire(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a dense tensor in its own order, as a contiguous tensor: what is sent, or received into.

    >>> tensor = torch.tensor([[1, 2], [3, 4]]).T
    >>> tensor.flatten(), as_wire(tensor)
    (tensor([1, 3, 2, 4]), tensor([1, 2, 3, 4]))
    """
    if tensor.is_contiguous():
        return tensor
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def mismatch(
    agreed: ValueSpec, found: ValueSpec, *, sender: str, receiver: str, gradients: bool = True
) -> MetadataError | None:
    r"""Describe how a value differs from what was agreed for its link, as an error to raise; None if it does not.

    >>> import re
    >>> agreed, found = describe(torch.ones(4, 128)), describe(torch.ones(4, 96))
    >>> error = mismatch(agreed, found, sender="stage 0 on rank 0", receiver="stage 1 on rank 1")
    >>> print(re.sub("([:;]) ", "\\1\n", str(error)))
    the output of stage 0 on rank 0 is not what stage 1 on rank 1 expects:
    output is float32[4, 96], but float32[4, 128] was agreed;
    if shapes vary between microbatches, pass shapes="per_microbatch"

    Args:
        agreed: what the receiver expects.
        found: what the sender has.
        sender: the name of the sending stage.
        receiver: the name of the receiving stage.
        gradients: compare requires_grad as well.
    """
    difference = _difference(agreed, found, gradients)
    if difference is None:
        return None
    fact, advice = difference
    return MetadataError(f"the output of {sender} is not what {receiver} expects: {fact}; {advice}")


VARIES = 'if shapes vary between microbatches, pass shapes="per_microbatch"'
TYPE_VARIES = 'if element types vary between microbatches, pass shapes="per_microbatch"'
STRUCTURE_VARIES = 'if what a stage returns varies between microbatches, pass shapes="per_microbatch"'
GRADIENT = "a stage must need the gradient of its input for every microbatch, or for none"
SHARING = 'return a clone of one, share memory in the example in shapes= as well, or pass shapes="per_microbatch"'


def _difference(agreed: ValueSpec, found: ValueSpec, gradients: bool) -> tuple[str, str] | None:
    if agreed.structure != found.structure:
        return _structural(agreed, found), STRUCTURE_VARIES
    places = [path for path, leaf in paths(agreed.structure) if isinstance(leaf, TensorLeaf)]
    for path, want, have in zip(places, agreed.tensors, found.tensors, strict=True):
        name = format_path("output", path)
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            return f"{name} is {have}, but {want} was agreed", VARIES if want.shape != have.shape else TYPE_VARIES
        if gradients and want.requires_grad != have.requires_grad:
            return f"{name} has requires_grad={have.requires_grad}, but {want.requires_grad} was agreed", GRADIENT
    for group in found.shared:
        if not are_within((group,), agreed.shared):
            named = names(found.structure, group, "output")
            fact = f"{named} share memory" if len(group) > 1 else f"{named} shares memory with what another stage takes"
            return f"{fact}, which was not agreed", SHARING
    return None


def _structural(agreed: ValueSpec, found: ValueSpec) -> str:
    """Describe the first place where the structures differ."""
    return _first_difference(agreed.structure, found.structure, ()) or "the order of keys differs"


def _first_difference(want: Structure, have: Structure, path: Path) -> str | None:
    if isinstance(want, Branch) and isinstance(have, Branch) and (want.kind, want.keys) == (have.kind, have.keys):
        inner = zip(want.keys, want.children, have.children, strict=True)
        found = (_first_difference(wanted, had, (*path, key)) for key, wanted, had in inner)
        return next((difference for difference in found if difference), None)
    return (
        None
        if want == have
        else f"{format_path('output', path)} is {_describe_structure(have)}, but {_describe_structure(want)} was agreed"
    )


def _describe_structure(structure: Structure) -> str:
    if isinstance(structure, TensorLeaf):
        return "a tensor"
    if isinstance(structure, Constant):
        return repr(structure.value)
    if structure.kind is dict:
        return f"a dict with the keys {', '.join(map(repr, structure.keys)) or '(none)'}"
    return f"a {structure.kind.__name__} of {len(structure.children)}"


def _refuse_unsupported(tensor: torch.Tensor) -> None:
    """Raise for a tensor whose memory is not simply its elements."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise MetadataError(f"a {kind} tensor cannot be sent between stages; pass the dense tensors that make it up")
    if is_traceable_wrapper_subclass(tensor):
        raise MetadataError(f"a {type(tensor).__qualname__} cannot be sent between stages; pass the tensors in it")


def describe_tensor(tensor: TensorSpec | torch.Tensor) -> str:
    """Describe any tensor in words, also one that could not be sent.

    >>> describe_tensor(torch.zeros(4, 128))
    'float32[4, 128]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
