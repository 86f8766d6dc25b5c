"""Models that do what is hard to split: views, in-place code, statistics, closures, checkpoints, frozen parts."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import penstock as ps
from models.in_turn import assert_complete, assert_equal
from penstock.errors import SplitError
from penstock.models.self_check import run_stages


def rows(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def squares(output):
    return sum((one * one).mean() for one in tree_leaves(output) if one.is_floating_point())


class Layers(nn.Module):
    def __init__(self, count=4, width=4):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])


class CallsForward(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer.forward(x))
        return x


class InPlaceGlue(Layers):
    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x += layer(x.clone())
            x.mul_(0.5)
        return x


class InPlaceUnits(nn.Sequential):
    """A subclass with a forward of its own, so that it is probed."""

    def __init__(self):
        super().__init__(
            nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)
        )

    def forward(self, x):
        return super().forward(x) + 1


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(
            nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Linear(6, 4), nn.Identity()
        )
        self.end = nn.Linear(4, 2)

    def forward(self, x):
        return self.end(self.parts(x) + x)


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(4, affine=number > 0) for number in range(3)])

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(layer(x))
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([nn.LSTM(4, 4, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(4, 9)

    def forward(self, ids):
        x, states = self.embed(ids), []
        for layer in self.layers:
            more, (hidden, _) = layer(x)
            x = x + more
            states.append(hidden)
        return self.head(x), torch.cat(states).mean()


class Nested(nn.Module):
    """Lists in lists, a dictionary, and a bare module as a namespace."""

    def __init__(self):
        super().__init__()
        self.downs = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]) for _ in range(2)])
        self.middle = nn.Module()
        self.middle.block = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"left": nn.Linear(4, 2), "right": nn.Linear(4, 3)})

    def forward(self, x):
        for linear, norm in self.downs:
            x = norm(linear(x)) + x
        x = self.middle.block(x)
        return {name: head(x) for name, head in self.heads.items()}


class AttributeOfALayer(Layers):
    """The parent leaves a value on a layer, which is not an argument."""

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.bonus

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(4, 4) for _ in range(4)])

    def forward(self, x):
        bonus = x
        for layer in self.layers:
            layer.bonus = bonus
            x = layer(x)
            bonus = x if bonus is not None and layer is self.layers[0] else bonus
        for layer in self.layers:
            layer.bonus = None
        return x


class CheckpointedByTheParent(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) + x
        return x


class ReadsAView(Layers):
    """A unit gets a part of a stream that goes on as a whole."""

    def forward(self, x):
        x = x + self.layers[0](x)
        x = x * 2 + self.layers[1](x)
        first = self.layers[2](x[:1])
        return self.layers[3](x) + first


class PassesThrough(Layers):
    class Layer(nn.Linear):
        def forward(self, x, memory, *, mask=None):
            return super().forward(x) * (1 if mask is None else mask), memory

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(4, 4) for _ in range(4)])

    def forward(self, x, mask=None):
        memory = {"first": x * 3}
        for layer in self.layers:
            x, memory = layer(x, memory, mask=mask)
        return x + memory["first"]


class Integers(Layers):
    """A unit returns indices that a later stage uses."""

    class Chooser(nn.Linear):
        def forward(self, x):
            scores = super().forward(x)
            return scores, scores.argmax(-1)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Chooser(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        x, chosen = self.layers[0](x)
        for layer in self.layers[1:]:
            x = x + layer(x)
        return x.gather(1, chosen[:, None])


class SharedInside(nn.Module):
    """One module is part of several units, and a unit itself."""

    def __init__(self):
        super().__init__()
        self.common = nn.Linear(4, 4)
        self.layers = nn.ModuleList([self.Layer(self.common) for _ in range(3)])

    class Layer(nn.Module):
        def __init__(self, common):
            super().__init__()
            self.own, self.common = nn.Linear(4, 4), common

        def forward(self, x):
            return self.own(self.common(x).tanh())

    def forward(self, x):
        x = self.common(x)
        for layer in self.layers:
            x = layer(x)
        return x


MODELS = {
    kind.__name__: (kind, ((rows(3, 4),), {}))
    for kind in (
        CallsForward,
        InPlaceGlue,
        InPlaceUnits,
        Views,
        Statistics,
        Nested,
        AttributeOfALayer,
        CheckpointedByTheParent,
        ReadsAView,
        PassesThrough,
        Integers,
        SharedInside,
    )
} | {"Recurrent": (Recurrent, ((torch.tensor([[1, 2, 3], [4, 5, 6]]),), {}))}


def build(name):
    torch.manual_seed(0)
    kind, example = MODELS[name]
    return kind().double(), example


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_unsplit_model(name, stages):
    model, example = build(name)
    split = ps.split(model, stages=stages, example=example)
    assert_complete(split, model)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    longer = (tuple(torch.cat([one, one.flip(0)]) for one in example[0]), example[1])
    assert_equal(split, model, [example, longer], squares)
    for key, value in model.named_buffers():  # two training runs have changed them, each in the same way
        assert not value.is_floating_point() or not torch.equal(value, buffers[key])


def test_a_mask_that_the_probe_has_seen():
    model, example = build("PassesThrough")
    split = ps.split(model, stages=3, example=(example[0], {"mask": rows(3, 1)}))
    assert_equal(split, model, [((rows(5, 4),), {"mask": rows(5, 1, seed=4)})], squares)


def test_statistics_are_those_of_the_unsplit_model():
    model, example = build("Statistics")
    twin, _ = build("Statistics")
    stages = ps.split(model, stages=3, example=example)
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), twin.buffers(), strict=True))
    run_stages(stages.stages(), stages.edges, *example)
    twin(*example[0])
    for (name, one), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other), name
    held = [set(stage.state_dict()) for stage in stages.stages().values()]
    assert sorted(name for names in held for name in names) == sorted(model.state_dict())


def test_frozen_parts_send_no_gradient_back():
    model, example = build("CallsForward")
    model.layers[0].requires_grad_(False)
    split = ps.split(model, layout=[["layers.0"], ["layers.1"], ["layers.2", "layers.3"]], example=example)
    assert [edge.gradient for edge in split.edges] == [False, True]
    assert_equal(split, model, [example], squares)
    model.layers[0].requires_grad_(True)
    with pytest.raises(SplitError, match=r"layers\.0 requires a gradient now, but did not in the probe"):
        split.stages()[0](*example[0])


@pytest.mark.parametrize("name", ["InPlaceGlue", "InPlaceUnits", "CheckpointedByTheParent"])
def test_inference_mode(name):
    model, example = build(name)
    split = ps.split(model, stages=3, example=example)
    with torch.inference_mode():
        assert torch.equal(run_stages(split.stages(), split.edges, *example), model(*example[0]))


def test_autocast():
    torch.manual_seed(0)
    whole = CallsForward().float()
    split = ps.split(whole, stages=2, example=((torch.ones(2, 4),), {}))
    first, last = split.stages().values()
    x = rows(3, 4).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = whole(x)
        assert torch.equal(last(first(x)), expected)


def test_a_stage_in_eval_mode():
    model, example = build("Statistics")
    stages = ps.split(model, stages=2, example=example).stages()
    model.eval()
    for stage in stages.values():
        stage.eval()
    edges = ps.split(model, stages=2, example=example).edges
    assert torch.equal(run_stages(stages, edges, *example), model(*example[0]))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_frozen_norm_stays_in_eval_mode(dropout):
    model, example = build("Statistics")
    model.layers[0] = nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout)).double()
    model.norms[1].eval()
    split = ps.split(model, stages=3, example=example)
    modes = {name: module.training for name, module in model.named_modules()}
    for stage in split.stages().values():
        assert {name: module.training for name, module in stage.named_modules()} == modes
    assert [name for name, is_training in modes.items() if not is_training] == ["norms.1"]
    assert_equal(split, model, [example], squares)
