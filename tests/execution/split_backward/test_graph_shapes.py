"""I and W of graphs that differ from microbatch to microbatch."""

import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge

from execution.split_backward.halves import (
    equal,
    first_half,
    gradients,
    leaf,
    seeds_of,
    splitter,
    whole,
    x_of,
)
from penstock.execution.split_backward.split import WeightBackward


class Dynamic(nn.Module):
    """What it does depends on the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.shared = nn.Linear(4, 4)
        self.form = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form < 3:  # equal in form, with other parameters
            return x + self.experts[self.form](self.norm(x))
        if self.form == 3:
            return self.shared(self.shared(x))
        if self.form == 4:  # as the one before, without sharing
            return self.shared(nn.functional.linear(x, self.experts[0][0].weight[:4], self.norm.bias))
        if self.form == 5:
            return torch.cat([x @ self.shared.weight, x])[:5] * torch.stack([self.norm.weight]).prod(0)
        if self.form == 6:
            return torch.cat([x @ self.shared.weight])[:5] * torch.stack([self.norm.weight, self.norm.bias]).prod(0)
        return torch.stack([self.experts[index](x) for index in range(self.form % 3)] + [x]).sum(0)


@settings(max_examples=60, deadline=None)
@given(
    forms=st.lists(st.integers(0, 8), min_size=1, max_size=12),
    choices=st.lists(st.integers(0, 11), min_size=24, max_size=24),
)
def test_microbatches_in_any_order(forms: list[int], choices: list[int]) -> None:
    """Forwards first; then I and W of any, W after its I; and more forms than are remembered."""
    torch.manual_seed(0)
    module, split = Dynamic(), splitter()
    other = copy.deepcopy(module)
    flights: dict[int, Any] = {}
    for number, form in enumerate(forms):
        module.form = form
        x = leaf(x_of(5, 4, seed=number))
        flights[number] = x, module(x)
    waiting: dict[int, WeightBackward] = {}
    found: dict[int, Any] = {}
    for choice in choices + [0] * 24:
        if flights and (choice % 2 == 0 or not waiting):
            number = sorted(flights)[choice % len(flights)]
            x, y = flights.pop(number)
            found[number], waiting[number] = split.input_backward([get_gradient_edge(y)], seeds_of([y]), [x])
        elif waiting:
            waiting.pop(sorted(waiting)[choice % len(waiting)])()
    assert not flights
    assert not waiting
    for number, form in enumerate(forms):
        other.form = form
        equal(found[number], whole(other, [x_of(5, 4, seed=number)]))
    equal(gradients(module), gradients(other), 1e-10)


def test_a_form_is_not_mistaken_for_another() -> None:
    module = Dynamic()
    other = copy.deepcopy(module)
    split = splitter()
    for number in range(30):
        module.form = other.form = number * 4 % 9
        found, weights = first_half(split, module, [x_of(5, 4, seed=number)])
        weights()
        equal(found, whole(other, [x_of(5, 4, seed=number)]))
        equal(gradients(module), gradients(other))
