"""What is our own in the schedule classes: the engine, when sends end, losses, evaluation, and what is right here."""

import logging
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as upstream

import penstock as ps
import torch_oracle
from penstock.pipelining import schedules
from penstock.pipelining._schedule.orders import interleaved_row, looped_bfs_row, with_bubbles, zbv_row
from penstock.pipelining._schedule.rows import as_schedule
from penstock.pipelining.schedules import _Action
from penstock.pipelining.stage import PipelineStage
from pipelining.contracts import CPU, WIDTH, averaged, gradients, layers, numbers, summed, unsplit

NAMES = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
MICROBATCHES = 4


def row(text):
    return [_Action.from_str("" if cell == "." else cell) for cell in text.split()]


def pipelined(name, model, loss_fn=summed, **options):
    """A schedule with all stages on this rank."""
    stages = [PipelineStage(module, i, len(model), CPU) for i, module in enumerate(model)]
    kind = schedules.get_schedule_class(name)
    return kind(stages[0] if name in ("GPipe", "1F1B") else stages, MICROBATCHES, loss_fn=loss_fn, **options)


# Orders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_orders_have_the_idle_steps_of_torch(name, ranks):
    compared = 0
    for stages in [2] if name == "ZBVZeroBubble" else [1, 2, 3]:
        for microbatches in range(1, 13):
            try:
                theirs = torch_oracle.instance(name, ranks, microbatches, stages).pipeline_order
            except ValueError:
                continue
            ours = {rank: our_row(name, rank, ranks, stages, microbatches) for rank in range(ranks)}
            if name == "InterleavedZeroBubble":
                ours = with_bubbles(ours)
            assert {rank: [*map(str, row)] for rank, row in ours.items()} == {
                rank: [*map(str, row)] for rank, row in theirs.items()
            }
            compared += 1
    assert compared >= 4


def our_row(name, rank, ranks, stages, microbatches):
    if name == "LoopedBFS":
        return looped_bfs_row(rank, ranks, stages, microbatches)
    if name == "ZBVZeroBubble":
        return zbv_row(rank, ranks, microbatches)
    size = microbatches // max(1, microbatches // ranks)
    return interleaved_row(rank, ranks, stages, microbatches, size, zero_bubble=name == "InterleavedZeroBubble")


def test_the_order_of_1f1b_is_the_one_that_runs():
    """torch's counts the microbatches of the last rank from 1."""
    stage = torch_oracle.counting_stage(2, 2)
    order = schedules.Schedule1F1B(stage, 2).pipeline_order
    assert schedules._validate_schedule(order, 2, 2, 2) == {0: 0, 1: 1}
    with pytest.raises(AssertionError):
        upstream._validate_schedule(upstream.Schedule1F1B(stage, 2).pipeline_order, 2, 2, 2)


def test_passes_leave_their_input_alone():
    rows = {1: row("1F0 . 1B0"), 0: row("0F0 . 0B0")}
    before = {rank: list(actions) for rank, actions in rows.items()}
    lowered = schedules._add_send_recv(rows, lambda stage: stage, 2)
    schedules._merge_bw(rows[0])
    assert rows == before
    assert lowered[1] == row("1RECV_F0 1F0 1B0 1SEND_B0")


def test_an_order_that_waits_in_a_circle_is_refused():
    with pytest.raises(AssertionError, match="deadlock") as found:
        schedules._add_send_recv({0: row("0B0 0F0"), 1: row("1F0 1B0")}, lambda stage: stage, 2)
    assert isinstance(found.value, ps.ScheduleError)


@pytest.mark.parametrize(
    ("rows", "message"), [(["0F0 0B0", "1B0"], "0B0.*|1B0"), (["1F0 0F0"], "1F0 needs 0F0")]
)  # fmt: skip
def test_what_nobody_makes_is_reported(rows, message):
    stages = 3 if len(rows) > 1 else 2
    with pytest.raises(AssertionError, match=message):
        schedules._add_send_recv(dict(enumerate(map(row, rows))), lambda stage: min(stage, len(rows) - 1), stages)


