"""A ``.grad`` that torch keeps as a lazy conjugate, or a lazy negative, is added to like any other."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime import Pipeline

COMPLEX = torch.complex128


class Conjugated(nn.Module):
    """Its gradients are lazy conjugates: of a product of matrices, of a scale, and of a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=COMPLEX))
        self.scale, self.bias = (nn.Parameter(torch.randn(4, dtype=COMPLEX)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(COMPLEX) @ self.weight.conj()) * self.scale.conj() + self.bias.conj()


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().square().mean()


def conjugate(value: torch.Tensor) -> torch.Tensor:
    return value.conj().clone().conj()


#: A gradient that is there before a step: none, or a lazy one.
EARLIER: dict[str, Callable[[nn.Parameter], torch.Tensor | None]] = {
    "none": lambda _: None,
    "lazy": lambda parameter: conjugate(torch.ones_like(parameter.detach()) * (1 + 2j)),
}

#: Two stages on one rank: whole backwards, halves, and W after B.
ORDERS = {
    "B": "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1",
    "I and W": "0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1",
    "W after B": "0F0 1F0 1B0 0B0 0F1 1F1 1I1 0I1 1W1 0W1",
    "B after W": "0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1B1 0B1",
}


def expected(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor, earlier: str) -> list[torch.Tensor]:
    whole = nn.Sequential(*modules)
    found = torch.autograd.grad(loss_fn(whole(x), y), list(whole.parameters()))
    before = [EARLIER[earlier](parameter) for parameter in whole.parameters()]
    return [one if other is None else one + other for one, other in zip(found, before, strict=True)]


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("order", ORDERS)
def test_all_orders_of_backwards(order: str, earlier: str) -> None:
    torch.manual_seed(0)
    modules = [Conjugated(), Conjugated()]
    x, y = torch.randn(4, 4, dtype=COMPLEX), torch.randn(4, 4, dtype=COMPLEX)
    gradients = expected(modules, x, y, earlier)
    parameters = list(nn.Sequential(*modules).parameters())
    for parameter in parameters:
        parameter.grad = EARLIER[earlier](parameter)
    schedule = ps.Schedule([ORDERS[order].split()])
    with Pipeline(dict(enumerate(modules)), schedule, loss_fn=loss_fn) as pipe:
        pipe.step(x, target=y)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad.resolve_conj(), gradient)
