"""A GradScaler on every rank: the same scale, the same steps left out; and losses on every rank."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock as ps
from penstock.errors import StageError, StepError
from penstock.runtime import Pipeline, run_in_threads

WIDTH = 4


def model():
    torch.manual_seed(8)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]).double()


def batch():
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(6, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)]


def scaler(**settings):
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, **settings)


def pipeline(split, transport, **settings):
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=3)
    stages = {stage: split[stage] for stage in schedule.placement.stages_of(transport.rank)}
    return Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss, transport=transport, **settings)


def arguments(pipe, x, y):
    return ([x] if pipe.has_first else []), {"target": y if pipe.has_last else None}


def parameters(pipe):
    return [parameter for stage in pipe.stages.values() for parameter in stage.module.parameters()]


def test_unscaled_gradients_and_losses_of_the_unsplit_model():
    x, y = batch()
    whole, split = model(), model()
    nn.functional.mse_loss(whole(x), y).backward()
    expected = [nn.functional.mse_loss(*both) for both in zip(whole(x).chunk(3), y.chunk(3), strict=True)]

    def run(transport):
        mine = scaler()
        pipe = pipeline(split, transport, scaler=mine, share_losses=True)
        optimizer = torch.optim.SGD(parameters(pipe), lr=0.1)
        losses = []
        args, named = arguments(pipe, x, y)
        pipe.step(*args, losses=losses, **named)
        for stage in pipe.stages:
            torch.testing.assert_close(split[stage][0].weight.grad, 1024 * whole[stage][0].weight.grad)
        torch.testing.assert_close(losses, [loss.detach() for loss in expected])
        mine.unscale_(optimizer)
        mine.step(optimizer)
        mine.update()
        return mine.get_scale()

    run_in_threads(run, 2)
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(ours, theirs - 0.1 * theirs.grad, rtol=0, atol=1e-12)


class Overflow(torch.autograd.Function):
    """Passes on what it gets; where asked to, the gradient of the bias is not finite."""

    @staticmethod
    def forward(ctx, x, bias, flags):
        ctx.flags = flags
        return x + bias

    @staticmethod
    def backward(ctx, gradient):
        found = gradient.sum(0)
        return gradient, found * (math.inf if ctx.flags["now"] else 1.0), None


class Sometimes(nn.Module):
    def __init__(self, flags):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.flags = flags

    def forward(self, x):
        return Overflow.apply(x, self.bias, self.flags)


@pytest.mark.parametrize("place", range(4))
def test_an_overflow_on_one_rank_is_one_on_all(place):
    """Steps: fine, overflow in one stage, fine, fine: the scale halves on all ranks, then grows on all."""
    x, y = batch()
    flags = {"now": False}
    split = model()
    split[place].append(Sometimes(flags))

    def run(transport):
        mine = scaler()
        pipe = pipeline(split, transport, scaler=mine)
        optimizer = torch.optim.SGD(parameters(pipe), lr=0.01)
        scales, moved = [], []
        for overflow in (False, True, False, False):
            transport.exchange(b"")
            flags["now"] = overflow
            transport.exchange(b"")
            args, named = arguments(pipe, x, y)
            optimizer.zero_grad()
            pipe.step(*args, **named)
            before = [parameter.detach().clone() for parameter in parameters(pipe)]
            mine.step(optimizer)
            mine.update()
            moved.append(any(not one.equal(other) for one, other in zip(before, parameters(pipe), strict=True)))
            scales.append(mine.get_scale())
        return scales, moved

    expected = ([1024.0, 512.0, 512.0, 1024.0], [True, False, True, True])
    assert run_in_threads(run, 2) == [expected, expected]


class Image(nn.Module):
    """A convolution whose weight, and gradient, have their channels last."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.layer = nn.Conv2d(2, 2, 2, bias=False).double().to(memory_format=torch.channels_last)

    def forward(self, x):
        image = x.reshape(len(x), 1, 2, 2).expand(-1, 2, -1, -1)
        return x + self.layer(image).sum((1, 2, 3))[:, None] + self.empty.sum()


