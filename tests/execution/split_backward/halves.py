"""A backward in two halves beside a whole one."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.execution.split_backward.split import SplitBackward, WeightBackward

Tensors = Sequence[torch.Tensor]

#: Whether gradients may be added without the engine, where no hook observes it. Tests run with and without.
alone = False


def splitter() -> SplitBackward:
    return SplitBackward(adds_in_place=alone)


def tensors_of(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(output)


def seeds_of(outputs: Tensors) -> list[torch.Tensor]:
    """A gradient for each output, always the same."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(one.shape, dtype=one.dtype, generator=generator) for one in outputs]


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that needs a gradient if it can have one, and the tensor is not marked as one that does not."""
    copied = tensor.detach().clone(memory_format=torch.preserve_format)
    return copied.requires_grad_(tensor.requires_grad)


def x_of(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def whole(module: nn.Module, args: Tensors) -> list[torch.Tensor | None]:
    """Gradients of the inputs; those of the parameters are in ``.grad``."""
    args = [leaf(arg) for arg in args]
    outputs = [one for one in tensors_of(module(*args)) if one.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, seeds_of(outputs))
    return [arg.grad for arg in args if arg.requires_grad]


def first_half(split: SplitBackward, module: nn.Module, args: Tensors) -> tuple[list[Any], WeightBackward]:
    args = [leaf(arg) for arg in args]
    outputs = [one for one in tensors_of(module(*args)) if one.requires_grad]
    return split.input_backward(
        [get_gradient_edge(one) for one in outputs], seeds_of(outputs), [arg for arg in args if arg.requires_grad]
    )


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def equal(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    assert_close = torch.testing.assert_close
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            one, other = (value.to_dense() if value.is_sparse else value for value in (one, other))
            assert_close(one, other, rtol=tolerance, atol=tolerance)


def check(
    module: nn.Module, *args: torch.Tensor, early: bool = False, tolerance: float = 1e-12, times: int = 3
) -> SplitBackward:
    """Compare I + W with a whole backward, several times over: the first time the graph is cut, then it is known.

    After I no parameter has a gradient, unless `early` says that one may.
    """
    other = copy.deepcopy(module)
    split = splitter()
    for _ in range(times):
        before = {name: None if one is None else one.clone() for name, one in gradients(module).items()}
        found, weights = first_half(split, module, args)
        if not early:
            equal(gradients(module), before, 0)
        weights()
        equal(found, whole(other, args), tolerance)
        equal(gradients(module), gradients(other), tolerance)
    return split


def check_by_turns(module: nn.Module) -> SplitBackward:
    """Compare them for a module whose second argument says which of two ways it goes, for microbatches by turns."""
    other = copy.deepcopy(module)
    split = splitter()
    for number in (0, 1, 0, 1, 1, 0):
        args = [x_of(5, 4, seed=number), torch.tensor([number])]
        found, weights = first_half(split, module, args)
        weights()
        equal(found, whole(other, args))
        equal(gradients(module), gradients(other))
    return split


class Calling(nn.Module):
    """Parameters, and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Any], **parameters: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            else:
                shape = value if isinstance(value, tuple) else (value,)
                self.register_parameter(name, nn.Parameter(x_of(*shape, seed=len(name) + sum(shape)).detach()))

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(self, *args)


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
