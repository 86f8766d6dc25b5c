"""Edges together with everything else that a pipeline does."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.ir.edges import chain
from penstock.runtime import Pipeline, run_in_threads
from runtime.test_edges import cases_of
from runtime.wired import GRAPHS, Wired, broadcast, compared, compared_in_threads, nested, unet

WIDTH, MICROBATCHES = 4, 4


@pytest.fixture(autouse=True)
def _exact():
    """Threads share the default element type, so it is set around them."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "model",
    [ps.CommModel(buffering, lanes) for buffering in ("rendezvous", "eager", "bounded(1)") for lanes in ps.LANES],
    ids=str,
)
def test_under_every_communication_model(model):
    cases = [
        Wired(schedule, *graph(schedule.stages), shapes, steps=1)
        for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
        for schedule in [ps.build(name, ranks=2 if name != "1F1B" else 4, microbatches=4)]
        for graph in (broadcast, nested)
        for shapes in ("inferred", "per_microbatch")
    ]
    assert compared_in_threads(cases, model=model) == []


@pytest.mark.parametrize("graph", GRAPHS)
def test_check_parity(graph):
    """Both halves of every backward, against whole ones and the schedule."""
    assert compared_in_threads([case for case in cases_of(graph, 2, halves=True) if case.schedule.stages > 2]) == []


def test_check_parity_in_processes(workers):
    cases = [case for graph in ("unet", "nested") for case in cases_of(graph, 4, halves=True, steps=1)]
    found = workers.run(compared, cases, ranks=4, limit=60 + 3 * len(cases))
    assert [each for rank in found for each in rank] == []


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch", "given"])
def test_an_input_that_is_not_used_gets_a_gradient_of_zeros_or_none(shapes):
    """From the first tensor of some stage: a link between ranks returns zeros, one on a rank nothing."""
    cases = [
        Wired(ps.build(name, ranks=2, microbatches=3), *broadcast(4), shapes, samples=6, ignoring=stage)
        for name in ("ZBVZeroBubble", "Interleaved1F1B", "DualPipeV")
        for stage in (1, 2, 3)
    ]
    assert compared_in_threads(cases) == []


# Stages without inputs or with keyword arguments ----------------------------------------------------------------------


class Tower(nn.Module):
    """Works on a keyword argument alone, or adds what it is given."""

    def __init__(self, name=None):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.name = name

    def forward(self, *inputs, **kwargs):
        given = kwargs[self.name] if self.name else sum(inputs)
        return self.layer(given).tanh()


TOWERS = [ps.Edge(0, (2,)), ps.Edge(1, (3,)), ps.Edge(2, (3,))]


def towers():
    generator = torch.Generator().manual_seed(5)
    stages = [Tower("left"), Tower("right"), Tower(), Tower()]
    for parameter in nn.ModuleList(stages).parameters():
        nn.init.normal_(parameter, generator=generator)
    return stages


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "1F1B"])
def test_a_stage_that_no_edge_enters_gets_keyword_arguments(name, shapes):
    """Two towers: stages 0 and 1 both begin with a part of the batch. All ranks make the same call."""
    ranks = 4 if name == "1F1B" else 2
    schedule = ps.build(name, ranks=ranks, microbatches=3)
    batch = {"left": torch.randn(7, WIDTH), "right": torch.randn(7, WIDTH)}
    target, whole, modules = torch.randn(7, WIDTH), towers(), towers()

    def worker(transport):
        stages = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        with Pipeline(stages, schedule, edges=TOWERS, loss_fn=mse_loss, transport=transport, shapes=shapes) as pipe:
            pipe.step(**batch, target=target)
            return pipe.eval(**{name: value[:2] for name, value in batch.items()})

    found = run_in_threads(worker, ranks)[schedule.placement.rank_of[-1]]
    output = whole[3](whole[1](**batch), whole[2](whole[0](**batch)))
    mse_loss(output, target).backward()
    torch.testing.assert_close(found, output[:2].detach())
    for one, other in zip(nn.ModuleList(modules).parameters(), nn.ModuleList(whole).parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-10)


# Checkpoints, custom functions, other modes ---------------------------------------------------------------------------