def test_actions_that_are_none_are_reported_where_they_stand():
    with pytest.raises(ps.ScheduleError, match="1F, rank 0, step 1"):
        as_schedule({0: [_Action(0, schedules.F, 0), _Action(1, schedules.F)]})


def test_whole_lowered_orders_are_simulated():
    """With sharding and overlaps in them, which torch's simulation does not take."""
    stage = torch_oracle.counting_stage(2, 4)
    found = schedules.ScheduleDualPipeV([stage, stage], 4)._simulate()
    assert {rank: [a for a in actions if a is not None] for rank, actions in found.items()} == (
        schedules.ScheduleDualPipeV([stage, stage], 4).pipeline_order_with_comms
    )


# Steps ----------------------------------------------------------------------------------------------------------------


def test_split_batches_are_taken_as_they_are(one_rank):
    model, x, target = layers(2), numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    expected = unsplit(model, x, target)
    schedule = pipelined("Interleaved1F1B", model, scale_grads=False)
    losses = []
    output = schedule.step(
        arg_mbs=[(part,) for part in x.tensor_split(4)], target_mbs=list(target.tensor_split(4)), losses=losses
    )
    torch.testing.assert_close(output, expected.output)
    torch.testing.assert_close(sum(losses), expected.loss)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected.gradients[name])
    evaluated = schedule.eval(
        arg_mbs=[(part,) for part in x.tensor_split(4)],
        kwarg_mbs=[{}] * 4,
        target_mbs=list(target.tensor_split(4)),
        return_outputs=False,
    )
    assert evaluated is None
    with pytest.raises(ValueError, match="arg_mbs"):
        schedule.step(x, arg_mbs=[(part,) for part in x.tensor_split(4)])
    with pytest.raises(ValueError, match="Expecting 4 arg_mbs but got 2"):
        schedule.step(arg_mbs=[(part,) for part in x.tensor_split(2)])


def test_losses_are_in_the_order_of_microbatches(one_rank):
    """Whatever the order of the last stage is."""
    model, x, target = layers(1), numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    expected = unsplit(model, x, target)
    schedule = schedules._PipelineScheduleRuntime(
        [PipelineStage(model[0], 0, 1, CPU)], 4, loss_fn=summed, scale_grads=False
    )
    schedule._prepare_schedule_with_comms({0: row("0F2 0F0 0B2 0F3 0F1 0B0 0B1 0B3")})
    losses = []
    schedule.step(x, target=target, losses=losses)
    for number, loss in enumerate(losses):
        part = slice(2 * number, 2 * number + 2)
        torch.testing.assert_close(loss, summed(expected.output[part], target[part]))
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected.gradients[name])


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_an_evaluation_leaves_gradients_alone(one_rank, name):
    """torch divides them once more."""
    count = 1 if name in ("GPipe", "1F1B") else 2
    model, x, target = layers(count), numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    schedule = pipelined(name, model, loss_fn=averaged)
    schedule.step(x, target=target)
    before = gradients(model)
    schedule.eval(x, target=target)
    after = gradients(model)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_gradients_of_several_steps_add_up(one_rank, name):
    """torch divides those of the first step again in every later one."""
    count = 1 if name in ("GPipe", "1F1B") else 2
    model, x, target = layers(count), numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    expected = unsplit(model, x, target, averaged)
    schedule = pipelined(name, model, loss_fn=averaged)
    for _ in range(3):
        schedule.step(x, target=target)
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, 3 * expected.gradients[key])


