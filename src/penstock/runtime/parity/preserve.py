"""Preserves parameters, gradients, buffers and random state around a parity check."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from penstock.execution.preserved_state import Buffers, preserved_random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from penstock.runtime.engine import Engine
    from penstock.runtime.parity.comparison import Gradients, ParameterPath

    #: Copies of the values of parameters.
    Values = dict[torch.nn.Parameter, torch.Tensor]


@contextmanager
def preserved_pipeline(
    engine: Engine,
    parameters: Mapping[torch.nn.Parameter, ParameterPath],
    values: Values,
) -> Iterator[Callable[[], None]]:
    """Preserve parameters, gradients, buffers and random state. Yields a function that restores the initial state.

    In the initial state there are no gradients.

    Ranks may be threads that share the random state: none begins before all have saved it, nor restores it
    before all are done.
    """
    modules = [stage.module for stage in engine.stages.values()]
    if isinstance(engine.loss_fn, torch.nn.Module):
        modules.append(engine.loss_fn)
    buffers, gradients = Buffers(modules), {one: one.grad for one in parameters}

    def begin() -> None:
        buffers.restore()
        for one in parameters:
            one.grad = None

    with preserved_random_state([stage.device for stage in engine.stages.values()], modules):
        engine.transport.exchange(b"kept")
        try:
            yield begin
            engine.transport.exchange(b"done")
        finally:
            buffers.restore()
            restore_values(parameters, values)
            for one, gradient in gradients.items():
                one.grad = gradient


def pop_gradients(parameters: Collection[torch.nn.Parameter]) -> Gradients:
    """Take the gradients away from the parameters."""
    found = {one: one.grad for one in parameters}
    for one in parameters:
        one.grad = None
    return found


def restore_values(parameters: Mapping[torch.nn.Parameter, ParameterPath], values: Values) -> str:
    """Restore the values of parameters; return the name of one that had changed, if any."""
    changed = ""
    for parameter, owned in parameters.items():
        value = values.get(parameter)
        if value is not None and not _is_same(parameter, value):
            changed = changed or f"the parameter {owned.name} of stage {owned.stage}"
            with torch.no_grad():
                parameter.copy_(value)
    return changed


def _is_same(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors are equal, element by element; NaN equals NaN. A change of ``.data`` has no version.

    Of sharded tensors, this rank's shard is compared. Sparse ones cannot be.
    """
    if parameter.layout is not torch.strided:
        return True
    with torch.no_grad():
        one, other = (each.to_local() if hasattr(each, "to_local") else each for each in (parameter, value))
        same: torch.Tensor = (one == other) | (one.isnan() & other.isnan())
        return bool(same.all())
