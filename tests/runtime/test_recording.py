import time

import pytest
import torch

import penstock as ps
from penstock.errors import RunError
from penstock.ir.actions import ComputationType
from penstock.runtime import Pipeline, run_in_threads

FORWARD, BACKWARD = 0.02, 0.03


class _Slow(torch.autograd.Function):
    """Takes the time of a forward and of a backward, in sleep."""

    @staticmethod
    def forward(context, value, weight):
        time.sleep(FORWARD)
        context.save_for_backward(value, weight)
        return value * weight

    @staticmethod
    def backward(context, gradient):
        value, weight = context.saved_tensors
        time.sleep(BACKWARD)
        return gradient * weight, (gradient * value).sum()


class Sleeper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, value):
        return _Slow.apply(value, self.weight)


def recorded(rank, ranks, schedule, steps=3, *, group=None, transport=None):
    """Steps of stages that sleep: what was recorded, on this rank."""
    stages = {stage: Sleeper() for stage in schedule.placement.stages_of(rank)}
    pipe = Pipeline(stages, schedule, loss_fn=torch.nn.functional.mse_loss, group=group, transport=transport)
    batch = torch.ones(schedule.microbatches, 4)
    given = [batch] if pipe.has_first else []
    try:
        pipe.step(*given, target=torch.zeros_like(batch))
        with pipe.recording() as record:
            for _ in range(steps):
                pipe.step(*given, target=torch.zeros_like(batch))
        before = [stage.module.weight.grad.clone() for stage in pipe.stages.values()]
        pipe.step(*given, target=torch.zeros_like(batch))  # it goes on as before
        after = [stage.module.weight.grad for stage in pipe.stages.values()]
        ratio = [float(now / then) for now, then in zip(after, before, strict=True)]
    finally:
        pipe.close()
    spans = [(str(timed.action), timed.begin, timed.end, timed.waited) for timed in record.steps[-1]]
    return record.costs(), record.makespan, record.busy, record.idle, record.ends, spans, ratio


@pytest.mark.parametrize(("name", "each"), [("1F1B", 1), ("Interleaved1F1B", 2), ("DualPipeV", 2), ("GPipe", 1)])
def test_prediction_and_measurement_agree(workers, name, each):
    schedule = ps.build(name, ranks=2, microbatches=4, stages_per_rank=each)
    for _ in range(4):  # on a busy machine a sleep can take much longer than asked for
        (costs, makespan, busy, idle, ends, spans, ratio), other = workers.run(recorded, schedule, ranks=2)
        predicted = ps.simulate(schedule, costs)
        if predicted.makespan == pytest.approx(makespan, rel=0.1):
            break
    assert (costs, makespan, busy, idle, ends) == other[:5]
    assert predicted.makespan == pytest.approx(makespan, rel=0.15)
    assert predicted.busy == pytest.approx(busy, rel=0.15)
    assert predicted.idle == pytest.approx(idle, abs=0.15 * makespan)
    assert max(ends) == makespan
    for stage in range(schedule.stages):
        assert costs.per_stage("forward", schedule.stages)[stage] == pytest.approx(FORWARD, rel=0.25)
        assert costs.per_stage("backward", schedule.stages)[stage] == pytest.approx(BACKWARD, rel=0.25)
    assert all(begin <= end and 0 <= waited <= end - begin for _, begin, end, waited in spans)
    assert busy == pytest.approx([schedule.microbatches * each * (FORWARD + BACKWARD)] * 2, rel=0.25)
    first = next(waited for text, _, _, waited in other[5] if text == "1F0")
    assert first == pytest.approx(FORWARD, abs=0.6 * FORWARD)  # it waits for 0F0, and that is none of its own time
    leaves = [str(leaf) for action in ps.lower(schedule).actions[0] for leaf in action.leaves]
    left_out = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    expected = [text for text in leaves if not text.endswith(left_out)]
    found = [text for text, *_ in spans]
    assert sorted(found) == sorted(expected)
    # Receives may be posted earlier than they stand.
    assert [text for text in found if "RECV" not in text] == [text for text in expected if "RECV" not in text]
    assert ratio == pytest.approx([5 / 4] * each)  # five equal steps, after four


