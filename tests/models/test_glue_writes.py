"""Models whose glue writes to buffers: refused, since it runs on every stage."""

import re

import pytest
import torch
from torch import nn

import penstock as ps
from models.in_turn import assert_equal
from penstock.errors import SplitError


def rows(seed=0):
    return torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.ones(6))
        self.register_buffer("table", torch.zeros(6), persistent=False)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1:
                self.observe(x.detach())
        return x

    def observe(self, x):
        raise NotImplementedError


class Counts(Layers):
    def observe(self, x):
        self.steps += 1


class Replaces(Layers):
    def observe(self, x):
        self.steps = self.steps + 1


class Averages(Layers):
    def observe(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))


class ReplacesByAValue(Layers):
    def observe(self, x):
        self.table = x.mean(0)


class Buried(Layers):
    """The counter is in a part that has a forward of its own."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.counter = Counts()

        def forward(self, x):
            return self.counter(x)

    def __init__(self):
        super().__init__()
        self.part = self.Part()

    def forward(self, x):
        return self.part(x) + self.layers[0](x)


class WritesToALayer(Layers):
    def __init__(self):
        super().__init__()
        self.layers[0].register_buffer("calls", torch.zeros(()))

    def observe(self, x):
        self.layers[0].calls.add_(1)


class LayerWrites(Layers):
    """A layer writes to a buffer of its parent."""

    class Layer(nn.Linear):
        def forward(self, x):
            self.parent[0].mean[0].add_(1)
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.layers[1] = self.Layer(6, 6)
        self.layers[1].parent = [self]

    def observe(self, x):
        pass


class Normed(Layers):
    """A hook in front of the layer changes its buffers."""

    def __init__(self):
        super().__init__()
        self.layers[1] = nn.utils.spectral_norm(nn.Linear(6, 6))

    def observe(self, x):
        pass


REFUSED = {
    Counts: ("writes to steps of the model", "steps"),
    Replaces: ("replaces steps of the model", "steps"),
    Averages: ("writes to mean of the model", "mean"),
    ReplacesByAValue: ("replaces table of the model", "table"),
    Buried: ("writes to steps of part.counter", "part.counter.steps"),
    WritesToALayer: ("writes to calls of layers.0", "layers.0.calls"),
    LayerWrites: ("writes to mean of the model", "mean"),
    Normed: ("writes to weight_v of layers.1", "layers.1.weight_v"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind):
    message, unit = REFUSED[kind]
    model = kind().double()
    before = {name: value.clone() for name, value in model.named_buffers()}
    with pytest.raises(SplitError, match=re.escape(message)) as caught:
        ps.split(model, stages=3, example=((rows(),), {}))
    assert caught.value.unit == unit
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_a_parametrization_is_part_of_its_layer():
    class Normed(Layers):
        def observe(self, x):
            pass

    torch.manual_seed(0)
    model = Normed().double()
    nn.utils.parametrizations.spectral_norm(model.layers[1])
    split = ps.split(model, stages=3, example=((rows(),), {}))
    owners = [number for number, stage in split.stages().items() for name in stage.state_dict() if name.endswith("_u")]
    assert owners == [1]
    model.eval()
    split.model.eval()
    assert_equal(split, model, [((rows(2),), {})], lambda output: (output * output).mean())


def test_a_table_that_every_stage_can_compute():
    class Tables(Layers):
        def forward(self, x, scale=None):
            self.table = torch.arange(6.0) * scale
            for layer in self.layers:
                x = torch.tanh(layer(x)) + self.table
            return x

    torch.manual_seed(0)
    model = Tables().double()
    split = ps.split(model, stages=3, example=((rows(),), {"scale": rows(1)}))
    assert_equal(split, model, [((rows(2),), {"scale": rows(3)})], lambda output: (output * output).mean())
