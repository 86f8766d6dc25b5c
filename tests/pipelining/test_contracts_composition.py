"""Stages whose modules are data parallel: two replicas of a pipeline of two ranks."""

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pipelining.contracts import CPU, WIDTH, Package, averaged, layers, numbers

STAGES = 4
MICROBATCHES = 4
BATCH = 8
PLACEMENTS = {
    "GPipe": [[0], [1]], "1F1B": [[0], [1]], "Interleaved1F1B": [[0, 2], [1, 3]], "LoopedBFS": [[0, 2], [1, 3]],
    "InterleavedZeroBubble": [[0, 2], [1, 3]], "ZBVZeroBubble": [[0, 3], [1, 2]], "DualPipeV": [[0, 3], [1, 2]],
}  # fmt: skip


@cache
def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))


def with_ddp(module, replicas):
    return DistributedDataParallel(module, process_group=replicas.get_group())


def with_fsdp(module, replicas, **options):
    for layer in module:
        fully_shard(layer, mesh=replicas, reshard_after_forward=False, **options)
    return fully_shard(module, mesh=replicas, **options)


def with_mixed_precision(module, replicas):
    return with_fsdp(module, replicas, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def with_replicate(module, replicas):
    return replicate(module, mesh=replicas)


WRAPPERS = {"ddp": with_ddp, "fsdp": with_fsdp, "mixed precision": with_mixed_precision, "replicate": with_replicate}
LOOSE = {"rtol": 5e-2, "atol": 5e-3}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank, ranks, name, wrapper, schedules, steps, later=False):
    """Gradients of all replicas are the mean of those of the unsplit model on the batch of each.

    Args:
        later: put the wrapped modules into stages that were made with the plain ones, as trainers do.
    """
    package = Package(name)
    replica, place = mesh().get_coordinate()
    x = [numbers(10 + each, BATCH, WIDTH) for each in range(2)]
    target = [numbers(20 + each, BATCH, WIDTH) for each in range(2)]
    dtype = torch.bfloat16 if wrapper == "mixed precision" else torch.float32
    tolerance = LOOSE if wrapper == "mixed precision" else {}
    for schedule_name in schedules:
        placement = PLACEMENTS[schedule_name]
        count = sum(map(len, placement))
        model = layers(8)
        per_stage = len(model) // count
        reference = nn.Sequential(*copy.deepcopy(model))
        for one, other in zip(x, target, strict=True):
            (averaged(reference(one), other) / 2).backward()
        expected = dict(reference.named_parameters())
        stages = []
        for index in placement[place]:
            part = nn.Sequential(*model[index * per_stage : (index + 1) * per_stage])
            wrapped = WRAPPERS[wrapper](part, mesh()["replica"])
            stages.append(package.stage.PipelineStage(wrapped, index, count, CPU, group=mesh()["pipeline"].get_group()))
        kind = package.schedule_class(schedule_name)
        schedule = kind(stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=averaged)
        for _ in range(steps):
            for stage in stages:
                stage.submod.zero_grad()
            schedule.step(
                *([x[replica].to(dtype)] if stages[0].is_first else []),
                **({"target": target[replica].to(dtype)} if any(stage.is_last for stage in stages) else {}),
            )
        for stage in stages:
            for parameter_name, parameter in stage.submod.named_parameters():
                layer, *rest = parameter_name.removeprefix("module.").split(".")
                theirs = expected[".".join([str(int(layer) + stage.stage_index * per_stage), *rest])]
                parameter.grad.div_(2).mul_(2)  # it is there, and nobody writes to it any more
                where = f"{schedule_name}, stage {stage.stage_index}, {parameter_name}"
                torch.testing.assert_close(
                    whole(parameter.grad),
                    theirs.grad,
                    msg=lambda text, where=where: f"{where}: {text}",
                    **tolerance,
                )


ONE_STAGE = ["GPipe", "1F1B"]
WHOLE = ["Interleaved1F1B", "LoopedBFS"]
HALVES = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_those_of_all_replicas(package, workers, wrapper):
    schedules = [*ONE_STAGE, *WHOLE]
    if package.ours or wrapper in ("fsdp", "mixed precision"):
        schedules += HALVES  # torch's halves do not reach the reducer of DDP
    # In torch, finding shapes has run DDP's hooks, which fails in the second step.
    steps = 1 if wrapper == "ddp" and not package.ours else 2
    workers.run(train, package.name, wrapper, schedules, steps, limit=120)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_modules_become_parallel_after_the_stages(package, workers, wrapper):
    workers.run(train, package.name, wrapper, ["1F1B", "Interleaved1F1B"], 1, True, limit=120)


def unshard(rank, ranks, name):
    """Parameters are together between UNSHARD and RESHARD: with an order that is set between steps."""
    package = Package(name)
    module = with_fsdp(nn.Sequential(*layers(2)), mesh()["replica"])
    fully_shard.state(module)._lazy_init()
    alone = cache_of_lonely_groups()
    stage = package.stage.PipelineStage(module, 0, 1, CPU, group=alone)
    schedule = package.schedules._PipelineScheduleRuntime([stage], n_microbatches=1, loss_fn=None, scale_grads=False)
    found = [together(module)]
    for row in ("0UNSHARD 0F0 0RESHARD", "0UNSHARD 0F0"):
        schedule.pipeline_order_with_comms = package.rows(row)
        schedule.step(numbers(1, 2, WIDTH))
        found.append(together(module))
    assert schedule.unsharded_stages == {0}
    for submodule in (*module, module):
        submodule.reshard()
    return found


@cache
def cache_of_lonely_groups():
    """A group of this rank alone, made by all."""
    return init_device_mesh("cpu", (4, 1), mesh_dim_names=("others", "alone"))["alone"].get_group()


def together(module):
    parameters = [
        parameter
        for state in fully_shard.state(module)._state_ctx.all_states
        for group in state._fsdp_param_groups
        for parameter in group.fsdp_params
    ]
    found = {parameter.sharded_state == ShardedState.UNSHARDED for parameter in parameters}
    assert len(found) == 1
    return found.pop()


def test_parameters_are_gathered_and_released_by_actions(package, workers):
    assert workers.run(unshard, package.name) == [[False, False, True]] * 4


def misuse(rank, ranks, name):
    """What an order may not do with the parameters of a stage."""
    package = Package(name)
    alone = cache_of_lonely_groups()
    raised = {}
    for row in ("0F0", "0UNSHARD 0UNSHARD 0F0", "0RESHARD 0F0", "0UNSHARD 0F0 0RESHARD 0RESHARD"):
        module = with_fsdp(nn.Sequential(*layers(1)), mesh()["replica"])
        stage = package.stage.PipelineStage(module, 0, 1, CPU, group=alone)
        schedule = package.schedules._PipelineScheduleRuntime([stage], n_microbatches=1)
        schedule.pipeline_order_with_comms = package.rows(row)
        try:
            schedule.step(numbers(1, 2, WIDTH))
        except AssertionError:
            raised[row] = "assertion"
    return raised


def test_parameters_that_are_not_there(package, workers):
    for raised in workers.run(misuse, package.name):
        assert set(raised.values()) == {"assertion"}
        assert len(raised) == 4
