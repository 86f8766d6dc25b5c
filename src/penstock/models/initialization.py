"""Initialises some tensors of a model on the meta device, by the modules' own functions.

These are ``reset_parameters`` of each module and, for models that have it, ``_init_weights``, which transformers, timm
and many others call for every module. Each tensor's random numbers come from a generator of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.errors import SplitError
from penstock.models.construction import empty_tensor, seeded
from penstock.models.layout import shorten
from penstock.models.named_draws import NamedDraws
from penstock.models.registrations import names_by_tensor
from penstock.models.tree_copy import copy_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def initialize(
    model: nn.Module, names: set[str], *, seed: int | Tensor, device: torch.device | str
) -> dict[str, Tensor]:
    """Return the named parameters and buffers, newly made and initialised; the model is left alone.

    Raises:
        SplitError: if no function of the model initialises one of them, or one does not run on the meta device.
    """
    scratch, made = _scratch(model, names, device)
    draws = NamedDraws(seed if isinstance(seed, int) else 0)
    for called in names_by_tensor(model).values():
        if (tensor := made.get(called[0])) is not None:
            draws.name(tensor, called[0])
    with seeded(seed), draws, torch.no_grad():
        for path, function in _initializers(scratch):
            draws.label = path
            _run(path, function)
    if missed := sorted(name for name in names if made[name].numel() and not draws.was_written(made[name])):
        raise SplitError(
            f"no module initialises {shorten(missed)} (reset_parameters, _init_weights), and a model on the meta "
            "device holds no values; pass a callable that builds the model, or init= a function",
            unit=missed[0] if len(missed) == 1 else None,
        )
    return {name: made[name] for name in names}


def _scratch(model: nn.Module, names: set[str], device: torch.device | str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Copy the model onto the meta device, but for the named tensors; also return these, under all their names.

    A tied tensor is with one of its modules only: its constructor initialised it before it was tied.
    """
    scratch, made = copy_tree(model), dict[str, Tensor]()
    names_of = names_by_tensor(scratch)
    owners = _owners(scratch)
    for module in scratch.modules():
        for slots in (module._parameters, module._buffers):
            for attribute, tensor in slots.items():
                if tensor is None:
                    continue
                called = names_of[id(tensor)]
                is_real = names.intersection(called) and owners[id(tensor)] == (module, attribute)
                empty = empty_tensor(tensor, device if is_real else "meta")
                slots[attribute] = empty  # type: ignore[assignment]
                made |= dict.fromkeys(called, empty) if is_real else {}
    return scratch, made


def _owners(model: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """Return, for each tensor, the first module that can initialise it, or else the first that has it."""
    owners: dict[int, tuple[nn.Module, str]] = {}
    for needs_function in (True, False):
        for module in model.modules():
            if needs_function and not _own_functions(module):
                continue
            for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    owners.setdefault(id(tensor), (module, attribute))
    return owners


def _initializers(model: nn.Module) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what to call, in the order of a constructor: each module's own function, then the model's for each."""
    modules = list(model.named_modules())
    for path, module in modules:
        for function in _own_functions(module):
            yield path, function
    yield from _visit(model, "", None)


def _visit(
    module: nn.Module, path: str, function: Callable[[nn.Module], object] | None
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Visit children first, with the function of the innermost model that has one."""
    own = getattr(module, "_init_weights", None)
    function = own if callable(own) else function
    for name, child in module.named_children():
        yield from _visit(child, f"{path}.{name}".lstrip("."), function)
    if function is not None:
        chosen = function
        yield path, lambda: chosen(module)


def _own_functions(module: nn.Module) -> list[Callable[[], object]]:
    functions = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return [function for function in functions if callable(function)]


def _run(path: str, function: Callable[[], object]) -> None:
    try:
        function()
    except Exception as error:
        raise SplitError(
            f"{path or 'the model'} cannot be initialised on the meta device ({type(error).__name__}: {error}); pass a "
            "callable that builds the model",
            unit=path,
        ) from error
