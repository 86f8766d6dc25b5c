"""The norm of the gradients of a pipeline is that of the unsplit model."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.errors import RunError, StageError
from penstock.runtime import Pipeline, Stage, run_in_threads
from penstock.runtime.grad_clipping import combined, shared_norm

WIDTH = 5


def model(dtype=torch.float64):
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    layers[2][0].weight = layers[1][0].weight  # shared by two stages of one rank
    return nn.Sequential(*layers).to(dtype)


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(6)
    return [10 * torch.randn(8, WIDTH, dtype=dtype, generator=generator) for _ in range(2)]


def clip_in_threads(max_norm, norm_type, dtype=torch.float64):
    whole = model(dtype)
    x, y = batch(dtype)
    nn.functional.mse_loss(whole(x), y).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm, norm_type)
    split = model(dtype)
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=4)

    def run(transport):
        stages = {stage: split[stage] for stage in schedule.placement.stages_of(transport.rank)}
        pipe = Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss, transport=transport)
        pipe.step(*([x] if pipe.has_first else []), target=y if pipe.has_last else None)
        return pipe.clip_grad_norm_(max_norm, norm_type)

    return expected, run_in_threads(run, 2), whole, split


@pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.01, 1e9])
def test_norm_and_gradients_of_the_unsplit_model(max_norm, norm_type):
    expected, norms, whole, split = clip_in_threads(max_norm, norm_type)
    for norm in norms:
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    assert norms[0] == norms[1]
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-14)


def test_single_precision():
    expected, norms, whole, split = clip_in_threads(0.5, 2.0, torch.float32)
    for norm in norms:
        torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def one_gradient(value, **settings):
    """Two ranks, the gradient of the second as given: what clipping says and leaves on each."""
    schedule = ps.build("GPipe", ranks=2, microbatches=1)

    def run(transport):
        layer = nn.Linear(1, 1, bias=False)
        pipe = Pipeline({transport.rank: layer}, schedule, loss_fn=nn.functional.mse_loss, transport=transport)
        layer.weight.grad = torch.tensor([[value if transport.rank else 3.0]])
        return pipe.clip_grad_norm_(1.0, **settings), layer.weight.grad

    return run_in_threads(run, 2)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_not_finite(value):
    """As torch does it: the gradients of all ranks are scaled by what is no number."""
    reference = [nn.Parameter(torch.zeros(1, 1)) for _ in range(2)]
    for parameter, gradient in zip(reference, (3.0, value), strict=True):
        parameter.grad = torch.tensor([[gradient]])
    expected = nn.utils.clip_grad_norm_(reference, 1.0)
    for (norm, gradient), parameter in zip(one_gradient(value), reference, strict=True):
        torch.testing.assert_close(norm, expected, equal_nan=True)
        torch.testing.assert_close(gradient, parameter.grad, equal_nan=True)
    with pytest.raises(RunError, match=r"cannot be clipped"):
        one_gradient(value, error_if_nonfinite=True)


def test_a_norm_that_is_none():
    for norm_type in (0, -1, math.nan):
        with pytest.raises(StageError, match="norm_type"):
            one_gradient(1.0, norm_type=norm_type)


def test_a_rank_without_gradients():
    assert combined([], 2.0) == 0
    assert shared_norm([nn.Parameter(torch.zeros(2))], 2.0) == 0
    assert shared_norm([], math.inf) == 0


def test_half_precision_does_not_overflow():
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    parameter.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    assert shared_norm([parameter], 2.0) == pytest.approx(120000.0)


def test_stages_are_taken_once():
    shared = nn.Linear(1, 1, bias=False)
    shared.weight.grad = torch.tensor([[3.0]])
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=1, stages_per_rank=2)
    pipe = Pipeline([Stage(0, shared), Stage(1, shared)], schedule, loss_fn=nn.functional.mse_loss)
    assert pipe.clip_grad_norm_(10.0) == 3.0


def clip_with_replicas(rank, ranks, wrapper, norm_type):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    replica, here = mesh.get_coordinate()
    torch.manual_seed(7)
    whole = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]).double()
    module = copy.deepcopy(whole[here])
    if wrapper == "sharded":  # five rows over two replicas: shards of three and of two
        fully_shard(module, mesh=mesh["replica"])
    else:
        module = DistributedDataParallel(module, process_group=mesh["replica"].get_group())
    schedule = ps.build("1F1B", ranks=2, microbatches=2)
    pipe = Pipeline({here: module}, schedule, loss_fn=nn.functional.mse_loss, group=mesh.get_group("pipeline"))
    x, y = batch()
    mine = [value.chunk(2)[replica] for value in (x, y)]
    pipe.step(*([mine[0]] if here == 0 else []), target=mine[1] if here else None)
    norm = pipe.clip_grad_norm_(0.01, norm_type)
    nn.functional.mse_loss(whole(x), y).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(module.parameters(), whole[here].parameters(), strict=True):
        found = ours.grad.full_tensor() if wrapper == "sharded" else ours.grad
        torch.testing.assert_close(found, theirs.grad, rtol=1e-9, atol=1e-14)
    pipe.close()
    return norm.item()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("wrapper", ["sharded", "replicated"])
def test_shards_count_together_and_replicas_once(workers, wrapper, norm_type):
    assert len(set(workers.run(clip_with_replicas, wrapper, norm_type))) == 1
