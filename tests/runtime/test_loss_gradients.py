"""What the backward of a loss begins with belongs to its microbatch."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime import Pipeline


class Doubled(torch.autograd.Function):
    """Modifies its gradient in place, as only the last node of a graph can do without harm."""

    @staticmethod
    def forward(_context, x):
        return x.clone()

    @staticmethod
    def backward(_context, gradient):
        return gradient.mul_(2)


def by_function(output, _target):
    return Doubled.apply(output.sum())


def by_hook(output, _target):
    loss = output.sum()
    loss.register_hook(lambda gradient: gradient.mul_(2))
    return loss


@pytest.mark.parametrize("loss_fn", [by_function, by_hook])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
def test_a_loss_that_modifies_its_gradient_in_place(loss_fn, name):
    layer = nn.Linear(1, 1, bias=False)
    schedule = ps.build(name, ranks=1, microbatches=3)
    pipe = Pipeline({0: layer}, schedule, loss_fn=loss_fn, loss_reduction="sum")
    pipe.step(torch.ones(3, 1), target=torch.zeros(3, 1))
    assert layer.weight.grad.item() == 2 + 2 + 2
