"""``verify=False``: a schedule runs as it is, whatever a proof would say."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ScheduleError, VerificationError
from penstock.runtime import Pipeline, run_in_threads

#: The first stage never computes the gradients of its weights: a proof misses 0W0 and 0W1.
WITHOUT_WEIGHTS = [["0F0", "0F1", "0I0", "0I1"], ["1F0", "1B0", "1F1", "1B1"]]


def run(schedule, **options):
    """The gradients of both stages after a step; outputs are right."""
    torch.manual_seed(0)
    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    x, y = torch.randn(4, 3), torch.randn(4, 3)

    def worker(transport):
        mine = {transport.rank: modules[transport.rank]}
        with Pipeline(mine, schedule, loss_fn=functional.mse_loss, transport=transport, **options) as pipe:
            return pipe.eval(x), pipe.step(x, target=y)

    _, (evaluated, output) = run_in_threads(worker, 2, timeout=60)
    expected = modules[1](modules[0](x))
    torch.testing.assert_close((evaluated, output), (expected, expected))
    (gradient,) = torch.autograd.grad(functional.mse_loss(expected, y), [modules[1].weight])
    torch.testing.assert_close(modules[1].weight.grad, gradient)
    return modules[0].weight.grad


@pytest.mark.parametrize("lowered", [False, True])
def test_a_schedule_that_is_not_complete(lowered):
    schedule = ps.Schedule(WITHOUT_WEIGHTS)
    if lowered:
        schedule = ps.lower(schedule, verify=False)
    with pytest.raises(VerificationError, match="0W0"):
        run(schedule)
    assert run(schedule, verify=False) is None


def test_actions_that_wait_in_a_circle_have_no_order():
    circle = ps.Schedule([["0B0", "0F0"], ["1F0", "1B0"]])
    with pytest.raises(VerificationError):
        ps.lower(circle)
    with pytest.raises(ScheduleError, match=r"check the schedule|run check"):
        ps.lower(circle, verify=False)


def test_lowering_without_a_proof_gives_what_it_gives_with_one():
    for name in ("1F1B", "ZBVZeroBubble", "DualPipeV"):
        schedule = ps.build(name, ranks=3, microbatches=6)
        for options in ({}, {"merge_backward": True}, {"defer_receives": True}, {"max_active_stages": 1}):
            assert ps.lower(schedule, verify=False, **options) == ps.lower(schedule, **options)
