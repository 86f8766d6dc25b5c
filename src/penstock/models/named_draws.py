"""Draws the random numbers of each tensor from a generator of its own, seeded from the tensor's name."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SEEDED: Final = torch.Tag.nondeterministic_seeded


class NamedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Seeds the generator before every operator that draws random numbers.

    The seed is derived from ``seed``, the name of the tensor, and how often numbers were drawn for it. A tensor that
    was computed from another counts for that one's name, e.g. the matrix that is made orthogonal.

    Args:
        seed: None to leave the generator alone.
        label: the name for tensors that derive from none with a name.
    """

    def __init__(self, seed: int | None, label: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.label = label
        self._seed = seed
        self._names: dict[StorageWeakRef, str] = {}
        self._draws: Counter[str] = Counter()
        self._written: set[StorageWeakRef] = set()

    def name(self, tensor: Tensor, name: str) -> None:
        """Name a tensor."""
        if (key := memory_of(tensor)) is not None:
            self._names[key] = name

    def was_written(self, tensor: Tensor) -> bool:
        """Return whether any operator wrote to the tensor."""
        return memory_of(tensor) in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        reads, writes = operands_of(func, args, kwargs)
        self.seed_for(func, kwargs, [*writes, *reads])
        result = func(*args, **kwargs)
        self.inherit([*writes, *reads], tensors_in(result))
        self._written.update(key for tensor in writes if (key := memory_of(tensor)) is not None)
        return result

    def seed_for(self, func: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Seed the generator for an operator, if it draws random numbers."""
        if self._seed is None or _SEEDED not in func.tags or kwargs.get("generator") is not None:
            return
        if any(tensor.is_meta for tensor in tensors):
            return  # which draws nothing
        names = (self._names.get(key) for tensor in tensors if (key := memory_of(tensor)) is not None)
        name = next(filter(None, names), self.label)
        torch.manual_seed(derive_seed(self._seed, name, self._draws[name]))
        self._draws[name] += 1

    def inherit(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Have results without a name count for the first named tensor they were computed from."""
        keys = (memory_of(tensor) for tensor in tensors)
        name = next((self._names[key] for key in keys if key in self._names), None)
        if name is not None:
            for result in results:
                if (key := memory_of(result)) is not None:
                    self._names.setdefault(key, name)


def derive_seed(seed: int, name: str, draw: int) -> int:
    """Return the seed for the random numbers of one tensor: the same on every machine.

    >>> derive_seed(0, "layers.0.weight", 0)
    4167192244896059130
    """
    digest = hashlib.sha256(f"{seed}:{draw}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def memory_of(tensor: Tensor) -> StorageWeakRef | None:
    """Identify the memory of a tensor, without keeping it; None if it has none of its own."""
    if tensor.is_meta or tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def operands_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors an operator reads, and those it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_write else reads).extend(tensors_in(value))
    return reads, writes


def is_view(func: Any) -> bool:
    """Return whether an operator returns the memory of an argument, unchanged."""
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in what an operator takes or returns."""
    return [item for item in _flatten(value) if isinstance(item, Tensor)]


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    else:
        yield value
