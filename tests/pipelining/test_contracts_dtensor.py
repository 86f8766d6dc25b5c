"""DTensors between stages: two ranks of a pipeline, each of two ranks of tensor parallelism."""

import warnings
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pipelining.contracts import CPU, OURS, UPSTREAM, Package, averaged, numbers

WIDTH, BATCH, MICROBATCHES = 8, 8, 4
PLACEMENTS = {"1F1B": [[0], [1]], "Interleaved1F1B": [[0, 2], [1, 3]], "ZBVZeroBubble": [[0, 3], [1, 2]],
              "DualPipeV": [[0, 3], [1, 2]]}  # fmt: skip


@cache
def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.second = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(self.norm(x))))


def parallel(block, placement):
    """The block on two ranks, with DTensors in and out."""
    tp = mesh()["tp"]
    plan = {
        "norm": SequenceParallel(sequence_dim=1, use_local_output=False),
        "first": ColwiseParallel(input_layouts=placement, use_local_output=False),
        "second": RowwiseParallel(output_layouts=placement, use_local_output=False),
    }
    if placement == Replicate():
        del plan["norm"]
        for name, parameter in list(block.norm.named_parameters()):
            block.norm.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, tp, [Replicate()])))
    return parallelize_module(block, tp, plan)


def model(count, placement):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(count))
    return nn.ModuleList(parallel(block, placement) for block in blocks)


def batch(seed, placement):
    # A dimension for the batch, one for the sequence, which is what is sharded.
    return distribute_tensor(numbers(seed, BATCH, 4, WIDTH), mesh()["tp"], [placement])


def described(tensor, grad):
    """An empty DTensor that looks as one, for a stage to describe."""
    if tensor is None:
        return None
    local = torch.empty_like(tensor.to_local())
    made = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )
    return made.requires_grad_(grad)


def reference(blocks, x, target):
    """Outputs and gradients of the unsplit model, by microbatches, and what goes in and out of each block."""
    seen = {}
    parts = zip(x.split(BATCH // MICROBATCHES), target.split(BATCH // MICROBATCHES), strict=True)
    for number, (one, other) in enumerate(parts):
        values = [one.detach().requires_grad_()]
        for block in blocks:
            values.append(block(values[-1]))
            values[-1].retain_grad()
        (averaged(values[-1], other) / MICROBATCHES).backward()
        if number == 0:
            seen = {index: (values[index], values[index + 1]) for index in range(len(blocks))}
    gradients = {name: parameter.grad for name, parameter in blocks.named_parameters()}
    blocks.zero_grad()
    return gradients, seen


def train(rank, ranks, name, schedule_name, placement, static):
    package = Package(name)
    place = mesh()["pp"].get_local_rank()
    indices = PLACEMENTS[schedule_name]
    count = sum(map(len, indices))
    blocks = model(count, placement)
    x, target = batch(1, placement), batch(2, placement)
    expected, seen = reference(model(count, placement), x, target)
    stages = []
    for index in indices[place]:
        given = {}
        if static:
            before, after = seen[index]
            given = {
                "input_args": (described(before, True),),
                "output_args": (described(after, True),),
                "input_grads": (described(before.grad, False) if index or static != "open ends" else None,),
                "output_grads": (described(after.grad, False) if index < count - 1 or static != "open ends" else None,),
            }
        with warnings.catch_warnings():
            # That the ends have no gradients is warned of.
            warnings.filterwarnings("ignore", "Stage|stage")
            stages.append(
                package.stage.PipelineStage(
                    blocks[index], index, count, CPU, group=mesh()["pp"].get_group(),
                    get_mesh=lambda names, layout: mesh()["tp"], **given,
                )
            )  # fmt: skip
    kind = package.schedule_class(schedule_name)
    schedule = kind(stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=averaged)
    x = x.detach().requires_grad_()
    for _ in range(2):
        blocks.zero_grad()
        output = schedule.step(
            *([x] if any(stage.is_first for stage in stages) else []),
            **({"target": target} if any(stage.is_last for stage in stages) else {}),
        )
    mode = {stage._inference_mode.name for stage in stages}
    assert mode == {"STATIC" if static else "DYNAMIC"}
    if output is not None:
        assert isinstance(output, DTensor)
        assert output.placements == (placement,)
    for index in indices[place]:
        for parameter_name, parameter in blocks[index].named_parameters():
            theirs = expected[f"{index}.{parameter_name}"]
            assert parameter.grad.placements == theirs.placements
            torch.testing.assert_close(parameter.grad.to_local(), theirs.to_local())
    return "right"


CASES = [
    ("1F1B", Replicate(), False), ("1F1B", Shard(1), False), ("1F1B", Replicate(), True), ("1F1B", Shard(1), True),
    ("Interleaved1F1B", Shard(1), False), ("ZBVZeroBubble", Shard(1), False), ("DualPipeV", Replicate(), True),
    ("1F1B", Shard(1), "open ends"),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "placement", "static"), CASES)
def test_dtensors_between_stages(package, workers, schedule, placement, static):
    assert workers.run(train, package.name, schedule, placement, static) == ["right"] * 4


def evaluate(rank, ranks, name, placement):
    package = Package(name)
    place = mesh()["pp"].get_local_rank()
    blocks = model(2, placement)
    x = batch(1, placement)
    with torch.no_grad():
        expected = blocks[1](blocks[0](x))
    stage = package.stage.PipelineStage(
        blocks[place], place, 2, CPU, group=mesh()["pp"].get_group(), get_mesh=lambda *_: mesh()["tp"]
    )
    schedule = package.schedules.Schedule1F1B(stage, MICROBATCHES)
    with torch.no_grad():
        output = schedule.eval(*([x] if place == 0 else []))
    if place == 1:
        assert output.placements == expected.placements
        torch.testing.assert_close(output.to_local(), expected.to_local())
    return "right"


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)])
def test_evaluation_with_dtensors(package, workers, placement):
    assert workers.run(evaluate, package.name, placement) == ["right"] * 4


