"""Models whose glue reads tensors as Python values: all that follows may depend on these."""

import re

import pytest
import torch
from torch import nn

import penstock as ps
from models.in_turn import assert_equal
from penstock.errors import SplitError


def rows(seed=0, scale=1.0, count=2):
    return scale * torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def squares(output):
    return (output * output).mean()


class Layers(nn.Module):
    def __init__(self, read=None):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.read = read

    def forward(self, x):
        x = self.layers[0](x)
        factor = self.read(x.detach())
        x = torch.tanh(self.layers[1](x))
        return self.layers[2](x) * factor


class Chooses(Layers):
    """The first layer's output decides what is done with the last one's."""

    def forward(self, x):
        x = self.layers[0](x)
        is_big = bool((x.abs() > 2).any())
        x = torch.tanh(self.layers[1](x))
        x = self.layers[2](x)
        return x * 0.5 if is_big else x


class ChoosesAnArgument(Layers):
    """What a layer gets is computed from two values, and chosen by a third."""

    def forward(self, x):
        first = self.layers[0](x)
        second = self.layers[1](x)
        factor = int((second > 0).sum())
        return self.layers[2]((first + x) * factor) + first


READS = {
    "item": lambda x: x.abs().mean().item(),
    "int": lambda x: int((x > 0).sum()),
    "tolist": lambda x: max(x.flatten().tolist()),
    "numpy": lambda x: float(x.numpy().max()),
    "shape": lambda x: x[x > 0].shape[0],
    "nonzero": lambda x: len((x > 0).nonzero()),
    "equal": lambda x: 1 + torch.equal(x, x.abs()),
}


def build(kind, *args):
    torch.manual_seed(0)
    return kind(*args).double()


@pytest.mark.parametrize("name", READS)
def test_a_number_from_an_earlier_stage(name):
    model = build(Layers, READS[name])
    split = ps.split(model, stages=3, example=((rows(),), {}))
    assert [str(edge) for edge in split.edges] == ["0>1,2 (layers.0)", "1>2 (layers.1)"]
    assert_equal(split, model, [((rows(seed, 3.0),), {}) for seed in range(3)], squares)


@pytest.mark.parametrize("kind", [Chooses, ChoosesAnArgument])
def test_a_decision_by_an_earlier_stage(kind):
    model = build(kind)
    split = ps.split(model, stages=3, example=((rows(scale=0.1),), {}))
    assert_equal(split, model, [((rows(scale=0.1),), {}), ((rows(scale=50.0),), {})], squares)


class ReadsLate(Layers):
    """A stage ends before the number matters, but computes it, too."""

    def forward(self, x):
        first = self.layers[0](x)
        second = self.layers[1](x)
        return self.layers[2](second * int(100 * first.abs().sum()))


def test_a_number_that_a_stage_reads_in_vain():
    model = build(ReadsLate)
    split = ps.split(model, stages=3, example=((rows(),), {}))
    assert_equal(split, model, [((rows(1),), {}), ((rows(2),), {})], squares)


class ReadsInputs(Layers):
    def forward(self, x, mask=None, labels=None):
        if not mask.all():
            x = x * mask
        for layer in self.layers:
            x = layer(x)
        return x - labels if labels.sum() > 0 else x + labels


def test_decisions_by_keyword_inputs_need_no_edge():
    model = build(ReadsInputs)
    given = {"mask": torch.ones(2, 1).bool(), "labels": rows(1).abs()}
    split = ps.split(model, stages=3, example=((rows(),), given))
    assert [str(edge) for edge in split.edges] == ["0>1 (layers.0)", "1>2 (layers.1)"]
    other = {"mask": torch.tensor([[True], [False]]), "labels": -rows(2).abs()}
    assert_equal(split, model, [((rows(),), given), ((rows(3),), other)], squares)


def test_a_decision_by_a_positional_input():
    class Reads(Layers):
        def forward(self, x, factors):
            for layer in self.layers:
                x = layer(x)
            return x * factors.max().item()

    model = build(Reads)
    split = ps.split(model, stages=2, example=((rows(), rows(1)), {}))
    assert "0>1/F (args[1])" in [str(edge) for edge in split.edges]
    assert_equal(split, model, [((rows(2), rows(3)), {})], squares)


class SkipsLayers(Layers):
    def __init__(self, probability):
        super().__init__()
        self.probability = probability

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < self.probability:
                continue
            x = x + layer(x)
        return x


def test_layers_that_are_never_skipped():
    model = build(SkipsLayers, 0.0)
    split = ps.split(model, stages=3, example=((rows(),), {}))
    assert_equal(split, model, [((rows(1),), {})], squares)


def test_layers_that_are_skipped_at_random_are_refused():
    with pytest.raises(SplitError, match=re.escape("draws random numbers that stages 0, 1, 2 need")):
        ps.split(build(SkipsLayers, 1e-9), stages=3, example=((rows(),), {}))


def test_a_decision_by_what_a_layer_has_stored_is_refused():
    class Stores(nn.Linear):
        def forward(self, x):
            self.stored = x * 2
            return super().forward(x)

    class Reads(Layers):
        def __init__(self):
            super().__init__()
            self.layers[0] = Stores(6, 6)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x * self.layers[0].stored.max().item()

    with pytest.raises(SplitError, match="stored instead of returning it") as caught:
        ps.split(build(Reads), stages=3, example=((rows(),), {}))
    assert caught.value.unit == "layers.0"
