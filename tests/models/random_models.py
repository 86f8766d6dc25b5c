"""Random models: chains with skips, ties, parameters of the root and several inputs and outputs, all from a seed."""

import random

import torch
from torch import nn


class RandomModel(nn.Module):
    """Runs a random program of layers and of the code between them."""

    def __init__(self, seed):
        super().__init__()
        chance = random.Random(seed)
        self.width = chance.choice([3, 4, 6])
        count = chance.randint(2, 9)
        self.layers = nn.ModuleList([self._layer(chance) for _ in range(count)])
        self.head = nn.Linear(self.width, chance.randint(1, 5))
        self.scale = nn.Parameter(torch.full((self.width,), 0.9))
        self.program = [self._step(chance, number) for number in range(count)]
        self.uses_input_again = chance.random() < 0.3
        self.returns = chance.choice(["one", "tuple", "dict"])
        self._tie(chance)

    def _layer(self, chance):
        kind = chance.choice(["linear", "linear", "norm", "mlp", "pair"])
        width = self.width
        if kind == "linear":
            return nn.Linear(width, width, bias=chance.random() < 0.5)
        if kind == "norm":
            return nn.LayerNorm(width)
        if kind == "mlp":
            inner = chance.choice([2, 5])
            return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        return Pair(width)

    def _step(self, chance, number):
        """What is done around a layer: how it gets its input, and what becomes of its output."""
        return (
            chance.choice(["plain", "plain", "residual", "skip", "scaled", "gated"]),
            chance.randrange(number + 1),
            chance.random() < 0.2,
        )

    def _tie(self, chance):
        linear = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        if len(linear) > 1 and chance.random() < 0.5:
            first, second = chance.sample(linear, 2)
            second.weight = first.weight

    def forward(self, x, factor=None):
        start, seen, extra = x, [x], x.new_zeros(())
        for layer, (how, earlier, is_kept) in zip(self.layers, self.program, strict=True):
            result = layer(x)
            if isinstance(result, tuple):
                result, more = result
                extra = extra + more.sum() if is_kept else extra
            x = self._combine(how, x, torch.tanh(result), seen[earlier])
            seen.append(x)
        if self.uses_input_again:
            x = x + start
        if factor is not None:
            x = x * factor
        out = self.head(x)
        return {"one": out, "tuple": (out, extra), "dict": {"out": out, "more": [extra, seen[-2].mean()]}}[self.returns]

    def _combine(self, how, x, result, earlier):
        if how == "residual":
            return x + result
        if how == "skip":
            return result + earlier
        if how == "scaled":
            return result * self.scale
        if how == "gated":
            return result * torch.sigmoid(earlier)
        return result


class Pair(nn.Module):
    """Returns two tensors."""

    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.left(x), self.right(x)


def random_layout(names, seed):
    """Cut names, in call order, at random places."""
    chance = random.Random(seed)
    stages = chance.randint(2, min(5, len(names)))
    cuts = sorted(chance.sample(range(1, len(names)), stages - 1))
    return [names[start:end] for start, end in zip([0, *cuts], [*cuts, len(names)], strict=True)]


def random_case(seed):
    """Return a model, a layout and an example."""
    torch.manual_seed(seed)
    model = RandomModel(seed).double()
    layout = random_layout([*(f"layers.{n}" for n in range(len(model.layers))), "head"], seed)
    samples = random.Random(seed).randint(2, 4)
    kwargs = {"factor": torch.rand(samples, 1, dtype=torch.float64)} if seed % 3 == 0 else {}
    return model, layout, ((torch.randn(samples, model.width, dtype=torch.float64),), kwargs)
