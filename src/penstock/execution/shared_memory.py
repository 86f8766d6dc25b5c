"""Tensors of one value that share memory: the same tensor in two places, or a tensor and a view of it.

In one model, modifying one in place modifies the other, for autograd as well. Across stages they are separate inputs,
each with its own gradient, and between ranks each is sent separately. So a stage may receive them, and pass them
on, but must not modify them in place. Where no stage modifies its inputs, it does not matter what shares memory.

A group of one is a tensor that shares memory with one that goes to another stage, or is taken by several stages itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.errors import StageError
from penstock.execution.trees import TensorLeaf, format_path, paths

if TYPE_CHECKING:
    from penstock.execution.trees import Structure

#: Which tensors of a value share memory: for each memory that several have, their numbers in order.
Groups = tuple[tuple[int, ...], ...]
#: Inputs of a stage whose originals share memory, in groups.
Kin = Sequence[Sequence[torch.Tensor]]
#: How hard to look for a common element of two views, until they count as sharing memory.
_WORK = 10_000


class WatchedInputs:
    """Checks, when a stage has run, the inputs of a stage that is not known to modify them.

    Attributes:
        tensors: those that share memory, in groups: none is known to.
    """

    __slots__ = ("_inputs", "_name", "_structure", "_versions", "tensors")

    def __init__(self, structure: Structure, inputs: Sequence[torch.Tensor], name: str = "input") -> None:
        self.tensors: Kin = ()
        self._name = name
        self._structure = structure
        self._inputs = inputs
        self._versions = [tensor._version for tensor in inputs]

    def check(self) -> None:
        """Refuse a stage that has modified one of them in place: another could share its memory."""
        versions = [tensor._version for tensor in self._inputs]
        if versions != self._versions:
            modified = [number for number, version in enumerate(self._versions) if versions[number] != version]
            raise StageError(
                f"the stage modified {names(self._structure, modified, self._name)} in place, which was not declared; "
                "pass Stage(index, module, changes_inputs=True)"
            )


class SharedInputs:
    """Checks, when a stage has run, inputs that share memory, or whose originals do.

    Attributes:
        tensors: these, in groups.
    """

    __slots__ = ("_name", "_numbers", "_structure", "_versions", "tensors")

    def __init__(
        self, structure: Structure, tensors: Sequence[torch.Tensor], groups: Groups, name: str = "input"
    ) -> None:
        self._name = name
        self._structure = structure
        self._numbers = groups
        self.tensors: Kin = [[tensors[number] for number in group] for group in groups]
        self._versions = [[tensor._version for tensor in group] for group in self.tensors]

    def check(self) -> None:
        """Refuse a stage that has modified one of them in place."""
        for numbers, tensors, versions in zip(self._numbers, self.tensors, self._versions, strict=True):
            if [tensor._version for tensor in tensors] != versions:
                named = names(self._structure, numbers, self._name)
                if len(numbers) == 1:
                    raise StageError(
                        f"the stage modified {named} in place, but other stages take the same value, or one that "
                        "shares its memory; modify a clone of it"
                    )
                raise StageError(
                    f"the stage modified one of {named} in place; they share memory, so gradients and results would "
                    "be wrong; pass it a clone of one of them"
                )


def watch_shared(
    structure: Structure, tensors: Sequence[torch.Tensor], groups: Groups, name: str = "input"
) -> SharedInputs | None:
    """Find the inputs that a stage must not modify because they share memory; None if it may modify all.

    Where no gradient is needed and the memory is still the same, modifying one modifies the others, as it should.
    """
    guarded = tuple([group for group in groups if _must_not_change([tensors[number] for number in group])])
    return SharedInputs(structure, tensors, guarded, name) if guarded else None


def _must_not_change(tensors: Sequence[torch.Tensor]) -> bool:
    return len(tensors) == 1 or any(one.requires_grad for one in tensors) or len(set(map(_storage, tensors))) > 1


def find_groups(tensors: Sequence[torch.Tensor], kin: Kin = ()) -> Groups:
    """Find which of these tensors share memory; fast if none do.

    >>> whole = torch.ones(4, 4)
    >>> find_groups([whole, torch.ones(2), whole, whole[:, 1]]), find_groups(whole.chunk(2, 1))
    (((0, 2, 3),), ())

    Args:
        tensors: the tensors of a value.
        kin: for the output of a stage: outputs in the memory of inputs that are kin also share it.
    """
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    if not kin and len(set(storages)) == len(storages):
        return ()
    first = {_storage(tensor): _storage(group[0]) for group in kin for tensor in group}
    origins = [first.get(storage, storage) for storage in storages]
    groups = _find(
        tuple(
            [
                _Place(origins.index(origin), storages.index(storage), *_extent(tensor))
                for origin, storage, tensor in zip(origins, storages, tensors, strict=True)
            ]
        )
    )
    elsewhere = [group[0] for group in kin if len(group) == 1]
    return _part(groups, tensors, elsewhere) if elsewhere else groups


def _part(groups: Groups, tensors: Sequence[torch.Tensor], elsewhere: Sequence[torch.Tensor]) -> Groups:
    """Make groups of one of all tensors that share memory with one that another stage takes."""
    ones = {number for number, tensor in enumerate(tensors) if any(_overlap(tensor, other) for other in elsewhere)}
    ones |= {number for group in groups if not ones.isdisjoint(group) for number in group}
    return tuple(sorted([*(group for group in groups if ones.isdisjoint(group)), *((number,) for number in ones)]))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _storage(one) == _storage(other) and _share(_Place(0, 0, *_extent(one)), _Place(0, 0, *_extent(other)))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, so that its elements have addresses."""
    return tensor.layout is torch.strided and not tensor.is_nested and not is_traceable_wrapper_subclass(tensor)


def are_within(groups: Groups, others: Groups) -> bool:
    """Whether all tensors that share memory by the first do so by the second as well."""
    return all(any(set(group) <= set(other) for other in others) for group in groups)


def names(structure: Structure, numbers: Collection[int], name: str) -> str:
    """Name some of the tensors of a value as a user would write them."""
    places = [format_path(name, path) for path, leaf in paths(structure) if isinstance(leaf, TensorLeaf)]
    return " and ".join(places[number] for number in numbers)


class _Place(NamedTuple):
    """Where a tensor is: in bytes, from the beginning of its storage.

    Attributes:
        origin: the first of the tensors whose memory is, or was, the same.
        storage: the first of the tensors in the same storage.
    """

    origin: int
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Describe the memory for NumPy, which compares addresses without reading them."""
        return {
            "version": 3,
            "typestr": f"|V{self.itemsize}",
            "shape": self.shape,
            "strides": self.strides,
            "data": (_ANYWHERE + self.offset, True),
        }


_ANYWHERE = 1 << 32


def _extent(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    size = tensor.element_size()
    return (
        int(tensor.storage_offset()) * size,
        tuple(tensor.shape),
        tuple([size * one for one in tensor.stride()]),
        size,
    )


@lru_cache(maxsize=256)  # the same few layouts recur
def _find(places: tuple[_Place, ...]) -> Groups:
    groups: list[list[int]] = []
    for number, place in enumerate(places):
        joined = [group for group in groups if any(_share(places[other], place) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append([*(other for group in joined for other in group), number])
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))


def _share(one: _Place, other: _Place) -> bool:
    if one.storage != other.storage:
        return one.origin == other.origin
    try:
        return np.shares_memory(np.asarray(one), np.asarray(other), max_work=_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