def test_an_overflow_elsewhere_where_gradients_have_their_channels_last():
    x, y = batch()
    flags = {"now": True}
    schedule = ps.build("1F1B", ranks=2, microbatches=3)
    stages = [Image(), Sometimes(flags)]

    def run(transport):
        mine = scaler()
        pipe = Pipeline(
            {transport.rank: stages[transport.rank]},
            schedule,
            loss_fn=nn.functional.mse_loss,
            transport=transport,
            scaler=mine,
        )
        optimizer = torch.optim.SGD(parameters(pipe), lr=0.1)
        args, named = arguments(pipe, x, y)
        pipe.step(*args, **named)
        mine.step(optimizer)
        mine.update()
        return mine.get_scale()

    # The overflow is of the last stage's bias alone: what goes back to the first one is finite.
    assert run_in_threads(run, 2) == [512.0, 512.0]
    assert not stages[0].layer.weight.grad.is_contiguous()


def test_a_scaler_that_is_switched_off():
    x, y = batch()
    whole, split = model(), model()
    nn.functional.mse_loss(whole(x), y).backward()

    def run(transport):
        pipe = pipeline(split, transport, scaler=scaler(enabled=False))
        args, named = arguments(pipe, x, y)
        pipe.step(*args, **named)

    run_in_threads(run, 2)
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_scales_that_differ():
    x, y = batch()
    split = model()

    def run(transport):
        pipe = pipeline(split, transport, scaler=torch.amp.GradScaler("cpu", init_scale=2.0 + transport.rank))
        args, named = arguments(pipe, x, y)
        with pytest.raises((StageError, StepError), match="equal scalers"):
            pipe.step(*args, **named)

    run_in_threads(run, 2)


@pytest.mark.parametrize("settings", [{"scaler": scaler()}, {"share_losses": True}], ids=["scaler", "share_losses"])
def test_a_setting_of_one_rank_only(settings):
    split = model()

    def run(transport):
        with pytest.raises(StageError, match=f"was given a different {next(iter(settings))} from"):
            pipeline(split, transport, **settings if transport.rank else {})

    run_in_threads(run, 2)


def test_what_is_no_scaler():
    with pytest.raises(StageError, match="GradScaler"):
        run_in_threads(lambda transport: pipeline(model(), transport, scaler=1024), 2)


def test_losses_of_evaluations_on_every_rank():
    x, y = batch()
    split = model()
    expected = [nn.functional.mse_loss(*both).item() for both in zip(split(x).chunk(3), y.chunk(3), strict=True)]

    def run(transport):
        pipe = pipeline(split, transport, share_losses=True)
        with_target, without = [], []
        args, named = arguments(pipe, x, y)
        pipe.eval(*args, losses=with_target, **named)
        pipe.eval(*args, losses=without)
        few = []
        args, named = arguments(pipe, x[:2], y[:2])
        pipe.eval(*args, losses=few, **named)
        return with_target, without, few

    results = run_in_threads(run, 2)
    for with_target, without, few in results:
        assert [loss.item() for loss in with_target] == pytest.approx(expected)
        assert without == []
        assert len(few) == 2
    assert results[0] == results[1]


def sharded(rank, ranks, where):
    """Two replicas in shards: an overflow in one shard of one stage; what every process does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    _, here = mesh.get_coordinate()
    flags = {"now": False}
    torch.manual_seed(8)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sometimes(flags)).double()
    reference = copy.deepcopy(module)
    fully_shard(module, mesh=mesh["replica"])
    mine = scaler()
    schedule = ps.build("1F1B", ranks=2, microbatches=3)
    group = mesh.get_group("pipeline")
    pipe = Pipeline({here: module}, schedule, loss_fn=nn.functional.mse_loss, group=group, scaler=mine)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = batch()
    scales = []
    for overflow in (False, True):
        flags["now"] = overflow and rank == where
        optimizer.zero_grad()
        pipe.step(*([x] if here == 0 else []), target=y if here else None)
        mine.step(optimizer)
        mine.update()
        scales.append(mine.get_scale())
    pipe.close()
    changed = not module[0].weight.full_tensor().equal(reference[0].weight)
    return scales, changed


@pytest.mark.parametrize("where", [0, 3])
def test_an_overflow_in_one_shard_is_one_on_all(workers, where):
    assert workers.run(sharded, where) == [([1024.0, 512.0], True)] * 4
