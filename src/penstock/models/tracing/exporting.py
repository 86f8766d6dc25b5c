"""Exports a model as one graph, or says which module cannot be exported, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch.utils import _pytree

from penstock.errors import TraceError
from penstock.models.tracing.quiet import torch_warnings_hidden

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from torch.export import ExportedProgram

_INSTEAD: Final = (
    "Split it by module names instead, which traces nothing: ps.split(model, layout=[['embed', 'layers.0'], "
    "['layers.1', 'head']]); or make one module per stage and pass each to PipelineStage"
)


def export_model(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> ExportedProgram:
    """Return the program of a model for example arguments, or raise ``TraceError``."""
    args, kwargs = _distinct((args, kwargs))
    try:
        with torch_warnings_hidden():
            return torch.export.export(model, args, kwargs)
    except Exception as error:
        raise _failure(model, error) from error


def _distinct(arguments: Any) -> Any:
    """Copy a tensor that appears twice: an export would take the two arguments for one, in every later call too."""
    seen: set[int] = set()

    def copy_known(value: torch.Tensor) -> torch.Tensor:
        if id(value) in seen:
            return value.detach().clone().requires_grad_(value.requires_grad)
        seen.add(id(value))
        return value

    return _pytree.tree_map_only(torch.Tensor, copy_known, arguments)


def module_of(model: torch.nn.Module, program: ExportedProgram) -> fx.GraphModule:
    """Return the module of a model's program: a graph that holds the model's own tensors; or raise ``TraceError``."""
    try:
        with torch_warnings_hidden():
            module = program.module(check_guards=False)
    except Exception as error:  # e.g. a layer with the name of an attribute of graph modules
        raise _failure(model, error) from error
    assert isinstance(module, fx.GraphModule)
    return module


def _failure(model: torch.nn.Module, error: Exception) -> TraceError:
    name = _failing_module(model, error)
    kind = type(model).__name__ if not name else type(model.get_submodule(name)).__name__
    where = f"the forward of {kind}" if not name else f"module {name!r} ({kind})"
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return TraceError(f"cannot trace {where}: {type(error).__name__}: {reason}. {_INSTEAD}", unit=name or None)


def _failing_module(model: torch.nn.Module, error: BaseException) -> str:
    """The name of the innermost module of the model that was running; empty if it is the model itself, or unknown."""
    names = {id(module): name for name, module in model.named_modules()}
    deepest = ""
    cause: BaseException | None = error
    while cause is not None:
        found = [names[id(each)] for each in _running(cause.__traceback__) if id(each) in names]
        if found:
            deepest = found[-1]
        cause = cause.__cause__ or cause.__context__
    return deepest


def _running(traceback: TracebackType | None) -> Iterator[object]:
    """The objects whose methods a traceback passes through, from the outside in."""
    while traceback is not None:
        yield traceback.tb_frame.f_locals.get("self")
        traceback = traceback.tb_next
