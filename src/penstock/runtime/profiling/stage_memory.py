"""Counts the bytes that a stage holds: always, and for each microbatch between its forward and its backward."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from penstock.execution.trees import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class SavedBytes:
    """The storages that a backward needs, each counted once, without those of parameters and buffers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._left_out = {_place(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._sizes: dict[Any, int] = {}

    @property
    def total(self) -> int:
        """The bytes so far."""
        return sum(self._sizes.values())

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are held."""
        for tensor in tensors:
            if tensor.layout is torch.strided and _place(tensor) not in self._left_out:
                self._sizes[_place(tensor)] = tensor.untyped_storage().nbytes()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what the graph saves that is made within."""
        kept: list[torch.Tensor] = []  # so that no storage is freed, and another one gets its place

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held = tensor.detach()
            kept.append(held)
            self.add([held])
            return held

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
            yield


def static_bytes(module: torch.nn.Module, optimizer_state: float) -> float:
    """Count the bytes of parameters, their gradients, buffers, and what an optimizer keeps.

    >>> static_bytes(torch.nn.Linear(3, 1, bias=False), optimizer_state=2)
    48.0

    Args:
        module: the stage.
        optimizer_state: how many tensors an optimizer keeps for each parameter.
    """
    total = float(sum(buffer.nbytes for buffer in module.buffers()))
    for parameter in module.parameters():
        total += parameter.nbytes * (2 + optimizer_state if parameter.requires_grad else 1)
    return total


def value_bytes(value: Any) -> tuple[int, int]:
    """Count the bytes of the tensors in a value, and of those that get a gradient."""
    tensors = tensors_in((value,))
    return sum(each.nbytes for each in tensors), sum(each.nbytes for each in tensors if each.requires_grad)


def _place(tensor: torch.Tensor) -> Any:
    return (tensor.device, tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else id(tensor)
