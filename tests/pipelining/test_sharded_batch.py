"""Batches whose samples are sharded over the ranks of tensor parallelism: right, or refused."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from penstock.errors import MicrobatchError
from penstock.pipelining import schedules
from penstock.pipelining._stage.sharded_batch import Samples, check_samples, count_samples, restore_order
from penstock.pipelining.microbatch import TensorChunkSpec
from penstock.pipelining.stage import PipelineStage
from runtime.workers import WorkerError

WIDTH, MICROBATCHES = 3, 2
PLACEMENTS = {"1F1B": [[0], [1]], "ZBVZeroBubble": [[0, 3], [1, 2]]}
WHOLE, SHARDED = Replicate(), Shard(0)
PLAIN, LOCAL = "plain", "local"  # a tensor with all samples, and one with those of this rank


@cache
def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def placed(tensor, placement):
    if placement == PLAIN:
        return tensor
    if placement == LOCAL:
        return distribute_tensor(tensor, mesh()["tp"], [SHARDED]).to_local()
    return distribute_tensor(tensor, mesh()["tp"], [placement])


def everything(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Layer(nn.Module):
    """Takes what comes, and returns it with a placement."""

    def __init__(self, index, placement):
        super().__init__()
        self.weight = nn.Parameter(placed(numbers(index, WIDTH, WIDTH), WHOLE))
        self.placement = placement

    def forward(self, x):
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh()["tp"], [WHOLE], run_check=False)
        y = torch.tanh(x @ self.weight)
        if self.placement == PLAIN:
            return y.redistribute(placements=[WHOLE]).to_local()
        return y.redistribute(placements=[self.placement])


def loss_fn(output, target):
    if isinstance(output, DTensor) and not isinstance(target, DTensor):
        placement = WHOLE if len(target) == len(output) else SHARDED
        target = DTensor.from_local(target, mesh()["tp"], [placement], run_check=False)
    return ((output - (target if isinstance(output, DTensor) else everything(target))) ** 2).mean()


def train(rank, ranks, name, samples, given, expected, inner, outer):
    """A step, compared with plain tensors in one piece; whether it is right."""
    places = PLACEMENTS[name]
    count = sum(map(len, places))
    mine = places[mesh()["pp"].get_local_rank()]
    x, target = numbers(100, samples, WIDTH), numbers(101, samples, WIDTH)
    weights = [numbers(index, WIDTH, WIDTH).requires_grad_() for index in range(count)]
    whole = x
    for weight in weights:
        whole = torch.tanh(whole @ weight)
    loss_fn(whole, target).backward()
    layers = {index: Layer(index, outer if index == count - 1 else inner) for index in mine}
    group = mesh()["pp"].get_group()
    stages = [
        PipelineStage(layer, index, count, torch.device("cpu"), group=group, get_mesh=lambda *_: mesh()["tp"])
        for index, layer in layers.items()
    ]
    schedule = schedules.get_schedule_class(name)(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn)
    arguments = (placed(x, given),) if 0 in mine else ()
    targets = {"target": placed(target, expected)} if count - 1 in mine else {}
    output = schedule.step(*arguments, **targets)
    for index, layer in layers.items():
        torch.testing.assert_close(everything(layer.weight.grad), weights[index].grad, rtol=1e-12, atol=1e-14)
    if output is not None:
        torch.testing.assert_close(everything(output), whole.detach(), rtol=1e-12, atol=1e-14)
    return "right"


ALIKE = [
    (SHARDED, SHARDED, SHARDED, SHARDED),
    (SHARDED, LOCAL, SHARDED, SHARDED),
    (WHOLE, WHOLE, WHOLE, WHOLE),
    (PLAIN, PLAIN, SHARDED, PLAIN),
    # The samples of the output are not where those of the batch are.
    (WHOLE, WHOLE, SHARDED, SHARDED),
    (SHARDED, SHARDED, SHARDED, WHOLE),
    (SHARDED, SHARDED, WHOLE, PLAIN),
]


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize(("given", "expected", "inner", "outer"), ALIKE)
def test_batch_and_target_that_are_sharded_alike(workers, name, given, expected, inner, outer):
    assert workers.run(train, name, 8, given, expected, inner, outer) == ["right"] * 4


def test_a_target_that_is_not_sharded_like_the_batch_is_refused(workers):
    message = "target has 8 samples, of which this rank holds all, but the batch of the first stage has 8 samples, of"
    with pytest.raises(WorkerError, match=message):
        workers.run(train, "1F1B", 8, SHARDED, PLAIN, SHARDED, SHARDED)


def refuse(rank, ranks, samples, given, expected, message, *, group):
    """One stage: both ranks refuse, and neither waits."""
    tp = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    x, target = (
        numbers(1, samples, WIDTH) if one == PLAIN else distribute_tensor(numbers(1, samples, WIDTH), tp, [one])
        for one in (given, expected)
    )
    alone = dist.new_group([rank], use_local_synchronization=True)
    stage = PipelineStage(nn.Identity(), 0, 1, torch.device("cpu"), group=alone, get_mesh=lambda *_: tp)
    schedule = schedules.ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
    with pytest.raises(MicrobatchError, match=message):
        schedule.step(x, target=target)


REFUSED = [
    (8, SHARDED, WHOLE, r"target has 8 samples, of which this rank holds all, but .* of which this rank holds 4"),
    (8, WHOLE, SHARDED, r"target has 8 samples, of which this rank holds 4, but .* of which this rank holds all"),
    (8, PLAIN, SHARDED, r"target has 8 samples, of which this rank holds 4, but .* of which this rank holds all"),
    (6, SHARDED, SHARDED, r"args\[0\] has 6 samples, of which this rank holds 3; each rank splits its own"),
    (5, SHARDED, SHARDED, r"args\[0\] has 5 samples, of which this rank holds [23]; each rank splits its own"),
]


@pytest.mark.parametrize(("samples", "given", "expected", "message"), REFUSED)
def test_what_cannot_be_split_into_the_same_microbatches_is_refused(workers, samples, given, expected, message):
    workers.run(refuse, samples, given, expected, message, ranks=2)


def refuse_later(rank, ranks, *, group):
    """Later steps of a schedule are held to the sharding of its first one."""
    tp = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    x, whole = (distribute_tensor(numbers(1, 8, WIDTH), tp, [placement]) for placement in (SHARDED, WHOLE))
    parts = [distribute_tensor(part, tp, [SHARDED]) for part in numbers(1, 8, WIDTH).chunk(MICROBATCHES)]
    pre_split = {"arg_mbs": [(part,) for part in parts], "target_mbs": parts}
    alone = dist.new_group([rank], use_local_synchronization=True)

    def schedule():
        stage = PipelineStage(nn.Identity(), 0, 1, torch.device("cpu"), group=alone, get_mesh=lambda *_: tp)
        return schedules.ScheduleGPipe(stage, MICROBATCHES)

    def outputs(step):
        return everything(step).tolist()

    right = numbers(1, 8, WIDTH).tolist()
    first = schedule()
    assert outputs(first.step(x)) == right
    assert outputs(first.step(x)) == right
    with pytest.raises(MicrobatchError, match=r"this step's batch is split by the caller, but .* was in 2 shards"):
        first.step(**pre_split)
    with pytest.raises(
        MicrobatchError, match=r"target has 8 samples, of which this rank holds all, but the batch of the first"
    ):
        first.step(x, target=whole)
    second = schedule()
    second.step(**pre_split)
    with pytest.raises(MicrobatchError, match=r"batch is in 2 shards, but .* was split by the caller"):
        second.step(x)


def test_later_steps_are_held_to_the_sharding_of_the_first(workers):
    workers.run(refuse_later, ranks=2)


# In one process -------------------------------------------------------------------------------------------------------


def test_samples_are_counted_along_the_dimension_of_the_spec():
    values = (torch.ones(4, 6), torch.ones(5), 3)
    specs = (TensorChunkSpec(1), TensorChunkSpec(0), None)
    assert count_samples("args", values, specs) == {"args[0]": Samples(6, 6), "args[1]": Samples(5, 5)}
    assert count_samples("kwargs", {"scale": torch.tensor(1.0)}, None) == {}


def test_numbers_of_samples_that_differ_are_nobody_s_business_here():
    """A target may have a row for each token, or the samples of this rank alone."""
    check_samples({"args[0]": Samples(8, 4), "target": Samples(4, 4)}, None, 4)
    check_samples({"target": Samples(80, 80)}, Samples(8, 4), 4)


def test_arguments_of_one_rank_are_compared_with_each_other():
    with pytest.raises(
        MicrobatchError, match=r"kwargs\['mask'\] has 8 samples, of which this rank holds all, but args"
    ):
        check_samples({"args[0]": Samples(8, 4), "kwargs['mask']": Samples(8, 8)}, None, 2)
    check_samples({"args[0]": Samples(7, 4), "kwargs['mask']": Samples(7, 7)}, None, 1)


def test_a_rank_without_samples():
    with pytest.raises(MicrobatchError, match="make the number of samples a multiple of 2 times the number of shards"):
        check_samples({"args[0]": Samples(1, 0)}, None, 2)


def test_whole_outputs_of_a_sharded_batch_get_its_order():
    merged = {"y": torch.tensor([[0, 4, 1, 5, 2, 6, 3, 7]]), "n": 3}
    found = restore_order(merged, {"y": TensorChunkSpec(1), "n": None}, Samples(8, 4), 4)
    assert found["y"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert found["n"] == 3


def test_a_rank_with_a_spec_that_is_given_nothing():
    assert count_samples("args", (), (TensorChunkSpec(1),)) == {}
    assert count_samples("kwargs", {}, {"x": TensorChunkSpec(1)}) == {}
