"""I and W of functions of one's own, and of what needs no gradient."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from execution.split_backward.halves import Calling, check, splitter, x_of


class Scale(torch.autograd.Function):
    """An input times a parameter, with tensors on the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.w = w.detach()
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * ctx.w, (gradient * x).sum(0)


class Half(torch.autograd.Function):
    """A value whose gradient is not its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / 2


class Several(torch.autograd.Function):
    """Two outputs of an input and a weight, one of them without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.save_for_backward(x, w)
        largest = x.argmax()
        ctx.mark_non_differentiable(largest)
        return x @ w, largest, x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any, other: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient @ w.t() + other, x.t() @ gradient


FUNCTIONS = {
    "with a parameter": lambda self, x: Scale.apply(x, self.b) @ self.w,
    "on a weight": lambda self, x: functional.linear(x, Half.apply(self.w)),
    "on a weight, and on what is made of it": lambda self, x: functional.linear(x, Half.apply(Half.apply(self.w) * 2)),
    "on a bias": lambda self, x: functional.linear(x, self.w, Half.apply(self.b)),
    "on the bias of a sum": lambda self, x: x @ self.w + Half.apply(self.b),
    "on an input": lambda self, x: Half.apply(x) @ self.w,
    "between": lambda self, x: Half.apply(x @ self.w) @ self.w,
    "last": lambda self, x: Half.apply(x @ self.w),
    "with several outputs": lambda self, x: Several.apply(x, self.w)[::2],
    "with several outputs, one used": lambda self, x: Several.apply(x, self.w)[2],
    "of weights alone, as an output": lambda self, x: (x @ self.w, Half.apply(self.b)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_ones_own(name: str) -> None:
    check(Calling(FUNCTIONS[name], w=(4, 4), b=(4,)), x_of(4, 4))


class Ending(torch.autograd.Function):
    """A value that passes no gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None


@pytest.mark.parametrize("ended", range(8))
def test_layers_that_get_no_gradient(ended: int) -> None:
    """They come at any place among others, of which each gets its own."""

    def run(self: Calling, x: torch.Tensor) -> torch.Tensor:
        parts = [self.a(x), self.b(x), self.c(x)]
        return sum([Ending.apply(part) if ended >> index & 1 else part for index, part in enumerate(parts)])

    check(Calling(run, a=nn.Linear(4, 3), b=nn.Linear(4, 3), c=nn.Linear(4, 3, bias=False)), x_of(4, 4))


# What needs a gradient, and what is there to need it.


def test_parameters_without_gradient() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4))
    for frozen in ("0.weight", "0.bias", "2.weight", "3.bias"):
        module.get_parameter(frozen).requires_grad_(False)
    check(module, x_of(5, 4))
    assert module[0].weight.grad is None
    assert module[3].weight.grad is not None


def test_a_frozen_stage_passes_gradients_on() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).requires_grad_(False)
    check(module, x_of(5, 4))


def test_a_stage_whose_inputs_need_none() -> None:
    check(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), x_of(5, 4).detach())


def test_nothing_needs_a_gradient() -> None:
    found, weights = splitter().input_backward([], [], [])
    weights()
    assert found == []


SEVERAL = {
    "two outputs": lambda self, x, y: (x @ self.w, y @ self.w),
    "one output twice": lambda self, x, y: (lambda z: (z, z))(x @ self.w + y),
    "one product twice": lambda self, x, y: (lambda z: (z, z))(x @ self.w),
    "outputs of one node": lambda self, x, y: (x @ self.w + y).chunk(2),
    "one of the outputs of one node": lambda self, x, y: (x @ self.w + y).chunk(2)[1],
    "an output without gradient": lambda self, x, y: (x @ self.w, y.argmax(), y.detach()),
    "an input without effect": lambda self, x, y: x @ self.w,
    "an input that is an output": lambda self, x, y: (x @ self.w, y),
    "both inputs are outputs": lambda self, x, y: (y, x),
    "an input that is an output twice": lambda self, x, y: (x @ self.w, y, y),
    "a parameter as output": lambda self, x, y: (x @ self.w, self.b, y),
    "a parameter as output, used as well": lambda self, x, y: (x @ self.w + self.b, self.b),
    "an output of parameters alone": lambda self, x, y: (x @ self.w, self.b * 2, (self.w * 2).sum()),
    "an output of what is used inside": lambda self, x, y: (lambda s: (x * s, s * 2, y @ s))(self.w.exp()),
    "what is used inside as output": lambda self, x, y: (lambda s: (x * s, s))(self.w.exp()),
    "no output depends on an input": lambda self, x, y: (self.b * 2, self.w @ self.w),
    "an input and what is made of it": lambda self, x, y: (x, x @ self.w, x * 2),
    "an output in the middle": lambda self, x, y: (lambda z: (z, z.relu() @ self.w))(functional.linear(x, self.w) + y),
    "a product in the middle": lambda self, x, y: (lambda z: (z, z.relu() @ self.w + y))(functional.linear(x, self.w)),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_inputs_and_outputs(name: str) -> None:
    check(Calling(SEVERAL[name], w=(4, 4), b=(4,)), x_of(4, 4), x_of(4, 4, seed=2))


@pytest.mark.parametrize("name", SEVERAL)
def test_one_of_two_inputs_needs_a_gradient(name: str) -> None:
    check(Calling(SEVERAL[name], w=(4, 4), b=(4,)), x_of(4, 4), x_of(4, 4, seed=2).detach())


def test_a_graph_is_known_again() -> None:
    """Also where an input is not used, or an output comes twice: else every microbatch would be cut anew."""
    for name, function in SEVERAL.items():
        split = check(Calling(function, w=(4, 4), b=(4,)), x_of(4, 4), x_of(4, 4, seed=2), times=4)
        assert len(split._cuts) == 1, name
