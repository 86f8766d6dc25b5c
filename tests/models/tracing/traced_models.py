"""Models to trace. Each takes the function that marks a cut, so that both packages can trace it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

WIDTH = 4
BATCH = 2


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Chain(nn.Module):
    """Four layers, two cuts."""

    def __init__(self, split):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.split = split

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number in (1, 3):
                self.split()
            x = torch.tanh(layer(x))
        return x


class Block(nn.Module):
    def __init__(self, split=lambda: None):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.split = split

    def forward(self, x):
        x = torch.relu(self.linear(x))
        self.split()
        return self.norm(x)


class Nested(nn.Module):
    """A cut inside a module, twice, which is inside a Sequential."""

    def __init__(self, split):
        super().__init__()
        self.body = nn.Sequential(Block(split), Block(split))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.body(x))


class Layers(nn.Module):
    """No marks: to split by name."""

    def __init__(self, split):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(3)})
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


class Skips(nn.Module):
    """Values that go over a stage, several outputs, keyword arguments, one for each stage."""

    def __init__(self, split):
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.split = split

    def forward(self, x, *, scale, shift):
        a = torch.tanh(self.down(x)) * scale
        self.split()
        b = torch.tanh(self.middle(a))
        self.split()
        return {"last": self.up(b + a) + shift, "all": (b, [a, x])}


class Shared(nn.Module):
    """A parameter and a buffer in two stages, a constant, a tensor that is no buffer, running statistics."""

    def __init__(self, split):
        super().__init__()
        self.gain = nn.Parameter(numbers(7, WIDTH))
        self.register_buffer("offset", numbers(8, WIDTH))
        self.plain = numbers(9, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.split = split

    def forward(self, x, mask):
        x = self.norm(self.first(x)) * self.gain + self.offset
        self.split()
        x = torch.where(mask, self.second(x), self.plain)
        x = x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.gain + self.offset
        self.split()
        return self.frozen(x), mask


class Arguments(nn.Module):
    """Arguments in containers, and ones that are no tensors."""

    def __init__(self, split):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.split = split

    def forward(self, pair, times: int, extra=None):
        x = self.first(pair["a"]) * times
        self.split()
        x = self.second(x) + pair["b"][0]
        return (x if extra is None else x + extra,)


class Case(NamedTuple):
    make: Callable[[Any], nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})
    spec: dict[str, str] | None = None


X = numbers(0, BATCH, WIDTH)
IDS = torch.tensor([[1, 5, 2], [7, 0, 10]])
CASES = {
    "chain": Case(Chain, (X,)),
    "nested": Case(Nested, (X,)),
    "by name": Case(Layers, (IDS,), spec={"layers.0": "BEGINNING", "layers.1": "END"}),
    "inside by name": Case(Layers, (IDS,), spec={"layers.1.linear": "END", "head": "BEGINNING"}),
    "after the last": Case(Layers, (IDS,), spec={"layers.2": "BEGINNING", "head": "END"}),
    "one stage": Case(Layers, (IDS,)),
    "skips": Case(Skips, (X,), {"scale": numbers(1, BATCH, WIDTH), "shift": numbers(2, WIDTH)}),
    "shared": Case(Shared, (X, X > 0)),
    "arguments": Case(Arguments, ({"a": X, "b": [numbers(3, BATCH, WIDTH)]}, 3), {"extra": None}),
}
