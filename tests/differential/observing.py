"""What a call leaves behind, by name, and where two such differ."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from differential.cases import Case
from differential.models import Batch, StageModule

Observed = dict[str, Any]
"""Losses and output of a call; gradients and buffers by stage and name; what the batch is afterwards."""


@dataclass(frozen=True)
class Raised:
    """An error of a rank."""

    kind: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


@dataclass
class Result:
    """What a rank has after each call, and the error that has ended it, if one has."""

    calls: list[Observed] = field(default_factory=list)
    raised: Raised | None = None

    @contextmanager
    def note_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.raised = Raised.of(error)
            raise


def detach(value: Any) -> Any:
    """A copy of all tensors in a value, dense and without history."""
    return tree_map_only(torch.Tensor, _dense, value)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor).resolve_conj().resolve_neg().clone()


def observe(modules: dict[int, StageModule], batch: Batch | None, output: Any, losses: list[torch.Tensor]) -> Observed:
    """What there is on a rank after a call; ``batch`` on the rank of the first stage."""
    found: Observed = {}
    for index, module in modules.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found[f"gradient of {index}.{name}"] = None if parameter.grad is None else _dense(parameter.grad)
        for name, buffer in module.named_buffers():
            found[f"buffer {index}.{name}"] = _dense(buffer)
        for name, piece in module.named_modules():
            if hasattr(piece, "calls"):
                found[f"calls of {index}.{name}"] = piece.calls
    if batch is not None:
        found["x"] = _dense(batch.x)
        found["gradient of x"] = None if batch.x.grad is None else _dense(batch.x.grad)
    if output is not None:
        found["output"] = detach(output)
    if losses:
        found["losses"] = detach(losses)
    return found


def merge(values: Iterable[Any]) -> Any:
    """The outputs of all microbatches as one."""
    rows, specs = zip(*map(tree_flatten, values), strict=True)
    return tree_unflatten([torch.cat(column) for column in zip(*rows, strict=True)], specs[0])


def finish(modules: Iterable[nn.Module], after: str) -> None:
    """What a training loop does after a step."""
    if after == "keep":
        return
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    for parameter in parameters.values():
        if after == "update" and parameter.grad is not None:
            with torch.no_grad():
                parameter.sub_(0.01 * _dense(parameter.grad))
        parameter.grad = None


def differences(case: Case, expected: Observed, found: Observed, name: str) -> list[str]:
    """Where a call has left something else behind than the unsplit model has."""
    problems = []
    for key in sorted(expected.keys() | found.keys()):
        if key not in expected or key not in found:
            problems.append(f"{name}: {key} is {'missing' if key in expected else 'unexpected'}")
            continue
        reported = _difference(case, key, expected[key], found[key])
        if reported:
            problems.append(f"{name}: {key}: {reported}")
    return problems


def _difference(case: Case, key: str, expected: Any, found: Any) -> str | None:
    if key.startswith("calls") and case.has_unused:
        return None  # where zeros come back, hooks are called
    # What goes to another rank and is not used there comes back as zeros; so it says in docs/running.md.
    if expected is None and isinstance(found, torch.Tensor) and key.startswith("gradient") and case.has_unused:
        expected = torch.zeros_like(found)
    try:
        torch.testing.assert_close(found, expected, equal_nan=True, **case.tolerance)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return None
