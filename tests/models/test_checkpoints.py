"""Activation checkpoints that a parent puts around several layers."""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from models.in_turn import assert_equal
from penstock.errors import SplitError


def rows(seed=0):
    return torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def __init__(self, has_tail=False):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.has_tail = has_tail

    def forward(self, x):
        x = self.layers[1](torch.tanh(self.layers[0](x)))
        return torch.tanh(x) if self.has_tail else x


class Blocks(nn.Module):
    def __init__(self, has_tail=False, is_reentrant=False):
        super().__init__()
        self.blocks = nn.ModuleDict({"first": Block(has_tail), "second": Block(has_tail)})
        self.is_reentrant = is_reentrant

    def forward(self, x):
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x


def names(*stages):
    return [[f"blocks.{name[0]}.layers.{name[1]}" for name in stage] for stage in stages]


FIRST = [("first", 0), ("first", 1)]
SECOND = [("second", 0), ("second", 1)]


def split(layout, **kwargs):
    torch.manual_seed(0)
    model = Blocks(**kwargs).double()
    return model, ps.split(model, layout=layout, example=((rows(),), {}))


def test_a_checkpoint_on_one_stage():
    model, parts = split(names(FIRST, SECOND))
    assert_equal(parts, model, [((rows(1),), {}), ((rows(2),), {})], lambda output: (output * output).mean())


REFUSED = {
    "several stages": (
        names(FIRST[:1], FIRST[1:] + SECOND),
        {},
        "one checkpoint is around 'blocks.first.layers.0' on stage 0 and 'blocks.first.layers.1' on stage 1",
        "blocks.first.layers.0",
    ),
    "more in the checkpoint": (
        names(FIRST, SECOND),
        {"has_tail": True},
        "'blocks.first.layers.1' is sent to another stage, but more is computed from it in the checkpoint",
        "blocks.first.layers.1",
    ),
    "reentrant": (
        names(FIRST, SECOND),
        {"is_reentrant": True},
        "'blocks.first.layers.0' is called in a reentrant checkpoint",
        "blocks.first.layers.0",
    ),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    layout, options, message, unit = REFUSED[case]
    with pytest.raises(SplitError, match=re.escape(message)) as caught:
        split(layout, **options)
    assert caught.value.unit == unit
