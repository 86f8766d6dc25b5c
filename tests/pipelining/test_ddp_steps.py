"""``DistributedDataParallel`` around stages, step by step: how often each package averages gradients.

Two replicas of a pipeline of two ranks. In the first step torch also averages the gradients of the first microbatch,
which leaves the reducer in a state in which most schedules fail in the second step. Compared with the unsplit model in
float64, neither package is closer.
"""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from pipelining.contracts import CPU, OURS, UPSTREAM, Package
from pipelining.test_stage_parallel import mesh
from runtime.workers import WorkerError

WIDTH = 16
STEPS = 3


def model(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).to(dtype)


def batches(microbatches):
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        yield [torch.randn(8 * microbatches, WIDTH, generator=generator) for _ in range(2)]


def train(rank, ranks, package, name, microbatches):
    """For each step, how often this rank has averaged, and its gradients by name."""
    torch.set_num_threads(1)
    package = Package(package)
    replica, place = mesh().get_coordinate()
    replicas, whole, averages = mesh().get_group("replica"), model(), 0

    def average(state, bucket):
        nonlocal averages
        averages += 1
        return allreduce_hook(state, bucket)

    indices = [place] if name in ("GPipe", "1F1B") else [place, place + 2]
    count = 2 * len(indices)
    size = 4 // count
    stages = []
    for index in indices:
        part = DistributedDataParallel(whole[index * size : (index + 1) * size], process_group=replicas)
        part.register_comm_hook(replicas, average)
        stages.append(package.stage.PipelineStage(part, index, count, CPU, group=mesh().get_group("pipeline")))
    kind = package.schedule_class(name)
    schedule = kind(stages[0] if len(stages) == 1 else stages, microbatches, loss_fn=nn.functional.mse_loss)
    found = []
    for x, target in batches(microbatches):
        averages = 0
        whole.zero_grad()
        args = (x.chunk(2)[replica],) if stages[0].is_first else ()
        last = {"target": target.chunk(2)[replica]} if stages[-1].is_last else {}
        schedule.step(*args, **last)
        gradients = {key: weight.grad.clone() for key, weight in whole.named_parameters() if weight.grad is not None}
        found.append((averages, gradients))
    return found


def unsplit(microbatches, dtype):
    whole, found = model(dtype), []
    for x, target in batches(microbatches):
        whole.zero_grad()
        nn.functional.mse_loss(whole(x.to(dtype)), target.to(dtype)).backward()
        found.append({key: weight.grad.clone() for key, weight in whole.named_parameters()})
    return found


def distance(one, other):
    """Of gradients by name: the norm of the difference, relative to the norm."""
    difference = sum(((one[key].double() - other[key].double()) ** 2).sum() for key in one)
    return (difference / sum((other[key].double() ** 2).sum() for key in one)).sqrt().item()


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_gradients_are_averaged_once_in_every_step(workers, name, microbatches):
    expected = unsplit(microbatches, torch.float64)
    for found in workers.run(train, OURS, name, microbatches, ranks=4):
        for (averages, gradients), truth in zip(found, expected, strict=True):
            assert averages == (1 if name != "Interleaved1F1B" else 2)  # once for each stage of the rank
            assert distance(gradients, truth) < 3e-7


def test_torch_averages_twice_in_the_first_step_and_is_no_closer_to_the_unsplit_model(workers):
    ours, theirs = (workers.run(train, package, "1F1B", 4, ranks=4) for package in (OURS, UPSTREAM))
    expected = unsplit(4, torch.float64)
    for our_rank, their_rank in zip(ours, theirs, strict=True):
        assert [averages for averages, _ in our_rank] == [1, 1, 1]
        assert [averages for averages, _ in their_rank] == [2, 1, 1]
        for step, ((_, our_gradients), (_, their_gradients)) in enumerate(zip(our_rank, their_rank, strict=True)):
            assert distance(our_gradients, their_gradients) < (3e-7 if step == 0 else 1e-20)
            assert distance(their_gradients, expected[step]) < 3e-7


def test_torch_fails_in_the_second_step_with_two_microbatches(workers):
    with pytest.raises(WorkerError, match="failed to run forward"):
        workers.run(train, UPSTREAM, "1F1B", 2, ranks=4)
