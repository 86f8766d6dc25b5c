"""Runs that leave no trace: buffers and random numbers are afterwards what they were before.

A run for its own sake, e.g. to find shapes or to compare gradients, must not change what the training does next.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Random numbers are those of the process: of ranks that are threads, one at a time draws them.
drawing: Final = threading.RLock()


@contextmanager
def untouched(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Around a run of a module that waits for no other rank: its buffers and the random state are left as they were.

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> with untouched(norm, torch.device("cpu")):
    ...     out = norm(torch.rand(3, 2))
    >>> norm.running_mean, int(norm.num_batches_tracked)
    (tensor([0., 0.]), 0)
    """
    with drawing, random_state([device]):
        buffers = Buffers([module])
        try:
            yield
        finally:
            buffers.put_back()


@contextmanager
def random_state(devices: Iterable[torch.device]) -> Iterator[None]:
    """Put the generators of the CPU and of these devices back when the block ends."""
    with ExitStack() as states:
        for device in set(devices):
            ours = device.type not in ("cpu", "meta")
            states.enter_context(
                torch.random.fork_rng([device] if ours else [], device_type=device.type if ours else "cuda")
            )
        yield


class Buffers:
    """The buffers of modules as they are now: which there are, and what is in them.

    >>> module = torch.nn.Module()
    >>> module.register_buffer("cache", None)
    >>> before = Buffers([module])
    >>> module.cache = torch.ones(2)
    >>> module.register_buffer("another", torch.ones(1), persistent=False)
    >>> before.put_back()
    >>> module._buffers, module._non_persistent_buffers_set
    ({'cache': None}, set())
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._kept = [_Kept.of(part) for module in modules for part in module.modules()]

    def put_back(self) -> None:
        """Have them as they were: the same tensors with the same values, None where there was none, and no others."""
        with torch.no_grad():
            for kept in self._kept:
                kept.put_back()


class _Kept(NamedTuple):
    """The buffers of one module, without those of modules in it."""

    module: torch.nn.Module
    buffers: dict[str, torch.Tensor | None]
    values: dict[str, torch.Tensor]
    not_saved: frozenset[str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Kept:
        buffers = dict(module._buffers)
        values = {name: buffer.detach().clone() for name, buffer in buffers.items() if buffer is not None}
        return cls(module, buffers, values, frozenset(module._non_persistent_buffers_set))

    def put_back(self) -> None:
        for name, value in self.values.items():
            self.buffers[name].copy_(value)  # type: ignore[union-attr]
        # The dict and the set stay the same objects: others may hold on to them.
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(self.not_saved)


def copied(values: Any) -> Any:
    """The same values, with leaves in the place of tensors: gradients go to them alone."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, copy, values)
