"""What newer versions of torch have and trainers use already: batches that are split before the step. Ours only."""

import pytest
import torch
from torch import nn

from pipelining.contracts import (
    CPU,
    OURS,
    WIDTH,
    Package,
    assert_gradients,
    gradients,
    layers,
    numbers,
    summed,
    unsplit,
)

pytestmark = pytest.mark.usefixtures("one_rank")

STAGES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
          "DualPipeV": 2}  # fmt: skip
BATCH, MICROBATCHES = 8, 4


class Scaled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *, y):
        return self.inner(torch.relu(x + y))


def pipelined(name, model, **options):
    package = Package(OURS)
    stages = [package.stage.PipelineStage(module, i, len(model), CPU) for i, module in enumerate(model)]
    kind = package.schedule_class(name)
    return kind(stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=summed, scale_grads=False, **options)


@pytest.mark.parametrize("name", STAGES)
def test_a_step_with_microbatches(name):
    model = nn.ModuleList(map(Scaled, layers(STAGES[name])))
    x, y, target = (numbers(seed, BATCH, WIDTH) for seed in (1, 2, 3))
    schedule = pipelined(name, model)
    losses = []
    output = schedule.step(x, y=y, target=target, losses=losses)
    expected = gradients(model)
    model.zero_grad()
    again = []
    found = schedule.step(
        arg_mbs=[(part,) for part in x.chunk(MICROBATCHES)],
        kwarg_mbs=[{"y": part} for part in y.chunk(MICROBATCHES)],
        target_mbs=list(target.chunk(MICROBATCHES)),
        losses=again,
    )
    torch.testing.assert_close(found, output)
    torch.testing.assert_close(torch.stack(again), torch.stack(losses))
    assert_gradients(model, range(STAGES[name]), expected)


@pytest.mark.parametrize("name", STAGES)
def test_an_evaluation_with_microbatches(name):
    model = layers(STAGES[name])
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    expected = unsplit(model, x, target)
    schedule = pipelined(name, model)
    split = {
        "arg_mbs": [(part,) for part in x.chunk(MICROBATCHES)],
        "target_mbs": list(target.chunk(MICROBATCHES)),
    }
    losses = []
    torch.testing.assert_close(schedule.eval(**split, losses=losses), expected.output)
    torch.testing.assert_close(sum(losses), expected.loss)
    assert set(gradients(model).values()) == {None}
    torch.testing.assert_close(schedule.step(**split), expected.output)
    assert_gradients(model, range(STAGES[name]), expected.gradients)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ("x", {"arg_mbs": "parts"}, ValueError, "pass pre-split positional inputs through arg_mbs"),
        ("", {"y": "x", "kwarg_mbs": "empty"}, ValueError, "Unexpected keyword arguments with pre-split inputs: y"),
        ("", {"target": "x", "target_mbs": "tensors"}, ValueError, "pass pre-split targets through target_mbs"),
        ("", {"arg_mbs": "x"}, TypeError, "arg_mbs must be a list"),
        ("", {"arg_mbs": "none"}, ValueError, "Expecting 2 arg_mbs"),
        ("", {"arg_mbs": "parts", "kwarg_mbs": "dict"}, TypeError, "kwarg_mbs must be a list"),
        ("", {"arg_mbs": "tensors"}, TypeError, "arg_mbs must be a list of tuples"),
        ("", {"kwarg_mbs": "tensors"}, TypeError, "kwarg_mbs must be a list of dicts"),
        ("", {"arg_mbs": "parts", "target_mbs": "one"}, ValueError, "Expecting 2 target_mbs"),
    ],
)
def test_what_does_not_go_together(args, kwargs, error, message):
    package = Package(OURS)
    x = numbers(1, 2, WIDTH)
    values = {
        "x": x,
        "parts": [(x,), (x,)],
        "empty": [{}, {}],
        "tensors": [x, x],
        "none": [],
        "dict": {"y": x},
        "one": [x],
    }
    schedule = package.schedules.ScheduleGPipe(package.stage.PipelineStage(nn.Identity(), 0, 1, CPU), 2)
    with pytest.raises(error, match=message):
        schedule.step(*([values[args]] if args else []), **{key: values[value] for key, value in kwargs.items()})


def test_buffers_are_as_they_were():
    """Finding shapes runs the module; also what a hook of the backward writes is taken back."""
    package = Package(OURS)

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("counter", torch.zeros(1))
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x):
            self.counter.add_(1)
            output = self.linear(x) * self.scale
            if output.requires_grad:
                output.register_hook(lambda gradient: self.counter.add_(10) and None)
            return output

    module = Counting()
    schedule = package.schedules.ScheduleGPipe(package.stage.PipelineStage(module, 0, 1, CPU), 1, loss_fn=summed)
    schedule._initialize_stage((numbers(1, 2, WIDTH).requires_grad_(),), {}, target=numbers(2, 2, WIDTH))
    assert module.counter.item() == 0
    torch.testing.assert_close(module.scale, torch.ones(WIDTH))
