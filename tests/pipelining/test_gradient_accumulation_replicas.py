"""Gradients of several steps without ``zero_grad``, of stages whose parameters are shared with other replicas."""

import pytest
import torch
from torch import nn

from penstock.pipelining import PipelineStage
from penstock.pipelining._utils import generate_stage_to_rank_mapping
from penstock.pipelining.schedules import get_schedule_class
from pipelining.test_stage_parallel import CPU, MICROBATCHES, STYLES, WIDTH, WRAPPERS, full, mesh, model

STEPS = 3


def train(rank, ranks, name):
    torch.set_num_threads(1)
    for wrapper in WRAPPERS:
        for parameter, expected in train_wrapped(name, WRAPPERS[wrapper]):
            found = full(parameter.grad)
            torch.testing.assert_close(
                found, expected, rtol=1e-4, atol=1e-5, msg=lambda message, name=wrapper: f"{name}: {message}"
            )


def train_wrapped(name, wrapper):
    """The parameters of this rank after several steps, each with its gradient in the unsplit model."""
    replica, place = mesh().get_coordinate()
    per_rank, style = STYLES[name]
    count = 2 * per_rank
    whole, mine, size = model(), model(), 8 // count
    stages = [
        PipelineStage(
            wrapper(mine[index * size : (index + 1) * size], mesh()["replica"]),
            index,
            count,
            CPU,
            group=mesh().get_group("pipeline"),
        )
        for index, home in generate_stage_to_rank_mapping(2, count, style).items()
        if home == place
    ]
    loss_fn = nn.functional.mse_loss
    schedule = get_schedule_class(name)(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=loss_fn)
    generator = torch.Generator().manual_seed(2)
    sums = [torch.zeros_like(parameter) for parameter in whole.parameters()]
    for _ in range(STEPS):
        x, target = (torch.randn(4 * MICROBATCHES, WIDTH, generator=generator) for _ in range(2))
        # Not added up in place: autograd makes two of the gradients as views of the same memory.
        torch._foreach_add_(sums, torch.autograd.grad(loss_fn(whole(x), target), list(whole.parameters())))
        args = (x.chunk(2)[replica],) if any(stage.is_first for stage in stages) else ()
        last = {"target": target.chunk(2)[replica]} if any(stage.is_last for stage in stages) else {}
        schedule.step(*args, **last)
    expected = dict(zip(whole.parameters(), sums, strict=True))
    return [
        (mine, expected[other])
        for stage in stages
        for mine, other in zip(
            stage.submod.parameters(),
            whole[stage.stage_index * size : (stage.stage_index + 1) * size].parameters(),
            strict=True,
        )
    ]


@pytest.mark.parametrize("name", STYLES)
def test_gradients_of_replicas_add_up_over_steps(workers, name):
    workers.run(train, name, ranks=4)
