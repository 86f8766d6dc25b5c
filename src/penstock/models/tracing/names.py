"""Names tensors as the model does."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class TensorNames:
    """The names of a model's parameters and buffers; one that is tied has several."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names: dict[int, list[str]] = defaultdict(list)
        self._transient: set[str] = set()
        for module_name, module in model.named_modules(remove_duplicate=False):
            prefix = f"{module_name}." if module_name else ""
            for name, tensor in _tensors(module):
                self._names[id(tensor)].append(prefix + name)
            self._transient |= {prefix + name for name in module._non_persistent_buffers_set}
        self._model = model  # keeps the tensors, so that none can come to have the identity of one that is gone

    def names(self, tensor: Any, name: str) -> list[str]:
        """All names of a tensor, beginning with the given one."""
        return [name, *(other for other in self._names.get(id(tensor), ()) if other != name)]

    def is_persistent(self, name: str) -> bool:
        """Whether a buffer is part of a state dict."""
        return name not in self._transient


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def find_attribute(module: torch.nn.Module, name: str) -> Any:
    """Return an attribute of a module or of one inside it."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def assign(module: torch.nn.Module, name: str, value: Any, *, persistent: bool = True) -> None:
    """Set an attribute of a module, or of one inside it, which is created if it is missing.

    A module that replaces another one takes over what only that holds.
    """
    *path, last = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, torch.nn.Module())
        module = getattr(module, part)
    if isinstance(value, torch.nn.Module):
        if last in module._modules:
            _take_over(value, getattr(module, last))
        module.add_module(last, value)
    elif isinstance(value, torch.nn.Parameter):
        module.register_parameter(last, value)
    elif isinstance(value, torch.Tensor):
        module.register_buffer(last, value, persistent=persistent)
    else:
        setattr(module, last, value)


def _take_over(module: torch.nn.Module, before: torch.nn.Module) -> None:
    """Give a module the tensors and modules that it lacks and another one has."""
    for name, tensor in before._parameters.items():
        module._parameters.setdefault(name, tensor)
    for name, buffer in before._buffers.items():
        if name not in module._buffers:
            module.register_buffer(name, buffer, persistent=name not in before._non_persistent_buffers_set)
    for name, inner in before._modules.items():
        if name not in module._modules:
            module.add_module(name, inner)
        elif inner is not None:
            _take_over(getattr(module, name), inner)
