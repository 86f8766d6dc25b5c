"""Functions of the user's own that leave out what they have to do."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import StepError
from penstock.runtime import Pipeline, run_in_threads

FORWARD, OVERLAP = ps.ComputationType.FORWARD, ps.ComputationType.OVERLAP_F_B


def run(schedule, kind, function):
    modules = [nn.Linear(3, 3) for _ in range(schedule.stages)]
    x, y = torch.randn(12, 3), torch.randn(12, 3)

    def worker(transport):
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        with Pipeline(mine, schedule, loss_fn=functional.mse_loss, transport=transport) as pipe:
            pipe.register_custom_function(kind, function)
            pipe.eval(x[:1])
            return pipe.step(x, target=y)

    return run_in_threads(worker, schedule.ranks, timeout=60)


@pytest.mark.parametrize(("runs", "forgets"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_overlap_of_which_a_part_is_forgotten(runs, forgets, ranks):
    schedule = ps.build("DualPipeV", ranks=ranks, microbatches=6)
    first = {
        row_number: next(action for action in row if action is not None and action.sub_actions)
        for row_number, row in enumerate(schedule.actions)
    }

    def overlap(action, context):
        context.run(action.sub_actions[runs])

    with pytest.raises(StepError, match="returned without running") as caught:
        run(schedule, OVERLAP, overlap)
    action = first[caught.value.rank]
    part = action.sub_actions[forgets]
    assert (
        f"the function registered for OVERLAP_F_B returned without running {part}, a part of {action} "
        f"(stage {part.stage_index}, microbatch {part.microbatch_index}): call context.run(part)"
    ) in str(caught.value)


def test_the_backward_of_the_first_stage():
    """Nobody waits for what it gives."""
    with pytest.raises(StepError, match=r"without running 0B0 \(stage 0, microbatch 0\)"):
        run(ps.build("1F1B", ranks=1, microbatches=2), ps.ComputationType.FULL_BACKWARD, lambda *_: None)


def test_a_forward():
    with pytest.raises(StepError, match=r"without running 0F0 \(stage 0, microbatch 0\)"):
        run(
            ps.build("1F1B", ranks=1, microbatches=2),
            FORWARD,
            lambda action, context: None if torch.is_grad_enabled() else context.run(action),
        )


def test_an_evaluation_of_fewer_samples_than_microbatches():
    """What has no microbatch does nothing, and nothing is forgotten."""
    run(ps.build("1F1B", ranks=2, microbatches=4), FORWARD, lambda action, context: context.run(action))
