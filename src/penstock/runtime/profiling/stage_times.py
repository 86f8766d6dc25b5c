"""Times one stage: its forward, its backward, and the two halves of it, for one microbatch."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.errors import RunError
from penstock.execution.autograd import gradient_edge
from penstock.execution.preserved_state import copy_as_leaves, preserved_state
from penstock.execution.stage import Stage
from penstock.execution.step import InFlight
from penstock.execution.trees import map_tensors, tensors_in
from penstock.runtime.profiling.stage_memory import SavedBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class StageTimes(NamedTuple):
    """What was found about a stage.

    Attributes:
        seconds: the times, by field of ``Costs``, one per repeat.
        activation: the bytes that a microbatch holds.
        output: what it returned.
    """

    seconds: Mapping[str, list[float]]
    activation: int
    output: Any


class _Run(NamedTuple):
    """A forward that has run: what its backward begins with, and what it returned."""

    flight: InFlight
    gradients: Sequence[torch.Tensor]
    output: Any


def time_stage(
    index: int,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    repeats: int,
) -> StageTimes:
    """Time a stage. Gradients, buffers and random numbers are as before afterwards.

    Args:
        index: which stage it is.
        module: the stage.
        args: what it is called with; tensors that require a gradient get one.
        kwargs: its keyword arguments.
        loss: computes the loss from its output, for the last stage.
        repeats: how often each time is measured.
    """
    stage = Stage(index, module)
    args, kwargs = copy_as_leaves((args, kwargs))  # of a larger batch, only the part that is used counts
    seconds: dict[str, list[float]] = defaultdict(list)
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    try:
        with preserved_state(module, stage.device), torch.enable_grad():
            saved = SavedBytes(module)
            with saved.watching():
                first = _forward(stage, args, kwargs, loss)
            saved.add(first.flight.inputs)
            if not first.flight.roots:
                raise RunError(f"stage {index} returns nothing that requires a gradient, so it cannot be trained")
            for parameter in gradients:
                parameter.grad = None
            del first
            for number in range(repeats + 2):
                for field, taken in _repeat(stage, args, kwargs, loss).items():
                    if number >= 2:  # the first ones fill caches
                        seconds[field].append(taken)
            output = _forward(stage, args, kwargs, None).output
    finally:
        stage.end()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    return StageTimes(dict(seconds), saved.total, output)


def _repeat(
    stage: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Callable[[Any], torch.Tensor] | None
) -> dict[str, float]:
    """Run a forward and a whole backward, then a forward and both halves; returns how long each took."""
    clock = _Clock(stage.device)
    stage.begin()
    whole = _forward(stage, args, kwargs, loss)
    forward = clock.lap()
    stage.backward(whole.flight, whole.gradients)
    backward = clock.lap()
    halved = _forward(stage, args, kwargs, loss)
    again = clock.lap()
    _, weights = stage.input_backward(halved.flight, halved.gradients)
    inputs = clock.lap()
    weights()
    taken = {"forward": (forward + again) / 2, "backward": backward, "backward_input": inputs}
    taken["backward_weight"] = clock.lap()
    if not halved.flight.inputs:  # as in the first stage, which passes no gradient on: all of it is W
        taken["backward_weight"] += taken["backward_input"]
        taken["backward_input"] = 0.0
    stage.end()
    return taken


def _forward(
    stage: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Callable[[Any], torch.Tensor] | None
) -> _Run:
    given = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), args)
    inputs = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
    output = stage.module(*(stage.fresh(given) if stage.changes_inputs else given), **kwargs)
    ends = [tensor for tensor in tensors_in((output if loss is None else loss(output),)) if tensor.requires_grad]
    roots = [gradient_edge(tensor) for tensor in ends]
    return _Run(InFlight(roots, inputs), [torch.ones_like(tensor) for tensor in ends], output)


class _Clock:
    """Reads the time from lap to lap, when the device has done its work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()

    def lap(self) -> float:
        """Return the time since the last lap."""
        before, self._last = self._last, self._now()
        return self._last - before

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
