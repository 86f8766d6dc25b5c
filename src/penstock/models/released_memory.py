"""Releases the memory of tensors while a constructor runs, and tracks which values are lost by that.

The memory of a tensor that is not kept is released as soon as another one is written to, and given back when it is
used again. What it held is lost; what is computed from it is lost, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.models.named_draws import NamedDraws, is_view, memory_of, operands_of, tensors_in
from penstock.models.registrations import Survey, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.multiprocessing.reductions import StorageWeakRef

#: An operator with one of these tags decides something by a value.
_DECIDING: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Operators that write all of their first argument, and do not read it.
_FILLING: Final = {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_"} | {
    "cauchy_",
    "geometric_",
    "log_normal_",
}
#: Methods that read memory without the dispatcher.
_DIRECT: Final = {"tolist", "numpy", "__array__", "__dlpack__", "data_ptr"}


class LostValueError(BaseException):
    """A lost value is needed; not an ``Exception``, so that no constructor catches it.

    Attributes:
        registrations: those whose tensors must be kept.
    """

    def __init__(self, registrations: frozenset[int]) -> None:
        super().__init__(registrations)
        self.registrations = registrations


class OtherRegistrationError(BaseException):
    """The constructor registers something other than what it is known to register."""


class ReleasedMemory(NamedDraws):  # type: ignore[no-untyped-call]
    """Releases and restores the memory of registered tensors that are not kept.

    Args:
        keep: the numbers of the registrations whose tensors are kept.
        known: what the constructor is known to register; None in the first run.
        seed: if given, the random numbers of each tensor come from a generator seeded from this and its name.
        skip: whether to leave out what would be written to tensors that are not kept.
    """

    def __init__(
        self, keep: set[int], known: Survey | None = None, *, seed: int | None = None, skip: bool = False
    ) -> None:
        super().__init__(seed)
        self._keep = keep
        self._known = known
        self._skip = skip
        self._count = 0
        self._registered: set[StorageWeakRef] = set()
        self._foreign: dict[StorageWeakRef, int] = {}
        self._lost: dict[StorageWeakRef, frozenset[int]] = {}
        self._released: dict[StorageWeakRef, int] = {}
        self._latest: tuple[StorageWeakRef, torch.UntypedStorage] | None = None  # what was written to last
        self._direct = _DirectReads(self)

    def __enter__(self) -> ReleasedMemory:
        self._direct.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._direct.__exit__(*error)  # type: ignore[no-untyped-call]

    def observe(self, module: nn.Module, attribute: str, tensor: Tensor, is_parameter: bool) -> None:
        """Note whose memory a tensor is, when it is registered."""
        number, self._count = self._count, self._count + 1
        self.label = f"#{self._count}"
        if self._known is not None:
            if self._known.registrations[number : number + 1] != (describe(module, attribute, tensor, is_parameter),):
                raise OtherRegistrationError
            if memory_of(tensor) not in self._registered and (names := self._known.names[number]):
                self.name(tensor, names[0])
        if (key := memory_of(tensor)) is None:
            return
        self._registered.add(key)
        if number in self._keep:
            self._foreign.pop(key, None)
        elif tensor.untyped_storage().resizable():
            self._foreign.setdefault(key, number)
        self._note_write(tensor, key)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ``LostValueError`` unless these tensors hold what was written to them."""
        if sources := self._sources(tensors):
            raise LostValueError(sources)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on restored memory, and note which of its results are lost."""
        kwargs = kwargs or {}
        reads, writes = operands_of(func, args, kwargs)
        fills = func.overloadpacket.__name__ in _FILLING and self._fills_memory(writes[0])
        self.seed_for(func, kwargs, [*writes, *reads])
        if self._skip and fills and not reads and self._lose(writes[0]):
            return args[0]
        sources = self._sources(reads if fills else [*reads, *writes])
        for tensor in [*reads, *writes]:
            self._restore(tensor, clear=not (fills or is_view(func)))
        result = func(*args, **kwargs)
        results = tensors_in(result)
        if sources and (_DECIDING & set(func.tags) or not results):
            raise LostValueError(sources)
        self.inherit([*writes, *reads], results)
        self._note_results(reads, writes, results, sources)
        return result

    def _sources(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        """Return the registrations whose lost values these tensors hold, or were computed from."""
        keys = (memory_of(tensor) for tensor in tensors)
        return frozenset().union(*(self._lost[key] for key in keys if key in self._lost))

    def _note_results(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], results: Sequence[Tensor], sources: frozenset[int]
    ) -> None:
        given = {memory_of(tensor) for tensor in [*reads, *writes]}
        written = {memory_of(tensor) for tensor in writes}
        for tensor in [*results, *writes]:
            key = memory_of(tensor)
            if key is None or (key in given and key not in written):
                continue  # a view holds what its base holds
            if sources:
                self._lost[key] = sources
            else:
                self._lost.pop(key, None)
            if key in written:
                self._note_write(tensor, key)
        for tensor in [*reads, *writes, *results]:
            key = memory_of(tensor)
            if key in self._lost and tensor.untyped_storage().resizable():
                self._release(tensor.untyped_storage(), key)

    def _note_write(self, tensor: Tensor, key: StorageWeakRef) -> None:
        """Release the foreign tensor that was written to before this one; temporary tensors do not count."""
        if key not in self._registered or (self._latest is not None and key == self._latest[0]):
            return
        if self._latest is not None and (before := self._latest[0]) in self._foreign:
            self._lost.setdefault(before, frozenset({self._foreign[before]}))
            self._release(self._latest[1], before)
        self._latest = (key, tensor.untyped_storage()) if key in self._foreign else None

    def _release(self, storage: torch.UntypedStorage, key: StorageWeakRef) -> None:
        if key not in self._released:
            self._released[key] = storage.nbytes()
            storage.resize_(0)

    def _restore(self, tensor: Tensor, *, clear: bool) -> None:
        key = memory_of(tensor)
        if key is not None and (size := self._released.pop(key, None)) is not None:
            storage = tensor.untyped_storage()
            storage.resize_(size)
            if clear:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()

    def _fills_memory(self, tensor: Tensor) -> bool:
        key = memory_of(tensor)
        if key is None:
            return False
        return tensor.numel() * tensor.element_size() >= self._released.get(key, tensor.untyped_storage().nbytes())

    def _lose(self, tensor: Tensor) -> bool:
        """Give up what a foreign tensor holds; return False if it is not foreign."""
        key = memory_of(tensor)
        if key is None or key not in self._foreign:
            return False
        self._lost[key] = frozenset({self._foreign[key]})
        self._release(tensor.untyped_storage(), key)
        return True


class _DirectReads(TorchFunctionMode):
    """Catches methods that read memory without the dispatcher."""

    def __init__(self, memory: ReleasedMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _DIRECT:
            self._memory.check(tensors_in(args))
        return func(*args, **(kwargs or {}))