def test_a_backward_in_halves():
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=3)
    found = run_in_threads(lambda transport: recorded(transport.rank, 2, schedule, steps=1, transport=transport), 2)
    costs = found[0][0]
    assert found[1][0] == costs
    assert costs.backward is None
    for field in ("forward", "backward_input", "backward_weight"):
        assert all(value > 0 for value in costs.per_stage(field, 4))


class Napper(torch.nn.Module):
    """Sleeps in its forward."""

    def __init__(self, seconds):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, value):
        time.sleep(self.seconds)
        return value * self.weight


@pytest.mark.parametrize("warm", [True, False])
def test_waiting_for_a_slow_stage_is_no_work_of_the_next(warm):
    """Neither after a step without a clock nor in the very first one; and no clock stays behind."""
    schedule = ps.build("1F1B", ranks=2, microbatches=4)

    def run(transport):
        stages = {transport.rank: Napper([0.05, 0.001][transport.rank])}
        pipe = Pipeline(stages, schedule, loss_fn=torch.nn.functional.mse_loss, transport=transport)
        batch = torch.ones(4, 4)
        given = [batch] if pipe.has_first else []
        if warm:
            pipe.step(*given, target=batch)
        with pipe.recording() as record:
            for _ in range(2):
                pipe.step(*given, target=batch)
        pipe.step(*given, target=batch)
        clocks = [edge for edge in pipe._programs.edges.values() if edge._transport is not transport]
        return record.costs().forward, clocks, pipe.transport is transport

    for (slow, quick), clocks, same in run_in_threads(run, 2):
        assert 0.05 <= slow < 0.075
        assert 0.001 <= quick < 0.02
        assert (clocks, same) == ([], True)


@pytest.mark.parametrize("warm", [True, False])
def test_a_function_that_is_registered_while_recording(warm):
    schedule = ps.build("GPipe", ranks=1, microbatches=2)
    pipe = Pipeline({0: Sleeper()}, schedule, loss_fn=torch.nn.functional.mse_loss)
    batch = torch.ones(2, 1)
    seen = []

    def noted(action, context):
        seen.append(str(action))
        context.run(action)

    if warm:
        pipe.step(batch, target=batch)
    with pipe.recording() as record:
        pipe.step(batch, target=batch)
        pipe.register_custom_function(ComputationType.FORWARD, noted)
        pipe.step(batch, target=batch)
    assert [len(step) for step in record.steps] == [4, 4]
    assert seen == ["0F0", "0F1"]
    pipe.step(batch, target=batch)
    assert seen == ["0F0", "0F1"] * 2
    pipe.close()


def test_nothing_is_recorded_twice_or_for_nothing():
    schedule = ps.build("GPipe", ranks=1, microbatches=1)
    pipe = Pipeline({0: Sleeper()}, schedule, loss_fn=torch.nn.functional.mse_loss)
    with pipe.recording() as record:
        with pytest.raises(RunError, match="being recorded already"), pipe.recording():
            pass
        pipe.eval(torch.ones(1, 1))
    assert record.steps == []
    with pytest.raises(RunError, match="no step was recorded"):
        record.costs()
    assert pipe._record is None
    pipe.close()


def test_a_step_that_fails_ends_the_recording():
    schedule = ps.build("GPipe", ranks=1, microbatches=1)
    pipe = Pipeline({0: Sleeper()}, schedule, loss_fn=lambda output, target: 1 / 0)
    transport = pipe.transport
    with pytest.raises(ps.StepError, match="division by zero"), pipe.recording():
        pipe.step(torch.ones(1, 1), target=torch.ones(1, 1))
    assert (pipe._record, pipe.transport) == (None, transport)
    pipe.close()
