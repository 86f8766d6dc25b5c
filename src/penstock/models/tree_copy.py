"""Copies a tree of modules that shares all tensors with the original, and takes out the parameters of other stages."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.models.values import leaves_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def copy_tree(model: nn.Module, replaced: Mapping[int, torch.Tensor] | None = None) -> nn.Module:
    """Copy a model's modules, but none of its tensors.

    Args:
        model: the model.
        replaced: tensors to have in place of others, by the id of the other.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> copy = copy_tree(model)
    >>> copy[0] is model[0], copy[0].weight is model[0].weight
    (False, True)
    """
    memo = _memo(model) | dict(replaced or {})
    try:
        copy: nn.Module = deepcopy(model, memo)
    except Exception as error:
        name = _uncopied(model)
        raise SplitError(
            f"{name or 'the model'} has state that cannot be copied ({type(error).__name__}: {error}); split the model "
            "before its first forward, or remove that state",
            unit=name,
        ) from error
    for module in copy.modules():
        _build_no_caches(getattr(module, "config", None))
    return copy


def strip(module: nn.Module, name: str) -> None:
    """Replace a parameter or buffer by a stand-in of the same shape without memory, which no state dict holds.

    Its values are NaN: whatever reads them by mistake cannot stay unnoticed.
    """
    tensors: Any = module._parameters if name in module._parameters else module._buffers
    tensor = tensors.pop(name)
    module._non_persistent_buffers_set.discard(name)
    vars(module)[name] = None if tensor is None else make_stand_in(tensor)


def keep_device_and_dtype(module: nn.Module, original: nn.Module, root: nn.Module) -> None:
    """Let a module that has lost all parameters still list stand-ins, from which libraries read device and dtype.

    Args:
        module: the module.
        original: the one in the unsplit model.
        root: the stage, whose device and element type they follow.
    """
    if next(module.parameters(), None) is not None or not isinstance(getattr(type(module), "dtype", None), property):
        return
    stand_ins = [make_stand_in(parameter) for parameter in original.parameters()]
    vars(module)["parameters"] = _StandIns(root, stand_ins, next((one.dtype for one in root.parameters()), None))


class _StandIns:
    """The method ``parameters`` of a module that has lost all of them."""

    def __init__(self, root: nn.Module, stand_ins: list[torch.Tensor], dtype: torch.dtype | None) -> None:
        self._root = root
        self._stand_ins = stand_ins
        self._dtype = dtype

    def __call__(self, recurse: bool = True) -> Iterator[torch.Tensor]:  # noqa: ARG002
        now = next(self._root.parameters(), None)
        for one in self._stand_ins:
            if now is None:
                yield one
            else:
                yield one.to(now.device, now.dtype if one.dtype == self._dtype else one.dtype)


def tensors_held(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that a module itself holds."""
    return [*module._parameters, *module._buffers]


def make_stand_in(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Make a tensor of the same shape without memory; its values are NaN, or 0 if they are integers."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    device = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


def _memo(model: nn.Module) -> dict[int, Any]:
    """Map every tensor to itself, also those that are plain attributes and can be shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        registered = [*module._parameters.values(), *module._buffers.values()]
        others = [leaf for value in _plain_attributes(module) for leaf in leaves_of(value, 3)]
        memo.update({id(tensor): tensor for tensor in registered if tensor is not None})
        memo.update({id(leaf): leaf for leaf in others if isinstance(leaf, torch.Tensor) and leaf.is_leaf})
    return memo


def _plain_attributes(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]


def _uncopied(model: nn.Module) -> str | None:
    """Return the name of the innermost module that cannot be copied."""
    found = None
    for name, module in model.named_modules():
        if (found is None or name.startswith(f"{found}.")) and not _can_copy(module):
            found = name or None
    return found


def _can_copy(module: nn.Module) -> bool:
    try:
        deepcopy(module, _memo(module))
    except Exception:
        return False
    return True


def _build_no_caches(config: Any) -> None:
    """Switch off what libraries keep for generation: a training step needs no cache of keys and values."""
    if getattr(config, "use_cache", None) is True:
        config.use_cache = False


def for_each_tensor(model: nn.Module, function: Callable[[str, nn.Module, str], None]) -> None:
    """Call a function for every name of every parameter and buffer: the full name, its module, the name there."""
    for name, module in model.named_modules(remove_duplicate=False):
        for short in tensors_held(module):
            function(f"{name}.{short}" if name else short, module, short)
