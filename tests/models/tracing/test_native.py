"""A Pipe in place of stages: the runtime declares its edges and ties, and returns what the unsplit model returns."""

import copy

import pytest
import torch
from torch import nn

import penstock as ps
from models.tracing.traced_models import WIDTH, Chain, X, numbers
from penstock.errors import SplitError
from penstock.execution.ties import Tie
from penstock.ir.edges import Edge, chain
from penstock.pipelining import pipe_split, pipeline
from penstock.runtime import Pipeline, run_in_threads

MICROBATCHES = 4
SAMPLES = 2 * MICROBATCHES


class Model(nn.Module):
    """Four stages with skips, a tied embedding, keyword arguments in several stages, outputs of several stages."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, *, scale=None, shift=None):
        a = torch.tanh(self.layers[0](self.embed(ids))) * scale
        pipe_split()
        b = torch.tanh(self.layers[1](a))
        pipe_split()
        c = self.layers[2](b * a)
        pipe_split()
        return {"logits": self.head(c + shift + a), "hidden": [b, c]}


def loss_fn(output, target):
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten()) + output["hidden"][0].mean()


def batch(seed, samples=SAMPLES):
    generator = torch.Generator().manual_seed(seed)
    ids, target = torch.randint(0, 11, (2, samples, 3), generator=generator)
    return ids, target, {name: numbers(seed, samples, 3, WIDTH).double() for name in ("scale", "shift")}


def traced():
    torch.manual_seed(3)
    model = Model().double()
    ids, _, kwargs = batch(0, samples=2)
    return copy.deepcopy(model), pipeline(model, (ids,), kwargs)


def test_edges_and_ties_are_those_of_the_model():
    _, pipe = traced()
    assert [str(edge._replace(value="")) for edge in pipe.edges] == ["0>1,2,3", "1>2,3", "2>3"]
    assert pipe.ties == (Tie(((0, "embed.weight"), (3, "head.weight"))),)
    assert pipe.layout == (("embed", "layers.0"), ("layers.1",), ("layers.2",), ("head",))
    assert pipe.digest == traced()[1].digest
    assert [edge._replace(value="") for edge in pipeline(Chain(pipe_split), (X,)).edges] == list(chain(3))
    assert all(isinstance(edge, Edge) for edge in pipe.edges)


SCHEDULES = {"1F1B": 4, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}


@pytest.mark.parametrize("name", SCHEDULES)
def test_training_is_that_of_the_unsplit_model(name):
    whole, pipe = traced()
    schedule = ps.build(name, ranks=SCHEDULES[name], microbatches=MICROBATCHES)
    batches = [batch(10 * step) for step in range(3)]
    expected = []
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    for ids, target, kwargs in batches:
        optimizer.zero_grad()
        output = whole(ids, **kwargs)
        parts = zip(*[each.chunk(MICROBATCHES) for each in (ids, target, *kwargs.values())], strict=True)
        loss = torch.stack([loss_fn(whole(i, scale=s, shift=h), t) for i, t, s, h in parts]).mean()
        loss.backward()
        optimizer.step()
        expected.append((output, loss))

    def train(transport):
        parts = copy.deepcopy(pipe)
        found = []
        with Pipeline(parts, schedule, loss_fn=loss_fn, transport=transport) as runs:
            parameters = {id(one): one for stage in runs.stages.values() for one in stage.module.parameters()}
            optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
            for ids, target, kwargs in batches:
                optimizer.zero_grad()
                losses = []
                output = runs.step(ids, target=target, losses=losses, **kwargs)
                optimizer.step()
                if output is not None:
                    found.append((output, torch.stack(losses).mean()))
            named = {n: one.detach() for stage in runs.stages.values() for n, one in stage.module.named_parameters()}
        return found, named

    ranks = run_in_threads(train, schedule.ranks)
    (found,) = [found for found, _ in ranks if found]
    for (output, loss), (wanted, of_whole) in zip(found, expected, strict=True):
        torch.testing.assert_close(loss, of_whole, rtol=0, atol=1e-10)
        torch.testing.assert_close(output, wanted, rtol=0, atol=1e-10)
    seen = set()
    for _, named in ranks:
        for key, value in named.items():
            torch.testing.assert_close(value, whole.get_parameter(key).detach(), rtol=0, atol=1e-10)
            seen.add(key)
    assert {key for key, _ in whole.named_parameters()} <= seen


def test_an_argument_that_the_last_stage_does_not_take_cannot_be_returned():
    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.first(x)
            pipe_split()
            return self.second(y), x

    pipe = pipeline(Returning(), (X,))
    schedule = ps.build("1F1B", ranks=2, microbatches=2)
    with pytest.raises(SplitError, match="returns its argument 'x'"):
        pipe.stages(rank=1, placement=schedule.placement)


def test_nothing_goes_back_for_what_can_have_no_gradient():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            with torch.no_grad():
                table = torch.cos(self.first(x))
                with torch.enable_grad():
                    trained = self.first(x)
            fixed, mask = (x * 2).detach(), x > 0
            pipe_split()
            return torch.where(mask, self.second(trained * table), fixed)

    pipe = pipeline(Rotary(), (X,))
    outputs = pipe.get_stage_module(0)(X)
    assert len(outputs) == 4
    assert [edge.gradient for edge in pipe.edges] == [output.requires_grad for output in outputs]
    assert sum(edge.gradient for edge in pipe.edges) == 1
