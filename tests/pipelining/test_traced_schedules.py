"""Traced stages under schedules: outputs, losses and gradients are those of the whole model, in several steps.

With skip connections, an output that several stages use, arguments of the model in later stages, and values without
gradients, on one to four ranks; each rank may hold several stages.
"""

import copy

import pytest
import torch
from torch import nn

from models.tracing.traced_models import WIDTH, numbers
from penstock.pipelining import pipe_split, pipeline
from penstock.pipelining.schedules import get_schedule_class

CPU = torch.device("cpu")
MICROBATCHES = 4
SAMPLES = 2 * MICROBATCHES


class Skips(nn.Module):
    """Four stages; the output of the first goes to all others, that of the second to two; a mask goes along."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, *, scale, shift):
        a = torch.tanh(self.layers[0](x)) * scale
        mask = a > 0
        with torch.no_grad():
            table = torch.cos(x)
        pipe_split()
        b = torch.tanh(self.layers[1](a)) + table
        pipe_split()
        c = torch.where(mask, self.layers[2](b + a), b)
        pipe_split()
        return self.layers[3](c + a * shift) + b * table


class Chain(nn.Module):
    """Four stages, two values from each to the next."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, *, scale, shift):
        y = x * shift
        for number, layer in enumerate(self.layers):
            if number:
                pipe_split()
            x, y = torch.tanh(layer(x)) + y, torch.tanh(x * y)
        return x * scale + y


class Crossed(nn.Module):
    """Two values go from the first stage to all others, which take them in one order or the other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, *, scale, shift):
        x = self.layers[0](x)
        a, b = torch.tanh(x), torch.sin(x * scale)
        pipe_split()
        c = self.layers[1](a) - torch.tanh(b)
        pipe_split()
        d = self.layers[2](torch.exp(b)) + a * c
        pipe_split()
        return self.layers[3](d) * b + shift * a


MODELS = {"skips": Skips, "chain": Chain, "crossed": Crossed}
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def make(name):
    torch.manual_seed(1)
    return MODELS[name]().double()


def batch(seed, samples=SAMPLES):
    x, target, scale, shift = (numbers(seed + each, samples, WIDTH).double() for each in range(4))
    return x, target, {"scale": scale, "shift": shift}


def stages_of(schedule, rank, ranks, stages):
    if schedule in V_SHAPED:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


def train(rank, ranks, schedule, model, *, group):
    """Three steps of an optimizer, with an evaluation between; returns how far they are from the whole model."""
    whole = make(model)
    x, _, kwargs = batch(0, samples=2)
    pipe = pipeline(copy.deepcopy(whole), (x,), kwargs)
    stages = [pipe.build_stage(index, CPU, group) for index in stages_of(schedule, rank, ranks, pipe.num_stages)]
    single = schedule in ("GPipe", "1F1B")
    runs = get_schedule_class(schedule)(stages[0] if single else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    mine = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizers = [torch.optim.AdamW(each, lr=0.1) for each in (whole.parameters(), mine)]
    worst = 0.0

    def compare(found, expected):
        nonlocal worst
        worst = max(worst, float((found - expected).detach().abs().max()))

    for step in range(3):
        x, target, kwargs = batch(10 * step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        output = whole(x, **kwargs)
        loss = nn.functional.mse_loss(output, target)
        loss.backward()
        losses = []
        first = (x,) if 0 in [stage.stage_index for stage in stages] else ()
        found = runs.step(*first, target=target, losses=losses, **kwargs)
        is_last = any(stage.is_last for stage in stages)
        if is_last:
            compare(found, output)
            compare(torch.stack(losses).mean(), loss)
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                compare(parameter.grad, whole.get_parameter(name).grad)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad() if step else torch.inference_mode():
            found = runs.eval(*first, target=target, losses=losses, **kwargs)
            if is_last:
                compare(found, whole(x, **kwargs))
    return worst


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_one_stage_per_rank(workers, schedule, model):
    assert max(workers.run(train, schedule, model, ranks=4)) < 1e-10


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", [*LOOPED, *V_SHAPED])
def test_two_stages_per_rank(workers, schedule, model):
    assert max(workers.run(train, schedule, model, ranks=2)) < 1e-10


@pytest.mark.parametrize("schedule", LOOPED)
def test_all_stages_on_one_rank(workers, schedule):
    assert max(workers.run(train, schedule, "skips", ranks=1)) < 1e-10


def train_observed(rank, ranks, schedule, *, group):
    """While a profiler looks on, every message is posted by operations."""
    with torch.autograd.profiler.profile():
        return train(rank, ranks, schedule, "skips", group=group)


@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 4), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_messages_as_operations(workers, schedule, ranks):
    assert max(workers.run(train_observed, schedule, ranks=ranks)) < 1e-10


class Tied(nn.Module):
    """One matrix in three stages; one of a root in two."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.layers[2].weight = self.layers[3].weight = self.layers[0].weight
        self.gain = nn.Parameter(numbers(3, WIDTH))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number:
                pipe_split()
            x = torch.tanh(layer(x))
            if number in (0, 3):
                x = x * self.gain
        return x


def train_tied(rank, ranks, schedule, *, group):
    torch.manual_seed(1)
    whole = Tied().double()
    pipe = pipeline(copy.deepcopy(whole), (batch(0, samples=2)[0],))
    stages = [pipe.build_stage(index, CPU, group) for index in stages_of(schedule, rank, ranks, 4)]
    runs = get_schedule_class(schedule)(
        stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    mine = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizers = [torch.optim.AdamW(each, lr=0.1) for each in (whole.parameters(), mine)]
    for step in range(3):
        x, target, _ = batch(10 * step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(whole(x), target).backward()
        runs.step(*([x] if stages[0].is_first else []), target=target)
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=0, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    return {name: value.detach() for stage in stages for name, value in stage.submod.named_parameters()}


@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 4), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_copies_of_a_parameter_stay_equal(workers, schedule, ranks):
    found = {}
    for named in workers.run(train_tied, schedule, ranks=ranks):
        for name, value in named.items():
            assert torch.equal(found.setdefault(name, value), value)
    assert torch.equal(found["layers.0.weight"], found["layers.3.weight"])
    assert set(found) == {"gain", *(f"layers.{number}.weight" for number in range(4))}
