"""Two replicas of a pipeline of two ranks, with wrappers for data parallelism around stages, or in them.

Our stages are driven by torch's schedules; gradients are those of the unsplit model on the whole batch.
"""

from functools import cache

import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_around_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock.pipelining.stage as our_stage
from penstock.pipelining._utils import generate_stage_to_rank_mapping
from pipelining.driving import known_to_torch

CPU = torch.device("cpu")
WIDTH = 6
MICROBATCHES = 4
STYLES = {"1F1B": (1, "loop"), "Interleaved1F1B": (2, "loop"), "ZBVZeroBubble": (2, "v"), "DualPipeV": (2, "v")}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH * WIDTH)) for _ in range(2))

    def forward(self, x):
        """Autograd makes the gradients of the last two parameters as views of the same memory."""
        mixed = x @ (self.one.view(WIDTH, WIDTH) + self.other.view(WIDTH, WIDTH))
        return x + self.second(torch.tanh(self.first(self.norm(x)))) + mixed / 4


@cache
def mesh():
    """Replicas by ranks of the pipeline; made once in a process."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))


def around_ddp(module, replicas):
    return DistributedDataParallel(module, process_group=replicas.get_group())


def around_ddp_in_buckets(module, replicas):
    return DistributedDataParallel(module, process_group=replicas.get_group(), gradient_as_bucket_view=True)


def around_ddp_with_hook(module, replicas):
    wrapped = around_ddp(module, replicas)
    wrapped.register_comm_hook(replicas.get_group(), allreduce_hook)
    return wrapped


def ddp_inside(module, replicas):
    return nn.Sequential(*[around_ddp(layer, replicas) for layer in module])


def ddp_in_buckets_inside(module, replicas):
    return nn.Sequential(*[around_ddp_in_buckets(layer, replicas) for layer in module])


def composable(module, replicas):
    return replicate_around_ddp(module, process_group=replicas.get_group())


def replicated(module, replicas):
    return replicate(module, mesh=replicas)


def sharded(module, replicas):
    for layer in module:
        fully_shard(layer, mesh=replicas)
    return fully_shard(module, mesh=replicas, reshard_after_forward=False)


def sharded_in_two_types(module, replicas):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for layer in module:
        fully_shard(layer, mesh=replicas, mp_policy=policy)
    return fully_shard(module, mesh=replicas, mp_policy=policy)


def sharded_inside(module, replicas):
    for layer in module:
        fully_shard(layer, mesh=replicas)
    return module


WRAPPERS = {
    "ddp": around_ddp,
    "ddp in buckets": around_ddp_in_buckets,
    "ddp inside": ddp_inside,
    "ddp in buckets inside": ddp_in_buckets_inside,
    "composable": composable,
    "replicate": replicated,
    "sharded": sharded,
    "reduced in another type": sharded_in_two_types,
    "sharded inside": sharded_inside,
}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def model():
    torch.manual_seed(1)
    return nn.Sequential(*[Layer() for _ in range(8)])


def train(rank, ranks, name, wrapper):
    replica, place = mesh().get_coordinate()
    per_rank, style = STYLES[name]
    stages = 2 * per_rank
    places = generate_stage_to_rank_mapping(2, stages, style)
    whole, mine, size = model(), model(), 8 // stages
    made = [
        our_stage.PipelineStage(
            wrapper(mine[index * size : (index + 1) * size], mesh()["replica"]),
            index,
            stages,
            CPU,
            group=mesh().get_group("pipeline"),
        )
        for index, home in places.items()
        if home == place
    ]
    loss_fn = nn.functional.mse_loss
    schedule = torch_schedules.get_schedule_class(name)(
        made[0] if per_rank == 1 else made, MICROBATCHES, loss_fn=loss_fn
    )
    generator = torch.Generator().manual_seed(2)
    with known_to_torch():
        for _ in range(2):
            x, target = (torch.randn(4 * MICROBATCHES, WIDTH, generator=generator) for _ in range(2))
            whole.zero_grad()
            loss_fn(whole(x), target).backward()
            for stage in made:
                stage.submod.zero_grad()
            args = (x.chunk(2)[replica],) if any(stage.is_first for stage in made) else ()
            last = {"target": target.chunk(2)[replica]} if any(stage.is_last for stage in made) else {}
            schedule.step(*args, **last)
            for stage in made:
                expected = whole[stage.stage_index * size : (stage.stage_index + 1) * size].parameters()
                for one, other in zip(stage.submod.parameters(), expected, strict=True):
                    torch.testing.assert_close(full(one.grad), other.grad, rtol=1e-4, atol=1e-6)


def run(rank, ranks, name, wrapper):
    train(rank, ranks, name, WRAPPERS[wrapper])


def run_with_hook(rank, ranks, name):
    train(rank, ranks, name, around_ddp_with_hook)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", STYLES)
def test_gradients_are_shared_once(workers, name, wrapper):
    workers.run(run, name, wrapper, ranks=4)


def test_a_hook_of_communication_runs_in_the_last_backward(workers):
    workers.run(run_with_hook, "1F1B", ranks=4)