def test_a_failed_step_leaves_nothing_to_the_next(one_rank, caplog):
    class Fragile(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.broken = inner, False

        def forward(self, x):
            if self.broken:
                raise KeyError("broken")
            return self.inner(x)

    model, x, target = layers(2), numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    expected = unsplit(model, x, target)
    fragile = nn.ModuleList(map(Fragile, model))
    schedule = pipelined("Interleaved1F1B", fragile, scale_grads=False)
    schedule.step(x, target=target)
    fragile[1].broken = True
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="Stage 1"):
        schedule.step(x, target=target)
    assert "ERROR HERE" in caplog.text
    assert schedule._internal_losses == []
    assert not schedule.fwd_recv_ops
    assert not schedule.bwd_recv_ops
    fragile[1].broken = False
    model.zero_grad()
    losses = []
    schedule.step(x, target=target, losses=losses)
    torch.testing.assert_close(sum(losses), expected.loss)


def test_a_program_is_made_once_and_anew_when_its_order_changes(one_rank, monkeypatch):
    made = Counter()
    original = schedules._PipelineScheduleRuntime._program.__globals__["program_of_order"]

    def counted(*args, **kwargs):
        made["programs"] += 1
        return original(*args, **kwargs)

    monkeypatch.setitem(schedules._PipelineScheduleRuntime._program.__globals__, "program_of_order", counted)
    model, x, target = layers(2), numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    schedule = pipelined("Interleaved1F1B", model)
    schedule.step(x, target=target)
    assert made["programs"] == 2  # by methods, to check the order before ranks talk, then natively
    for _ in range(2):
        schedule.step(x, target=target)
    assert made["programs"] == 2
    seen = []
    schedule.register_custom_function(schedules.REDUCE_GRAD, lambda action, ctx: seen.append(action))
    schedule.step(x, target=target)
    assert made["programs"] == 3
    assert seen == row("1REDUCE_GRAD 0REDUCE_GRAD")
    schedule.pipeline_order_with_comms[0].remove(row("1REDUCE_GRAD")[0])
    seen.clear()
    schedule.step(x, target=target)
    assert seen == row("0REDUCE_GRAD")
    schedule.eval(x, target=target)
    assert made["programs"] == 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Interleaved1F1B", {"PP:0F0", "PP:1B3", "PP:0REDUCE_GRAD"}), ("GPipe", {"Forward 0", "Backward 3"})],
)
def test_a_profiler_shows_actions(one_rank, name, expected):
    model, x, target = layers(1 if name == "GPipe" else 2), numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    schedule = pipelined(name, model)
    schedule.step(x, target=target)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        schedule.step(x, target=target)
    shown = Counter(event.name for event in profile.events())
    assert all(shown[name] == 1 for name in expected)


def test_a_schedule_goes_when_nobody_refers_to_it(one_rank):
    """Without the collector of cycles: what is compiled does not refer to the schedule."""
    import gc
    import weakref

    model, x, target = layers(2), numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    schedule = pipelined("Interleaved1F1B", model)
    schedule.step(x, target=target)
    gone = weakref.ref(schedule)
    gc.disable()
    try:
        del schedule
        assert gone() is None
    finally:
        gc.enable()


# Orders of one's own --------------------------------------------------------------------------------------------------


class Zigzag(schedules.PipelineScheduleMulti):
    """Neighbours on one rank, split and whole backwards, an order filled in by hand."""

    def __init__(self, stages, microbatches, **options):
        super().__init__(stages, microbatches, **options)
        self.pipeline_order = {0: row("0F0 1F0 . 2F0 2B0 0F1 1I0 1F1 0B0 1W0 2F1 2I1 2W1 1B1 0I1 0W1")}
        self._validate_and_set_stage_mapping(self.pipeline_order)


def test_an_order_of_computations_runs(one_rank):
    model, x, target = layers(3), numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    expected = unsplit(model, x, target)
    stages = [PipelineStage(module, i, 3, CPU) for i, module in enumerate(model)]
    schedule = Zigzag(stages, 2, loss_fn=summed, scale_grads=False, use_full_backward=False)
    losses = []
    output = schedule.step(x, target=target, losses=losses)
    torch.testing.assert_close(output, expected.output)
    torch.testing.assert_close(sum(losses), expected.loss)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected.gradients[name])
    torch.testing.assert_close(schedule.eval(x, target=target), expected.output)
    with pytest.raises(TypeError, match="target="):
        schedule.eval(x)
