"""Documented uses of tracing, by the same program with both packages: outputs, losses and gradients are equal.

And they are those of the whole model.
"""

import importlib
import warnings

import pytest
import torch
from torch import nn

from models.tracing.traced_models import WIDTH, numbers

OURS, THEIRS = "penstock.pipelining", "torch.distributed.pipelining"
CPU = torch.device("cpu")
MICROBATCHES = 4
SAMPLES = 2 * MICROBATCHES


class Model(nn.Module):
    """Integers come in, and a keyword argument; torch's stages take those of the first stage only."""

    def __init__(self, stages, split):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))
        self.split = split

    def forward(self, ids, *, scale=None):
        x = self.embed(ids)
        if scale is not None:
            x = x * scale
        for number, layer in enumerate(self.layers):
            if number:
                self.split()
            x = torch.tanh(layer(x))
        return x


def batch(seed, samples=SAMPLES):
    ids = torch.randint(0, 11, (samples, 3), generator=torch.Generator().manual_seed(seed))
    return ids, numbers(seed + 1, samples, 3, WIDTH).double()


class Setting:
    """A rank, a package, and the stages of a model."""

    def __init__(self, rank, ranks, package, schedule, group, *, kwargs=(), **options):
        self.rank, self.pp = rank, importlib.import_module(package)
        several = schedule not in ("GPipe", "1F1B")
        count = 2 * ranks if several else ranks
        torch.manual_seed(2)
        self.whole = Model(count, lambda: None).double()
        model = Model(count, self.pp.pipe_split).double()
        model.load_state_dict(self.whole.state_dict())
        example, _ = batch(0, samples=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, of another part of it
            given = {name: numbers(5, 2, 3, WIDTH).double() for name in kwargs}
            self.pipe = self.pp.pipeline(model, (example,), given)
        assert self.pipe.num_stages == count
        self.stages = [self.pipe.build_stage(index, CPU, group) for index in range(rank, count, ranks)]
        kind = self.pp.schedules.get_schedule_class(schedule)
        options.setdefault("loss_fn", nn.functional.mse_loss)
        self.schedule = kind(self.stages if several else self.stages[0], MICROBATCHES, **options)
        self.first = (lambda x: (x,)) if rank == 0 else (lambda x: ())
        self.is_last = any(stage.is_last for stage in self.stages)

    def gradients(self):
        return {
            name: None if parameter.grad is None else parameter.grad.clone()
            for stage in self.stages
            for name, parameter in stage.submod.named_parameters()
        }

    def check(self, output=None, *, ids, target, **kwargs):
        """Compare with the whole model."""
        expected = self.whole(ids, **kwargs)
        nn.functional.mse_loss(expected, target).backward()
        if output is not None:
            torch.testing.assert_close(output, expected)
        for name, gradient in self.gradients().items():
            torch.testing.assert_close(gradient, self.whole.get_parameter(name).grad)


def training(setting):
    ids, target = batch(1)
    losses = []
    output = setting.schedule.step(*setting.first(ids), target=target, losses=losses)
    setting.check(output, ids=ids, target=target)
    return output, losses, setting.gradients()


def iterations(setting):
    """Three steps of an optimizer."""
    parameters = [parameter for stage in setting.stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for seed in range(3):
        ids, target = batch(seed)
        optimizer.zero_grad()
        found.append(setting.schedule.step(*setting.first(ids), target=target))
        optimizer.step()
    return found, [parameter.detach() for parameter in parameters]


def evaluation(setting):
    ids, target = batch(1)
    losses = []
    with torch.no_grad():
        output = setting.schedule.eval(*setting.first(ids), target=target, losses=losses)
    assert all(gradient is None for gradient in setting.gradients().values())
    return output, losses


def inference(setting):
    ids, _ = batch(1)
    with torch.inference_mode():
        output = setting.schedule.eval(*setting.first(ids), target=batch(1)[1])
    if setting.is_last:
        torch.testing.assert_close(output.clone(), setting.whole(ids).detach())
    return output if output is None else output.clone()


def evaluation_then_training(setting):
    return evaluation(setting), training(setting)


def without_outputs(setting):
    ids, target = batch(1)
    losses = []
    output = setting.schedule.step(*setting.first(ids), target=target, losses=losses, return_outputs=False)
    assert output is None
    return losses, setting.gradients()


def keywords(setting):
    """Each rank is passed what its stages take."""
    ids, target = batch(1)
    scale = numbers(6, SAMPLES, 3, WIDTH).double()
    output = setting.schedule.step(*setting.first(ids), target=target, **({} if setting.rank else {"scale": scale}))
    setting.check(output, ids=ids, target=target, scale=scale)
    return output, setting.gradients()


def chunk_specs(setting):
    """A keyword argument that is replicated, and outputs that are merged along the first dimension."""
    ids, target = batch(1)
    scale = numbers(6, 2, 3, WIDTH).double()
    output = setting.schedule.step(*setting.first(ids), target=target, **({} if setting.rank else {"scale": scale}))
    setting.check(output, ids=ids, target=target, scale=scale.repeat(MICROBATCHES, 1, 1))
    return output, setting.gradients()


def options_of(scenario, package, rank):
    microbatch = importlib.import_module(f"{package}.microbatch")
    if scenario is keywords:
        return {"kwargs": ("scale",)}
    if scenario is not chunk_specs:
        return {}
    along = microbatch.TensorChunkSpec(0)
    of_inputs = {} if rank else {"args_chunk_spec": (along,), "kwargs_chunk_spec": {"scale": microbatch._Replicate()}}
    return {"kwargs": ("scale",), "output_merge_spec": along, **of_inputs}


def run(rank, ranks, package, scenario, schedule, *, group):
    return scenario(Setting(rank, ranks, package, schedule, group, **options_of(scenario, package, rank)))


EVERYWHERE = (training, iterations, evaluation, without_outputs)
CASES = [
    *[(scenario, schedule) for schedule in ("GPipe", "1F1B", "Interleaved1F1B") for scenario in EVERYWHERE],
    *[(scenario, "1F1B") for scenario in (inference, evaluation_then_training, keywords, chunk_specs)],
    (keywords, "GPipe"),
]


@pytest.mark.parametrize(("scenario", "schedule"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_both_packages_train_traced_models_alike(workers, scenario, schedule):
    found = [workers.run(run, package, scenario, schedule, ranks=2) for package in (OURS, THEIRS)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-14)
