"""Observes which parameters and buffers a constructor registers, and what they are called in the finished model."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Registration(NamedTuple):
    """One assignment of a parameter or buffer to a module; the same constructor makes the same ones every time."""

    owner: str
    attribute: str
    shape: tuple[int, ...]
    is_parameter: bool


class Survey(NamedTuple):
    """What a constructor registers.

    Attributes:
        registrations: in order.
        names: of each registration, what its tensor is called in the finished model, in the order of the modules;
            several names if it is tied, none if it was replaced.
        parameters: the names of all parameters of the finished model.
        buffers: the names of all its buffers.
    """

    registrations: tuple[Registration, ...]
    names: tuple[tuple[str, ...], ...]
    parameters: frozenset[str]
    buffers: frozenset[str]


@contextmanager
def observe_registrations(observer: Callable[[nn.Module, str, Tensor, bool], None]) -> Iterator[None]:
    """Call the observer, while this context lasts, with the module, attribute and tensor of each registration.

    Other threads are left alone.
    """
    thread = threading.get_ident()

    def observe(is_parameter: bool) -> Callable[[nn.Module, str, Tensor | None], None]:
        def hook(module: nn.Module, attribute: str, tensor: Tensor | None) -> None:
            if isinstance(tensor, Tensor) and threading.get_ident() == thread:
                observer(module, attribute, tensor, is_parameter)

        return hook

    handles = [
        register_module_parameter_registration_hook(observe(True)),
        register_module_buffer_registration_hook(observe(False)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Registrar:
    """Collects the registrations of a constructor."""

    def __init__(self) -> None:
        self._seen: list[tuple[nn.Module, Registration, Tensor]] = []

    def observe(self, module: nn.Module, attribute: str, tensor: Tensor, is_parameter: bool) -> None:
        """Note a registration."""
        self._seen.append((module, describe(module, attribute, tensor, is_parameter), tensor))

    def survey(self, model: nn.Module) -> Survey:
        """Name what was registered, given the finished model."""
        paths: dict[int, list[str]] = defaultdict(list)
        for path, module in model.named_modules(remove_duplicate=False):
            paths[id(module)].append(path)
        names_of = names_by_tensor(model)
        names = []
        for module, registration, tensor in self._seen:
            slots = [f"{path}.{registration.attribute}".lstrip(".") for path in paths[id(module)]]
            names.append(tuple(dict.fromkeys([*names_of.get(id(tensor), ()), *slots])))
        return Survey(
            tuple(registration for _, registration, _ in self._seen),
            tuple(names),
            frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)),
            frozenset(name for name, _ in model.named_buffers(remove_duplicate=False)),
        )


def describe(module: nn.Module, attribute: str, tensor: Tensor, is_parameter: bool) -> Registration:
    """Describe a registration by what must be the same each time the constructor runs."""
    return Registration(type(module).__qualname__, attribute, tuple(tensor.shape), is_parameter)


def names_by_tensor(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter and buffer, by the identity of the tensor."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names[id(buffer)].append(name)
    return names
