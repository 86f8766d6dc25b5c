"""Stages for parity: small, in float64, the same wherever and whenever they are made.

A kind is a function of the index of a stage and the number of stages. All stages one after the other are the unsplit
model, with which both packages are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 4

Kind = Callable[[int, int], nn.Module]


class Layer(nn.Module):
    """One tensor in, one out."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Plain(nn.Module):
    """A layer whose parameters all lie on the way of the gradient."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Scaled(nn.Module):
    """With a keyword argument that is split like the batch, and one that goes to every microbatch."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, power: float = 1.0) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return y if scale is None else y * scale * power


class Pair(nn.Module):
    """Two tensors on every edge, of different shapes; the last stage makes one of them."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == stages - 1
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.column = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, column: torch.Tensor | None = None) -> Any:
        y = torch.tanh(self.linear(x))
        column = self.column(x) if column is None else column + self.column(y)
        return y * column if self.last else (y, column)


class Unused(nn.Module):
    """Every edge has a tensor that the next stage uses, one that it does not, and one of whole numbers."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.last = index == stages - 1
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, aside: Any = None, places: torch.Tensor | None = None) -> Any:
        y = torch.tanh(self.linear(x))
        if places is not None:
            y = y + places
        if self.last:
            return y
        return y, self.aside(x), torch.full((len(x), 1), 2)


class Frozen(nn.Module):
    """The first half of the stages is not trained."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if index < stages // 2:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Shared(nn.Module):
    """A weight that is used twice, and one that is not used."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Counting(nn.Module):
    """Counts its forwards in a buffer, and normalises with running statistics."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class Random(nn.Module):
    """Draws random numbers in every forward."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * (torch.rand_like(x) < 0.5)  # dropout draws other numbers on other machines


class Forked(nn.Module):
    """The last stage returns two tensors."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.last = index == stages - 1
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return (y, y.mean(1, keepdim=True)) if self.last else torch.tanh(y)


class _Deferred(torch.autograd.Function):
    """A product whose weight gradient is left in a list, for whoever makes it later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, left: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left = left
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.left.append((gradient.detach(), x.detach()))
        return gradient @ weight, None, None


class Deferring(nn.Module):
    """Makes its weight gradients itself: ``dw_builder`` of a stage takes those of one microbatch."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2)
        self.left: list[Any] = []
        self.builds = 0
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(_Deferred.apply(x, self.weight, self.left))

    def dw_builder(self) -> Callable[[], None]:
        self.builds += 1
        taken, self.left[:] = list(self.left), []

        def runner() -> None:
            self.runs += 1
            for gradient, x in taken:
                found = gradient.t() @ x
                self.weight.grad = found if self.weight.grad is None else self.weight.grad + found

        return runner


class Direct(nn.Module):
    """The same as ``Deferring`` without its own weight gradient."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.t())


def made(kind: Kind, index: int, stages: int) -> nn.Module:
    """A stage, always with the same weights."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(100 + index)  # torch.manual_seed keeps the stack for absent devices
        return kind(index, stages).double()


class Whole(nn.Module):
    """All stages one after the other."""

    def __init__(self, kind: Kind, stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(made(kind, index, stages) for index in range(stages))

    def forward(self, *values: Any, **named: Any) -> Any:
        for stage in self.stages:
            given = stage(*values, **named)
            values = given if isinstance(given, tuple) else (given,)
        return given
