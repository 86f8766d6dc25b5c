"""Runs a stage once to find what it returns, without any other effect: the dry run.

It uses copies of the arguments, and preserves buffers and random states. Attributes that a module sets in Python
are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from penstock.errors import StageError
from penstock.execution.autograd import is_inplace_on_leaf
from penstock.execution.preserved_state import copy_as_leaves, preserved_state
from penstock.execution.shared_memory import Kin, find_groups, has_memory
from penstock.execution.trees import tensors_in
from penstock.execution.value_spec import describe_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.execution.links import Route
    from penstock.execution.links.fan_out import OutputValues
    from penstock.execution.stage import Stage
    from penstock.execution.value_spec import ValueSpec


class Call(NamedTuple):
    """The arguments of a stage in a dry run.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
        kin: which of the tensors are kin (see ``find_groups``).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kin: Kin = ()

    def with_zeros(self, received: Sequence[tuple[Route, ValueSpec]], device: torch.device) -> Call:
        """Add zeros in place of what other stages return: they are also valid as an index."""
        args, kin = list(self.args), list(self.kin)
        for route, meta in received:
            zeros = [one.empty(device).zero_().requires_grad_(one.requires_grad) for one in meta.tensors]
            args += route.as_arguments(meta.unflatten(zeros))
            kin += [[zeros[number] for number in one] for one in meta.shared]
        return Call(tuple(args), self.kwargs, kin)

    def copy(self) -> Call:
        """Copy all tensors of the call, as leaves."""
        args, kwargs = copy_as_leaves(self.args), copy_as_leaves(self.kwargs)
        pairs = zip(pytree.tree_leaves((self.args, self.kwargs)), pytree.tree_leaves((args, kwargs)), strict=True)
        dense = [pair for pair in pairs if isinstance(pair[0], torch.Tensor) and has_memory(pair[0])]
        groups = find_groups([original for original, _ in dense], self.kin)
        return Call(args, kwargs, [[dense[number][1] for number in group] for group in groups])


def dry_run(
    module: torch.nn.Module,
    device: torch.device,
    call: Call,
    *,
    run: Callable[..., Any] | None = None,
    gradients: bool = True,
) -> tuple[Any, Call]:
    """Run a module on copies of its arguments, and preserve its state.

    >>> x = torch.zeros(2)
    >>> dry_run(torch.nn.ReLU(inplace=True), x.device, Call((x - 1,), {}))[0]
    tensor([0., 0.])

    Args:
        module: the module.
        device: where it runs.
        call: the arguments, of which copies are used.
        run: runs the module, given the arguments; by default, the module itself.
        gradients: whether outputs get a graph.

    Returns:
        What it returns, and the copies that it was called with.
    """
    copies = call.copy()
    with preserved_state(module, device), torch.set_grad_enabled(gradients):
        return (run or module)(*copies.args, **copies.kwargs), copies


def find_outputs(stage: Stage, call: Call, outputs: OutputValues) -> list[ValueSpec]:
    """Describe what a stage sends over each of its links, and find whether it modifies its inputs in place."""
    try:
        output, copies = _run(stage, call)
        return outputs.describe(output, copies.kin)[0]
    except Exception as error:
        if is_inplace_on_leaf(error) and not stage.changes_inputs:
            stage.changes_inputs = True
            return find_outputs(stage, call, outputs)
        raise _failure(stage, call, error) from error


def find_changes(stage: Stage, call: Call) -> None:
    """Find whether the last stage modifies its inputs in place. Other errors appear when it runs."""
    try:
        _run(stage, call)
    except Exception as error:
        stage.changes_inputs = stage.changes_inputs or is_inplace_on_leaf(error)


def _run(stage: Stage, call: Call) -> tuple[Any, Call]:
    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = tensors_in(args) if stage.index > 0 else []
        versions = [tensor._version for tensor in inputs]
        output = stage.module(*(stage.fresh(args) if stage.changes_inputs else args), **kwargs)
        if [tensor._version for tensor in inputs] != versions:
            stage.changes_inputs = True
        if stage.parallel is not None:
            stage.parallel.reshard()
        return output

    return dry_run(stage.module, stage.device, call, run=run)


def _failure(stage: Stage, call: Call, error: Exception) -> StageError:
    given = ", ".join(map(describe_tensor, tensors_in(call.args)))
    message = f"stage {stage.index} failed in the dry run that finds shapes, with inputs {given or '(no tensors)'}"
    by_name = stage.index == 0 and isinstance(error, TypeError) and "positional argument" in str(error)
    hint = "; pass a target by its name: step(x, target=y)" if by_name else ""
    return StageError(f"{message}: {type(error).__name__}: {error}{hint}", stage=stage.index)
