import time

import pytest
import torch

import penstock as ps
from penstock.errors import RunError
from penstock.ir.actions import ComputationType
from penstock.ir.edges import chain
from penstock.runtime import Pipeline, run_in_threads
from runtime.logical_time import LogicalTime

FORWARD, BACKWARD = 0.02, 0.03


class _Slow(torch.autograd.Function):
    """Takes its time in the forward and in the backward."""

    @staticmethod
    def forward(context, value, weight, take, forward, backward):
        take(forward)
        context.take, context.seconds = take, backward
        context.save_for_backward(value, weight)
        return value * weight

    @staticmethod
    def backward(context, gradient):
        value, weight = context.saved_tensors
        context.take(context.seconds)
        return gradient * weight, (gradient * value).sum(), None, None, None


class Sleeper(torch.nn.Module):
    def __init__(self, take=time.sleep, forward=FORWARD, backward=BACKWARD):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.times = take, forward, backward

    def forward(self, value):
        return _Slow.apply(value, self.weight, *self.times)


def recorded(rank, ranks, schedule, steps=3, sleeper=lambda stage: Sleeper(), *, group=None, transport=None):
    """Record steps of stages that sleep, on this rank."""
    stages = {stage: sleeper(stage) for stage in schedule.placement.stages_of(rank)}
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


CASES = [("1F1B", 1), ("Interleaved1F1B", 2), ("DualPipeV", 2), ("GPipe", 1)]
HALVES = [("ZBVZeroBubble", 2), ("InterleavedZeroBubble", 2)]


@pytest.mark.parametrize(("name", "each"), CASES + HALVES)
@pytest.mark.parametrize("uneven", [False, True])
def test_prediction_and_measurement_agree(monkeypatch, name, each, uneven):
    """Exactly, up to rounding, where only the stages take time."""
    schedule = ps.build(name, ranks=2, microbatches=4, stages_per_rank=each)
    clocks = LogicalTime()
    takes = [1 + (stage % 3 if uneven else 0) for stage in range(schedule.stages)]

    def worker(transport):
        return recorded(
            transport.rank,
            2,
            schedule,
            sleeper=lambda stage: Sleeper(clocks.take, takes[stage], 2 * takes[stage]),
            transport=transport,
        )

    (costs, makespan, busy, idle, ends, spans, ratio), other = clocks.run(worker, 2, monkeypatch)
    assert (costs, makespan, busy, idle, ends) == other[:5]
    assert costs.per_stage("forward", schedule.stages) == pytest.approx(takes)
    fields = ["backward"] if costs.backward is not None else ["backward_input", "backward_weight"]
    backward = sum(costs.per_stage(field, schedule.stages) for field in fields)
    assert backward == pytest.approx([2 * each for each in takes])
    predicted = ps.simulate(schedule, costs)
    assert predicted.makespan == pytest.approx(makespan)
    assert predicted.busy == pytest.approx(busy)
    assert predicted.idle == pytest.approx(idle)
    begins = {str(span.action): (span.start, span.end) for span in predicted.spans}
    for text, begin, end, waited in [*spans, *other[5]]:
        if text in begins:
            assert (begin + waited, end) == pytest.approx(begins[text]), text
    waited = {text: waited for text, _, _, waited in other[5]}
    assert waited["1F0"] == pytest.approx(takes[0])  # it waits for 0F0, which does not count as its own time
    assert ratio == pytest.approx([5 / 4] * each)  # five equal steps, after four


@pytest.mark.parametrize(("name", "each"), CASES)
def test_a_recording_of_processes(workers, name, each):
    """A sleep may take longer than requested, but never less."""
    schedule = ps.build(name, ranks=2, microbatches=4, stages_per_rank=each)
    (costs, makespan, busy, idle, ends, spans, ratio), other = workers.run(recorded, schedule, ranks=2)
    assert (costs, makespan, busy, idle, ends) == other[:5]
    assert max(ends) == makespan
    for field, least in (("forward", FORWARD), ("backward", BACKWARD)):
        assert min(costs.per_stage(field, schedule.stages)) >= least
    assert min(busy) >= schedule.microbatches * each * (FORWARD + BACKWARD)
    # The first half runs the whole function, since it cannot be split.
    least = ps.Costs(forward=FORWARD, backward=BACKWARD, backward_input=BACKWARD, backward_weight=0.0)
    assert makespan >= ps.simulate(schedule, least).makespan
    assert all(begin <= end and 0 <= waited <= end - begin for _, begin, end, waited in spans)
    leaves = [str(leaf) for action in ps.lower(schedule).actions[0] for leaf in action.parts]
    left_out = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    expected = [text for text in leaves if not text.endswith(left_out)]
    found = [text for text, *_ in spans]
    assert sorted(found) == sorted(expected)
    # Receives may be posted ahead of their place.
    assert [text for text in found if "RECV" not in text] == [text for text in expected if "RECV" not in text]
    assert ratio == pytest.approx([5 / 4] * each)


