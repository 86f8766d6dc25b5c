"""Marks a model before or after the call of a module, by name."""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any

from penstock.errors import SplitError
from penstock.models.tracing.marks import mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch


class SplitPoint(Enum):
    """Where a model is cut: before a module runs, or after."""

    BEGINNING = 1
    END = 2


class UnknownModuleError(SplitError, AttributeError):
    """A module to split at that the model does not have."""


def mark_modules(model: torch.nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Mark modules: their forwards are replaced by ones with a mark."""
    for name, point in spec.items():
        module = _find(model, name)
        if point not in (SplitPoint.BEGINNING, SplitPoint.END):
            raise SplitError(
                f"unknown split point {point!r} for module {name!r}; use SplitPoint.BEGINNING or SplitPoint.END",
                unit=name,
            )
        original = module.forward
        vars(module).update(_orig_forward=original, forward=_marked(original, at_end=point is SplitPoint.END))


@contextmanager
def modules_marked(model: torch.nn.Module, spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Mark modules for a while, and leave the model as it was."""
    names = ("forward", "_orig_forward")
    before = [(vars(module), {name: vars(module).get(name) for name in names}) for module in model.modules()]
    try:
        mark_modules(model, spec)
        yield
    finally:
        for attributes, values in before:
            for name, value in values.items():
                attributes.pop(name, None)
                if value is not None:
                    attributes[name] = value


def _marked(forward: Callable[..., Any], *, at_end: bool) -> Callable[..., Any]:
    @wraps(forward)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if not at_end:
            mark()
        result = forward(*args, **kwargs)
        if at_end:
            mark()
        return result

    return marked


def _find(model: torch.nn.Module, name: str) -> torch.nn.Module:
    names = [known for known, _ in model.named_modules(remove_duplicate=False) if known]
    if name in names:
        return model.get_submodule(name)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"its modules are {', '.join(names[:8])}"
    raise UnknownModuleError(f"the model has no module {name!r} to split at; {hint}", unit=name)
