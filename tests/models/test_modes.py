"""Splits of models in eval mode, and training them afterwards."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from models.in_turn import Tied, assert_equal
from penstock.errors import SplitError
from penstock.models.self_check import run_stages
from penstock.models.split import Split

IDS = torch.arange(10).view(2, 5)


class Functional(Tied):
    """Its dropout is no module."""

    def forward(self, tokens):
        hidden = functional.dropout(self.embedding(tokens), 0.5, self.training)
        for layer in self.layers:
            hidden = hidden + functional.dropout(layer(hidden), 0.25, self.training)
        return hidden


class SometimesSkipped(nn.Module):
    def forward(self, x):
        return x if not self.training or float(torch.rand(())) < 0.5 else -x


class Skipping(Tied):
    def __init__(self):
        super().__init__()
        self.dropout = SometimesSkipped()


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def mean_square(output):
    return output.pow(2).mean()


BUILDERS = {"module": lambda: Tied(dropout=0.5), "skipped": Skipping}


@pytest.mark.parametrize("layout", [None, [["embedding"], ["layers"]]])
@pytest.mark.parametrize("name", BUILDERS)
def test_dropout_of_a_model_that_was_split_in_eval_mode(name, layout):
    model = build(BUILDERS[name]).eval()
    split = ps.split(model, stages=None if layout else 3, layout=layout, example=((IDS,), {}))
    assert not any(module.training for module in split.model.modules())
    stages = split.stages()
    assert not any(module.training for stage in stages.values() for module in stage.modules())
    assert torch.equal(run_stages(stages, split.edges, (IDS,), {}), model(IDS))
    model.train()
    split.model.train()  # whose mode new stages have
    for seed in range(3):
        assert_equal(split, model, [((IDS,), {}), ((IDS.flip(0),), {})], mean_square, seed=seed)


def test_a_function_drops_once_what_the_next_stage_gets():
    model = build(Functional).eval()
    split = ps.split(model, layout=[["embedding"], ["layers"]], example=((IDS,), {}))
    first, last = (stage.train() for stage in split.stages().values())
    seen = []
    last.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    hidden = first(IDS)
    last(hidden)
    assert torch.equal(seen[0], hidden)
    kept = hidden != 0
    assert 0.3 < float(kept.double().mean()) < 0.7
    torch.testing.assert_close(hidden[kept], 2 * model.embedding(IDS)[kept])


@pytest.mark.parametrize("kind", [*BUILDERS.values(), Functional])
def test_the_split_is_the_same_in_both_modes(kind):
    model = build(kind)
    trained = ps.split(model, stages=3, example=((IDS,), {}))
    assert ps.split(model.eval(), stages=3, example=((IDS,), {})).digest == trained.digest


def test_dropout_that_is_frozen_in_a_training_model():
    model = build(BUILDERS["module"])
    model.dropout.eval()
    split = ps.split(model, layout=[["embedding"], ["layers"]], example=((IDS,), {}))
    assert_equal(split, model, [((IDS,), {})], mean_square)
    model.dropout.train()
    split.model.dropout.train()
    assert_equal(split, model, [((IDS,), {})], mean_square)


def test_an_example_that_the_model_cannot_be_trained_on():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).eval()

    class Plus(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts(x) + 1

    whole, x = Plus().eval(), torch.ones(1, 2)  # one sample has no variance
    split = ps.split(whole, stages=2, example=((x,), {}))
    split = Split.from_json(whole, json.loads(json.dumps(split.to_json())))
    stages = split.stages()
    assert torch.equal(run_stages(stages, split.edges, (x,), {}), whole(x))
    with pytest.raises(SplitError, match="was examined in eval mode"):
        stages[0].train()(x)
    with pytest.raises(SplitError, match=r"the model failed on the example: ValueError"):
        ps.split(Plus().train(), stages=2, example=((x,), {}))
