"""Outputs that share memory: the same tensor twice, or a tensor and a view of it.

On one rank they still do in the next stage. Between ranks each is sent for itself, so a stage that modifies one of them
in place, where the unsplit model would have modified both, is refused.
"""

import pytest
import torch
from torch import nn

from penstock.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from pipelining.contracts import CPU, WIDTH, fake_group, gradients, numbers, summed
from runtime.workers import WorkerError

MICROBATCHES = 2
#: What the first stage makes of its hidden state.
SHARED = {
    "twice": lambda hidden: (hidden, hidden),
    "view": lambda hidden: (hidden, hidden.view(-1, 2, WIDTH // 2)),
    "detached": lambda hidden: (hidden, hidden.detach()),
}
SEPARATE = {
    "clone": lambda hidden: (hidden, hidden.clone()),
    "parts": lambda hidden: hidden.repeat(1, 2).chunk(2, 1),
    "detached clone": lambda hidden: (hidden, hidden.detach().clone()),
}
OUTPUTS = SHARED | SEPARATE


class Begin(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.outputs = outputs

    def forward(self, x):
        return OUTPUTS[self.outputs](self.linear(x))


class HandOn(nn.Module):
    def forward(self, hidden, other):
        return hidden, other


class End(nn.Module):
    def __init__(self, *, modifies):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.modifies = modifies

    def forward(self, hidden, other):
        if self.modifies:
            other.mul_(2)
        return self.linear(hidden) + other.reshape(hidden.shape)


def model(outputs, *, modifies, between=0):
    torch.manual_seed(0)
    return nn.ModuleList([Begin(outputs), *[HandOn() for _ in range(between)], End(modifies=modifies)])


def unsplit(model, x, target):
    for layer in model:
        x = layer(*x) if isinstance(x, tuple) else layer(x)
    loss = summed(x, target)
    if torch.is_grad_enabled():
        loss.backward()
    found = gradients(model)
    model.zero_grad()
    return x.detach(), loss.detach(), found


def assert_step(model, stages, schedule, *, trains):
    """A step gives these stages what the unsplit model gives."""
    x, target = numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    with torch.set_grad_enabled(trains):
        output, loss, expected = unsplit(model, x, target)
    losses = []
    args = (x,) if any(stage.is_first for stage in stages) else ()
    last = {"target": target, "losses": losses} if any(stage.is_last for stage in stages) else {}
    with torch.set_grad_enabled(trains):
        found = (schedule.step if trains else schedule.eval)(*args, **last)
    if last:
        torch.testing.assert_close(found, output)
        torch.testing.assert_close(sum(losses), loss)
    for name, gradient in gradients(model).items() if trains else ():
        if any(name.startswith(f"{stage.stage_index}.") for stage in stages):
            torch.testing.assert_close(gradient, expected[name])


def run_ranks(rank, ranks, outputs, modifies, trains, examples, between=0, *, group):
    """A stage per rank; ``examples`` are of what the stages before the last return, None to infer that."""
    torch.set_num_threads(1)
    parts = model(outputs, modifies=modifies, between=between)
    given = {}
    if examples is not None:
        x, results = torch.empty(8 // MICROBATCHES, WIDTH), OUTPUTS[examples](torch.empty(8 // MICROBATCHES, WIDTH))
        last = rank == ranks - 1
        given = {"input_args": results if rank else x, "output_args": x if last else results}
    stage = PipelineStage(parts[rank], rank, ranks, CPU, group=group, **given)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=summed, scale_grads=False)
    for _ in range(2):
        assert_step(parts, [stage], schedule, trains=trains)
        parts.zero_grad()


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_stages_of_one_rank_share_what_the_unsplit_model_shares(outputs):
    with fake_group():
        for trains in (True, False):
            # A stage may modify an input in place that needs no gradient.
            parts = model(outputs, modifies=not trains or "detached" in outputs, between=1)
            stages = [PipelineStage(module, index, 3, CPU) for index, module in enumerate(parts)]
            schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=summed, scale_grads=False)
            assert_step(parts, stages, schedule, trains=trains)


def test_outputs_that_nobody_modifies_may_share_memory(workers):
    for outputs in OUTPUTS:
        for trains in (True, False):
            for examples in (None, outputs):
                workers.run(run_ranks, outputs, False, trains, examples, ranks=2)


def test_inputs_that_share_nothing_may_be_modified(workers):
    for outputs in SEPARATE:
        for examples in (None, outputs):
            workers.run(run_ranks, outputs, True, False, examples, ranks=2)
    workers.run(run_ranks, "detached clone", True, True, None, ranks=2)


@pytest.mark.parametrize(
    ("outputs", "trains", "examples"),
    [
        ("view", False, None),
        ("detached", True, None),
        ("view", False, "view"),
    ],
)
def test_a_stage_that_modifies_one_of_them_is_refused(workers, outputs, trains, examples):
    said = r"stage 1 microbatch 0: the module modified input 1 in place.* inputs 0 and 1 .*clone"
    with pytest.raises(WorkerError, match=said):
        workers.run(run_ranks, outputs, True, trains, examples, ranks=2)


def test_a_stage_that_gets_them_through_another_is_refused(workers):
    with pytest.raises(WorkerError, match=r"stage 2 microbatch 0: the module modified input 1 in place"):
        workers.run(run_ranks, "twice", True, False, None, 1, ranks=3)


def test_outputs_that_share_memory_where_the_examples_do_not_are_refused(workers):
    said = r"stage 0 microbatch 0: outputs 0 and 1 share memory, .*output_args"
    with pytest.raises(WorkerError, match=said):
        workers.run(run_ranks, "twice", True, False, "clone", ranks=2)


def run_training_and_evaluation(rank, ranks, *, group):
    """Examples that share nothing: training shows that the next stage leaves the outputs alone."""
    torch.set_num_threads(1)
    parts, example = model("twice", modifies=False), torch.empty(8 // MICROBATCHES, WIDTH)
    given = {"input_args": (example, example.clone()) if rank else example}
    given["output_args"] = example if rank else (example, example.clone())
    stage = PipelineStage(parts[rank], rank, ranks, CPU, group=group, **given)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=summed, scale_grads=False)
    for trains in (True, False, True):
        assert_step(parts, [stage], schedule, trains=trains)
        parts.zero_grad()


def test_outputs_that_require_a_gradient_in_the_next_stage_may_share_memory(workers):
    workers.run(run_training_and_evaluation, ranks=2)


def run_inference_mode(rank, ranks, *, group):
    torch.set_num_threads(1)
    parts = model("twice", modifies=True)
    schedule = ScheduleGPipe(PipelineStage(parts[rank], rank, ranks, CPU, group=group), MICROBATCHES)
    with torch.inference_mode():
        schedule.step(*([] if rank else [numbers(1, 8, WIDTH)]))


def test_changes_are_counted_in_inference_mode(workers):
    with pytest.raises(WorkerError, match=r"stage 1 microbatch 0: the module modified input 1 in place"):
        workers.run(run_inference_mode, ranks=2)
