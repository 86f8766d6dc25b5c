"""Finds parameters by the names that they have in the model, whatever wraps the modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    import torch

#: What torch.compile and checkpoint_wrapper put before a name.
_WRAPPED: Final = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where a parameter is: it may be another object later, e.g. when a wrapper replaces it.

    Attributes:
        owner: the module that has it.
        attribute: its name in that module.
    """

    owner: torch.nn.Module
    attribute: str

    @property
    def parameter(self) -> Any:
        """The parameter that is there now."""
        return self.owner._parameters[self.attribute]


def places_by_name(module: torch.nn.Module) -> dict[str, ParameterPlace]:
    """Find all parameters of a module by name; one that is used twice has two names.

    Under a wrapper, a parameter has the name that it has without it, and the longer one as well.

    >>> import torch
    >>> compiled = torch.compile(torch.nn.Linear(2, 2, bias=False))
    >>> sorted(places_by_name(compiled))
    ['_orig_mod.weight', 'weight']
    """
    found: dict[str, ParameterPlace] = {}
    plain = plain_paths(module)
    for path, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                place = ParameterPlace(part, name)
                found[_joined(path, name)] = place
                found.setdefault(_joined(plain[path], name), place)
    return found


def plain_paths(module: torch.nn.Module) -> dict[str, str]:
    """Map the path of each module inside another to its path without wrappers.

    >>> import torch
    >>> plain_paths(torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    {'': '', '_orig_mod': '', '_orig_mod.0': '0'}
    """
    plain = {"": ""}
    modules = dict(module.named_modules(remove_duplicate=False))
    for path in modules:
        if path:
            above, _, last = path.rpartition(".")
            plain[path] = plain[above] if _is_wrapper(modules[above], last) else _joined(plain[above], last)
    return plain


def plain_names(module: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Name each parameter of a module once, as without wrappers; one that is used twice by its first place.

    >>> import torch
    >>> list(plain_names(torch.compile(torch.nn.Linear(2, 2))).values())
    ['weight', 'bias']
    """
    first: dict[torch.nn.Parameter, tuple[ParameterPlace, str]] = {}
    for name, place in places_by_name(module).items():
        known, shortest = first.setdefault(place.parameter, (place, name))
        if place == known and len(name) < len(shortest):
            first[place.parameter] = place, name
    return {parameter: name for parameter, (_, name) in first.items()}


def replace_parameter(module: torch.nn.Module, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Put one parameter in place of another, everywhere in a module."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new


def _is_wrapper(module: torch.nn.Module, attribute: str) -> bool:
    return attribute in _WRAPPED or (attribute == "module" and isinstance(module, DistributedDataParallel))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