class Block(nn.Module):
    """Adds its inputs; returns as many values as asked for, checkpointed or not."""

    def __init__(self, values, *, checkpoints=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.values = values
        self.checkpoints = checkpoints

    def forward(self, *inputs):
        if self.checkpoints:
            # In threads, torch hangs if two ranks restore the random state at once.
            return checkpoint(self.run, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self.run(*inputs)

    def run(self, *inputs):
        hidden = self.layers(sum(inputs))
        return tuple(hidden * number for number in range(1, self.values + 1)) if self.values > 1 else hidden


def blocks(stages, edges, **options):
    generator = torch.Generator().manual_seed(stages)
    made = [Block(sum(edge.source == index for edge in edges), **options) for index in range(stages)]
    for parameter in nn.ModuleList(made).parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return made


def run_whole(stages, edges, x):
    values = {}
    for index, stage in enumerate(stages):
        entering = [values[edge] for edge in edges if index in edge.targets]
        output = stage(*(entering or [x]))
        leaving = [edge for edge in edges if edge.source == index]
        values.update(zip(leaving, output if len(leaving) > 1 else [output], strict=False))
    return output


def sorted_unet(stages):
    return sorted(unet(stages)[0], key=lambda edge: edge.source)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("kind", ["checkpoints", "functions", "autocast"])
def test_with(name, kind):
    schedule = ps.build(name, ranks=2, microbatches=MICROBATCHES)
    edges = sorted_unet(schedule.stages)
    options = {"checkpoints": kind == "checkpoints"}
    whole, modules = blocks(schedule.stages, edges, **options), blocks(schedule.stages, edges, **options)
    x, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    ran = []

    def function(action, context):
        ran.append(str(action))
        context.run(action)

    def worker(transport):
        stages = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        with Pipeline(stages, schedule, edges=edges, loss_fn=mse_loss, transport=transport) as pipe:
            if kind == "functions":
                for each in ("FORWARD", "SEND_F", "RECV_B", "OVERLAP_F_B"):
                    pipe.register_custom_function(ps.ComputationType[each], function)
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                pipe.step(x, target=target)
            with torch.inference_mode():
                return pipe.eval(x[:3])

    found = run_in_threads(worker, 2)[schedule.placement.rank_of[-1]]
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        loss = sum(
            mse_loss(run_whole(whole, edges, one), other) / MICROBATCHES
            for one, other in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        )
    loss.backward()
    assert any("F0" in action for action in ran) == (kind == "functions")
    with torch.no_grad():
        torch.testing.assert_close(found, run_whole(whole, edges, x[:3]))
    close = {"rtol": 1e-2, "atol": 1e-2} if kind == "autocast" else {"rtol": 0, "atol": 1e-10}
    for one, other in zip(nn.ModuleList(modules).parameters(), nn.ModuleList(whole).parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **close)


# Data parallel stages -------------------------------------------------------------------------------------------------


@cache
def mesh():
    """Replicas by ranks of the pipeline; made once in a process."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))


def wrap(kind, module):
    replicas = mesh()["replica"]
    return (
        DistributedDataParallel(module, process_group=replicas.get_group())
        if kind == "ddp"
        else fully_shard(module, mesh=replicas)
    )


def replicas_compared(rank, ranks, kind, names, *, group):
    torch.set_default_dtype(torch.float64)
    found = []
    try:
        for name in names:
            found += _replica(rank, kind, ps.build(name, ranks=2, microbatches=MICROBATCHES))
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def _replica(rank, kind, schedule):
    edges = sorted_unet(schedule.stages) if schedule.stages > 2 else [*chain(2), ps.Edge(0, (1,), "again")]
    whole, modules = blocks(schedule.stages, edges), blocks(schedule.stages, edges)
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(4 * MICROBATCHES, WIDTH, generator=generator) for _ in range(2))
    pipeline = mesh()["pipeline"]
    mine = {index: wrap(kind, modules[index]) for index in schedule.placement.stages_of(pipeline.get_local_rank())}
    half = slice(rank // 2 * 2 * MICROBATCHES, (rank // 2 + 1) * 2 * MICROBATCHES)
    with Pipeline(mine, schedule, edges=edges, loss_fn=mse_loss, group=pipeline.get_group()) as pipe:
        for _ in range(2):
            pipe.step(x[half], target=target[half])
    for _ in range(2):
        mse_loss(run_whole(whole, edges, x), target).backward()
    found = []
    for index, module in mine.items():
        for one, other in zip(module.parameters(), whole[index].parameters(), strict=True):
            gradient = one.grad.full_tensor() if kind == "fsdp" else one.grad
            gap = (gradient - other.grad).abs().max().item()
            if gap > 1e-10:
                found.append(f"{kind}, {schedule.metadata['name']}, stage {index}: off by {gap:.2g}")
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_replicas(workers, kind):
    """Gradients of two steps add up, as without edges."""
    names = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"]
    found = workers.run(replicas_compared, kind, names, ranks=4, limit=120)
    assert [each for rank in found for each in rank] == []
