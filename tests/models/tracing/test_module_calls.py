"""Modules that are called by others than their parents, and again: values, gradients and names are the model's."""

import copy
from itertools import permutations
from random import Random

import pytest
import torch
from torch import fx, nn

from models.tracing.traced_models import WIDTH, X, numbers
from penstock.pipelining import SplitPoint, pipeline


class Pair(nn.Module):
    """Computes something else if it is passed a scale."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=None):
        y = self.linear(x)
        return (y, y.tanh()) if scale is None else (y * scale, y.sigmoid())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(self.pair(x)[0]).tanh()


class Parent(nn.Module):
    """Calls modules inside of ``block``."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)


class InnerOnly(Parent):
    def forward(self, x):
        return self.last(self.block.pair(self.first(x), x)[1])


class InnerAfter(Parent):
    def forward(self, x):
        y, z = self.block.pair(self.block(self.first(x)), x)
        return self.last(y + z)


class InnerBefore(Parent):
    def forward(self, x):
        y, z = self.block.pair(self.first(x), x)
        return self.last(self.block(y * z))


class InnerAround(Parent):
    def forward(self, x):
        y, z = self.block.pair(self.first(x), x)
        y, z = self.block.pair(self.block(y * z))
        return self.last(z + self.block.pair(x, y)[0])


class InnerDeep(Parent):
    """Also a module two levels down, a parameter of it, and one without gradients."""

    def forward(self, x):
        with torch.no_grad():
            y = self.block.pair(x, x)[0]
        y = self.block(self.block.pair.linear(self.first(y)))
        return self.last(self.block.pair(y)[1]) + self.block.pair.linear.weight.sum()


class Grandparent(nn.Module):
    def __init__(self):
        super().__init__()
        self.parent, self.last = InnerAround(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.parent(x)
        return self.last(self.parent.block(self.parent.block.pair(x, x)[0]))


class Borrowing(nn.Module):
    """Calls a module that is registered elsewhere, and has a child with a name like its."""

    def __init__(self, other):
        super().__init__()
        vars(self)["other"] = other
        self.block, self.block_pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y, z = self.other(self.block(x), x)
        return self.block_pair(self.block_pair(y * z))


class Elsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.borrowing = Borrowing(self.block.pair)
        self.last = nn.Linear(WIDTH, WIDTH)


class BorrowedAfter(Elsewhere):
    def forward(self, x):
        return self.last(self.borrowing(self.block(x)))


class BorrowedBefore(Elsewhere):
    def forward(self, x):
        return self.last(self.block(self.borrowing(x)))


class BorrowedOnly(Elsewhere):
    def forward(self, x):
        return self.last(self.block.norm(self.borrowing(x)))


KINDS = [
    InnerOnly,
    InnerAfter,
    InnerBefore,
    InnerAround,
    InnerDeep,
    Grandparent,
    BorrowedAfter,
    BorrowedBefore,
    BorrowedOnly,
]


def specs(model):
    """No split, and some at two places: before a module and after another one."""
    names = [name for name, _ in model.named_modules() if name]
    pairs = Random(len(names)).sample([*permutations(names, 2)], 6)
    return [{}, *({first: SplitPoint.BEGINNING, second: SplitPoint.END} for first, second in pairs)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_modules_may_be_called_from_anywhere(kind):
    torch.manual_seed(0)
    model = kind().double()
    batch = numbers(5, 3, WIDTH).double()
    expected = model(batch)
    expected.square().sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    for spec in specs(model):
        pipe = pipeline(copy.deepcopy(model), (X.double(),), split_spec=spec)
        stages = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
        for parameter in (parameter for stage in stages for parameter in stage.parameters()):
            parameter.grad = None
        (output,) = fx.Interpreter(pipe.split_gm).run(batch)
        torch.testing.assert_close(output, expected, msg=f"{spec}: the output differs")
        output.square().sum().backward()
        found = dict.fromkeys(gradients, torch.zeros(()))
        for name, parameter in (named for stage in stages for named in stage.named_parameters()):
            found[name] = found[name] + (0 if parameter.grad is None else parameter.grad)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, msg=f"{spec}: the gradient of {name} differs")
