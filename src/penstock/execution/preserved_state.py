"""Preserves buffers and random states around runs that must not change what the training does next.

Such runs find shapes or compare gradients.
"""

from __future__ import annotations

import random
import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: The random state belongs to the process: ranks that are threads take turns.
RNG_LOCK: Final = threading.RLock()
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


@contextmanager
def preserved_state(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restore a module's buffers and the random state after a run that waits for no other rank.

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> with preserved_state(norm, torch.device("cpu")):
    ...     out = norm(torch.rand(3, 2))
    >>> norm.running_mean, int(norm.num_batches_tracked)
    (tensor([0., 0.]), 0)
    """
    with RNG_LOCK, preserved_random_state([device], [module]):
        buffers = Buffers([module])
        try:
            yield
        finally:
            buffers.restore()


@contextmanager
def preserved_random_state(devices: Iterable[torch.device], modules: Iterable[torch.nn.Module] = ()) -> Iterator[None]:
    """Restore the random generators when the block ends.

    These are the generators of the CPU and of the devices, Python's, NumPy's if it is imported, and those that are
    attributes of the modules, or in lists, tuples and dictionaries there.
    """
    with ExitStack() as states:
        for device in set(devices):
            ours = device.type not in ("cpu", "meta")
            states.enter_context(
                torch.random.fork_rng([device] if ours else [], device_type=device.type if ours else "cuda")
            )
        for restore in _generators(modules):
            states.callback(restore)
        yield


def _generators(modules: Iterable[torch.nn.Module]) -> Iterator[Callable[[], object]]:
    """Make a function for each generator other than torch's default that restores its current state."""
    yield partial(random.setstate, random.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield partial(numpy.random.set_state, numpy.random.get_state())
    for module in modules:
        for part in module.modules():
            for one in _values_in(list(vars(part).values())):
                if isinstance(one, torch.Generator):
                    yield partial(one.set_state, one.get_state())
                elif isinstance(one, random.Random):
                    yield partial(one.setstate, one.getstate())
                elif numpy is not None and isinstance(one, numpy.random.RandomState):
                    yield partial(one.set_state, one.get_state())
                elif numpy is not None and isinstance(one, numpy.random.Generator):
                    yield partial(setattr, one.bit_generator, "state", one.bit_generator.state)


def _values_in(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the values in nested containers, to a limited depth, since one may contain itself."""
    if isinstance(value, (list, tuple, dict)) and depth:
        for one in list(value.values() if isinstance(value, dict) else value):
            yield from _values_in(one, depth - 1)
    else:
        yield value


class Buffers:
    """A snapshot of the buffers of modules: which exist, and their values.

    >>> module = torch.nn.Module()
    >>> module.register_buffer("cache", None)
    >>> before = Buffers([module])
    >>> module.cache = torch.ones(2)
    >>> module.register_buffer("another", torch.ones(1), persistent=False)
    >>> before.restore()
    >>> module._buffers, module._non_persistent_buffers_set
    ({'cache': None}, set())
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._kept = [_Kept.of(part) for module in modules for part in module.modules()]

    def restore(self) -> None:
        """Restore them: the same tensors with the same values, None where there was none, and no others."""
        with torch.no_grad():
            for kept in self._kept:
                kept.restore()


class _Kept(NamedTuple):
    """The buffers of one module, without those of modules in it."""

    module: torch.nn.Module
    buffers: dict[str, torch.Tensor | None]
    values: dict[str, torch.Tensor]
    not_saved: frozenset[str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Kept:
        buffers = dict(module._buffers)
        values = {name: _memory_of(buffer).detach().clone() for name, buffer in buffers.items() if buffer is not None}
        return cls(module, buffers, values, frozenset(module._non_persistent_buffers_set))

    def restore(self) -> None:
        for name, value in self.values.items():
            _memory_of(self.buffers[name]).copy_(value)  # type: ignore[arg-type]  # those with a value are not None
        # The dict and the set stay the same objects: others may refer to them.
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(self.not_saved)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Get a tensor to copy into: itself, or for an expanded one a view without repeated elements."""
    if tensor.layout is not torch.strided or all(tensor.stride()):
        return tensor
    return tensor[tuple(slice(None) if step else slice(1) for step in tensor.stride())]


def copy_as_leaves(values: Any) -> Any:
    """Copy a value with leaves in place of its tensors, which alone get gradients. Strides are kept."""
    return pytree.tree_map_only(torch.Tensor, _copy, values)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    if is_plain and copy.stride() != tensor.stride():  # it is expanded, or has holes
        memory = _memory_of(tensor.detach())
        copy = torch.empty_strided(memory.shape, memory.stride(), dtype=tensor.dtype, device=tensor.device)
        copy = copy.copy_(memory).expand(tensor.shape)
    return copy.requires_grad_(tensor.requires_grad)
