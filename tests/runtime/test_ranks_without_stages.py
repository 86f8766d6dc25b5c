"""A rank on which the placement puts no stage takes part in every call."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import DistributedTransport, Pipeline, run_in_threads

#: The second of three ranks has no stage; in the other one, the last has none.
PLACEMENTS = [(0, 2, 0), (0, 1, 1)]


def schedule_of(rank_of):
    """Two microbatches through three stages, forward first."""
    rows = [[] for _ in range(3)]
    for letter, stages in (("F", (0, 1, 2)), ("B", (2, 1, 0))):
        for microbatch in range(2):
            for stage in stages:
                rows[rank_of[stage]].append(f"{stage}{letter}{microbatch}")
    return ps.Schedule(rows, placement=ps.Placement(rank_of, 3))


def layers():
    torch.manual_seed(0)
    return [nn.Linear(3, 3) for _ in range(3)]


def batch():
    chance = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, generator=chance), torch.randn(4, 3, generator=chance)


def everything(transport, rank_of, modules):
    """Each call of a pipeline, on one rank."""
    schedule = schedule_of(rank_of)
    mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
    x, y = batch()
    losses, evaluated = [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    options = {"transport": transport, "loss_fn": functional.mse_loss, "share_losses": True, "scaler": scaler}
    with Pipeline(mine, schedule, **options) as pipe:
        pipe.step(x, target=y, losses=losses)
        parameters = [parameter for module in mine.values() for parameter in module.parameters()]
        if mine:
            optimizer = torch.optim.SGD(parameters, lr=0.0)
            scaler.unscale_(optimizer)
        norm = pipe.clip_grad_norm_(0.5)
        if mine:
            scaler.step(optimizer)
            scaler.update()
        pipe.eval(x, target=y, losses=evaluated)
        parity = pipe.check_parity(x, target=y)
        with pipe.recording() as record:
            for _ in range(2):
                pipe.step(x, target=y)
        return losses, evaluated, norm, str(parity), len(record.busy), record.costs()


def check(results):
    modules, (x, y) = layers(), batch()
    loss = functional.mse_loss(nn.Sequential(*modules)(x), y)
    loss.backward()
    expected = nn.utils.get_total_norm([one.grad for module in modules for one in module.parameters()])
    assert len({parity for *_, parity, _, _ in results}) == 1
    for losses, evaluated, norm, _, busy, costs in results:
        torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())
        torch.testing.assert_close(losses, evaluated)
        torch.testing.assert_close(norm, expected)
        assert busy == 3
        assert costs == results[0][-1]


@pytest.mark.parametrize("rank_of", PLACEMENTS)
def test_every_call(rank_of):
    modules = layers()
    check(run_in_threads(lambda transport: everything(transport, rank_of, modules), 3, timeout=60))


def in_process(rank, ranks, rank_of, *, group):
    torch.set_num_threads(1)
    return everything(DistributedTransport(group, timeout=60), rank_of, layers())


@pytest.mark.parametrize("rank_of", PLACEMENTS)
def test_every_call_in_processes(workers, rank_of):
    check(workers.run(in_process, rank_of, ranks=3))
