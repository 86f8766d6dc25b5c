"""What a profiler shows of a step: the ranges that torch's classes have, and no others."""

import logging

import pytest
from torch.profiler import ProfilerActivity, profile

from pipelining.contracts import CPU, OURS, WIDTH, Package, averaged, layers, numbers

pytestmark = pytest.mark.usefixtures("one_rank")

MICROBATCHES = 4
#: How the names begin that schedules give.
BEGINNINGS = ("Forward ", "Backward ", "PP:", "wait for")


def step(package, name, loss_fn=averaged):
    model = layers(1 if name in ("GPipe", "1F1B") else 2)
    stages = [package.stage.PipelineStage(module, i, len(model), CPU) for i, module in enumerate(model)]
    schedule = package.schedule_class(name)(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=loss_fn)
    schedule.step(numbers(1, 8, WIDTH), target=numbers(2, 8, WIDTH))


EXPECTED = {
    "1F1B": [],
    "GPipe": [f"{name} {number}" for name in ("Backward", "Forward") for number in range(MICROBATCHES)],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_ranges_of_one_stage_per_rank(package, name):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(package, name)
    assert sorted(event.name for event in seen.events() if event.name.startswith(BEGINNINGS)) == EXPECTED[name]


def test_a_failure_is_logged_under_a_profiler_as_well(caplog):
    def refuse(output, target):
        raise ArithmeticError

    with caplog.at_level(logging.ERROR), profile(activities=[ProfilerActivity.CPU]), pytest.raises(ArithmeticError):
        step(Package(OURS), "Interleaved1F1B", refuse)
    assert "ScheduleInterleaved1F1B failed at step" in caplog.text