# In one process -------------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_there_goes_as_zeros(package, mesh):
    """In the form that was agreed, of tensors as well as of DTensors."""
    u = package._utils
    stage = package.stage.PipelineStage(nn.Identity(), 1, 2, CPU)
    stage.has_backward = True
    stage.chunks = 1
    stage.grad_send_info = [0]
    for example in (numbers(1, 4, 3), distribute_tensor(numbers(1, 4, 3), mesh, [Shard(0)])):
        stage._stage_meta = u._StageMeta(input_grads=(u.extract_tensor_meta(example),))
        stage.bwd_cache[0] = (None,)
        (operation,) = stage.get_bwd_send_ops(0)
        local = u.to_local_if_dtensor(example)
        torch.testing.assert_close(operation.tensor.view_as(local), torch.zeros_like(local))


def test_a_gradient_that_nobody_waits_for(package, mesh):
    u = package._utils
    stage = package.stage.PipelineStage(nn.Identity(), 1, 2, CPU)
    stage.has_backward = True
    stage.chunks = 1
    stage.grad_send_info = [0]
    stage._stage_meta = u._StageMeta(input_grads=(None,))
    stage.bwd_cache[0] = (None,)
    assert stage.get_bwd_send_ops(0) == []
    stage.bwd_cache[0] = (numbers(1, 2),)
    with pytest.raises(u.PipeliningMetadataError):
        stage.get_bwd_send_ops(0)
    stage.grad_send_info = [None]
    stage.bwd_cache[0] = (numbers(1, 2),)
    with pytest.raises(u.PipeliningMetadataError):
        stage.get_bwd_send_ops(0)


def test_a_gradient_of_a_plain_tensor_follows_from_the_tensor(package, mesh):
    u = package._utils
    stage = package.stage.PipelineStage(nn.Identity(), 1, 2, CPU)
    x = numbers(1, 2, 3).requires_grad_()
    stage._stage_meta = u._StageMeta(inputs=(u.extract_tensor_meta(x),))
    found = stage._get_grad_send_meta(0)
    assert (tuple(found.shape), found.requires_grad) == ((2, 3), False)
    with pytest.raises(u.PipeliningMetadataError):
        stage._get_grad_send_meta(1)


def test_both_packages_describe_a_dtensor_alike(mesh):
    tensor = distribute_tensor(numbers(1, 4, 3), mesh, [Shard(0)])
    ours, theirs = (Package(name)._utils._DTensorMeta.from_dtensor(tensor) for name in (OURS, UPSTREAM))
    assert {k: getattr(ours, k) for k in theirs.__dataclass_fields__} == {
        k: getattr(theirs, k) for k in theirs.__dataclass_fields__
    }