def test_a_backward_in_halves():
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=3)
    found = run_in_threads(lambda transport: recorded(transport.rank, 2, schedule, steps=1, transport=transport), 2)
    costs = found[0][0]
    assert found[1][0] == costs
    assert costs.backward is None
    for field in ("forward", "backward_input", "backward_weight"):
        assert all(value > 0 for value in costs.per_stage(field, 4))


@pytest.mark.parametrize("warm", [True, False])
def test_waiting_for_a_slow_stage_does_not_count_as_work(monkeypatch, warm):
    """Neither after a step that was not recorded nor in the very first one; and nothing stays timed afterwards."""
    schedule = ps.build("1F1B", ranks=2, microbatches=4)
    clocks = LogicalTime()

    def worker(transport):
        stages = {transport.rank: Sleeper(clocks.take, [50, 1][transport.rank], 0)}
        pipe = Pipeline(stages, schedule, loss_fn=torch.nn.functional.mse_loss, transport=transport)
        batch = torch.ones(4, 4)
        given = [batch] if pipe.has_first else []
        if warm:
            pipe.step(*given, target=batch)
        with pipe.recording() as record:
            for _ in range(2):
                pipe.step(*given, target=batch)
        pipe.step(*given, target=batch)
        timed = [link for link in pipe._engine.programs.links.by_ends.values() if link._channel is not transport]
        return record.costs().forward, timed, pipe.transport is transport

    for forward, timed, same in clocks.run(worker, 2, monkeypatch):
        assert forward == pytest.approx((50, 1))
        assert (timed, same) == ([], True)


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


def test_a_recording_within_a_recording_or_without_steps():
    schedule = ps.build("GPipe", ranks=1, microbatches=1)
    pipe = Pipeline({0: Sleeper()}, schedule, loss_fn=torch.nn.functional.mse_loss)
    with pipe.recording() as record:
        with pytest.raises(RunError, match="already being recorded"), pipe.recording():
            pass
        pipe.eval(torch.ones(1, 1))
    assert record.steps == []
    with pytest.raises(RunError, match="no step was recorded"):
        record.costs()
    assert pipe._engine.recording is None
    pipe.close()


def test_a_step_that_fails_ends_the_recording():
    schedule = ps.build("GPipe", ranks=1, microbatches=1)
    pipe = Pipeline({0: Sleeper()}, schedule, loss_fn=lambda output, target: 1 / 0)
    transport = pipe.transport
    with pytest.raises(ps.StepError, match="division by zero"), pipe.recording():
        pipe.step(torch.ones(1, 1), target=torch.ones(1, 1))
    assert (pipe._engine.recording, pipe.transport) == (None, transport)
    pipe.close()


SKIPS = [*chain(4), ps.Edge(0, (3,)), ps.Edge(0, (2,), gradient=False)]


class Passing(torch.nn.Module):
    """Returns as many tensors of four numbers per sample as edges start at it."""

    def __init__(self, values):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.values = values

    def forward(self, *inputs):
        hidden = self.layer(sum(inputs))
        return tuple(hidden * number for number in range(1, self.values + 1)) if self.values > 1 else hidden


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
def test_bytes_are_counted_by_link(shapes):
    """One on which both stages are on one rank sends nothing; a simulation predicts the same."""
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=3)
    assert schedule.placement.rank_of == (0, 1, 1, 0)

    def worker(transport):
        stages = {index: Passing(3 if index == 0 else 1) for index in schedule.placement.stages_of(transport.rank)}
        with Pipeline(
            stages,
            schedule,
            edges=SKIPS,
            loss_fn=torch.nn.functional.mse_loss,
            transport=transport,
            shapes=shapes,
        ) as pipe:
            with pipe.recording() as record:
                pipe.step(torch.ones(6, 4), target=torch.ones(6, 4))
            return record.bytes_between, record.bytes_sent, [str(timed.action) for timed in record.steps[0]]

    first, second = run_in_threads(worker, 2)
    size = 6 * 4 * torch.get_default_dtype().itemsize
    header = 3 * 512 if shapes == "per_microbatch" else 0
    expected = {(0, 1): size, (0, 2): size, (2, 3): size}
    assert {ends: sent - header for ends, sent in first[0].items() if ends[0] < ends[1]} == expected
    assert {ends: sent for ends, sent in first[0].items() if ends[0] > ends[1]} == {(1, 0): size, (3, 2): size}
    assert first[:2] == second[:2]
    assert {"0SEND_F0", "0SEND_F1@2"} <= set(first[2])
    assert "2RECV_F0@0" in second[2]
    costs = ps.Costs(activation_bytes=size / 3, bandwidth=1)
    predicted = ps.simulate(schedule.with_edges(SKIPS), costs).bytes_sent
    assert first[1] == tuple(sent + header * (2, 1)[rank] for rank, sent in enumerate(predicted))
