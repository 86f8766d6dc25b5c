"""Functions of the user's that take the place of actions: they drive the stages by themselves."""

import threading

import pytest
import torch

from pipelining.contracts import (
    CPU,
    WIDTH,
    Package,
    assert_gradients,
    fake_group,
    layers,
    no_tensors_in_cycles,
    numbers,
    step_arguments,
    summed,
    unsplit,
)

BATCH, MICROBATCHES = 16, 8


class Driver:
    """What such functions do: wait for what was received, compute, hand over to a neighbour on the same rank."""

    def __init__(self, package):
        self.s = package.schedules
        self.forwards = []
        self.backwards = []
        self.threads = set()

    def stages(self, ctx):
        schedule = ctx.schedule_ref
        assert isinstance(schedule, self.s._PipelineScheduleRuntime)
        return schedule, {stage.stage_index: stage for stage in schedule._stages}

    def receive(self, stages, works, action, neighbour, end):
        if not end and neighbour not in stages:
            key = (action.stage_index, action.microbatch_index)
            assert key in works
            self.s._wait_batch_p2p(works.pop(key))

    def forward(self, action, ctx):
        schedule, stages = self.stages(ctx)
        index, microbatch = action.stage_index, action.microbatch_index
        stage = stages[index]
        self.receive(stages, schedule.fwd_recv_ops, action, index - 1, stage.is_first)
        self.compute_forward(schedule, stages, stage, microbatch, ctx)

    def compute_forward(self, schedule, stages, stage, microbatch, ctx):
        schedule._assert_unsharded(stage)
        output = stage.forward_one_chunk(microbatch, ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch])
        schedule._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
        if stage.stage_index + 1 in stages:
            stages[stage.stage_index + 1].set_local_fwd_input(output, microbatch)
        self.forwards.append((stage.stage_index, microbatch))

    def backward(self, action, ctx):
        schedule, stages = self.stages(ctx)
        index, microbatch = action.stage_index, action.microbatch_index
        stage = stages[index]
        self.receive(stages, schedule.bwd_recv_ops, action, index + 1, stage.is_last)
        self.compute_backward(schedule, stages, stage, microbatch)

    def compute_backward(self, schedule, stages, stage, microbatch, full=True):
        self.threads.add(threading.get_ident())
        schedule._assert_unsharded(stage)
        index = stage.stage_index
        loss = schedule._maybe_get_loss(stage, microbatch)
        schedule.backward_counter[index] += 1
        last = schedule.backward_counter[index] == schedule._n_microbatches
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=full, last_backward=last)
        if index - 1 in stages:
            stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)
        self.backwards.append((index, microbatch, last))

    def pair(self, action, ctx):
        """One after the other."""
        forward, backward = action.sub_actions
        self.forward(forward, ctx)
        self.backward(backward, ctx)

    def pair_in_threads(self, action, ctx):
        """Both at the same time: the backward in a thread of its own."""
        schedule, stages = self.stages(ctx)
        forward, backward = action.sub_actions
        ahead, back = stages[forward.stage_index], stages[backward.stage_index]
        self.receive(stages, schedule.fwd_recv_ops, forward, forward.stage_index - 1, ahead.is_first)
        self.receive(stages, schedule.bwd_recv_ops, backward, backward.stage_index + 1, back.is_last)
        raised = []

        def run():
            try:
                self.compute_backward(schedule, stages, back, backward.microbatch_index)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.compute_forward(schedule, stages, ahead, forward.microbatch_index, ctx)
        thread.join()
        if raised:
            raise raised[0]


def train(rank, ranks, name, kind, *, group):
    """DualPipeV with functions for its forwards and its pairs."""
    package = Package(name)
    s, driver = package.schedules, Driver(Package(name))
    model = layers(2 * ranks)
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    expected = unsplit(model, x, target)
    placement = [rank, 2 * ranks - 1 - rank]
    stages = [package.stage.PipelineStage(model[i], i, 2 * ranks, CPU, group=group) for i in placement]
    schedule = s.ScheduleDualPipeV(stages, MICROBATCHES, loss_fn=summed, scale_grads=False)
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    pairs = sum(action.computation_type == s.OVERLAP_F_B for action in schedule.pipeline_order_with_comms[rank])
    if kind != "pairs in threads":
        schedule.register_custom_function(s.FORWARD, driver.forward)
    if kind == "all":
        schedule.register_custom_function(s.FULL_BACKWARD, driver.backward)
    schedule.register_custom_function(s.OVERLAP_F_B, driver.pair_in_threads if "threads" in kind else driver.pair)
    with no_tensors_in_cycles():
        for _ in range(2):
            model.zero_grad()
            losses = []
            args, kwargs = step_arguments(stages, x, target, losses)
            output = schedule.step(*args, **kwargs)
            assert schedule.fwd_recv_ops == {}
            assert schedule.bwd_recv_ops == {}
    if rank == 0:
        torch.testing.assert_close(output, expected.output)
        torch.testing.assert_close(sum(losses), expected.loss)
    assert_gradients(model, placement, expected.gradients)
    return len(driver.forwards), len(driver.backwards), pairs, len(driver.threads - {threading.get_ident()}) > 0


@pytest.mark.parametrize("kind", ["pairs", "all", "pairs in threads"])
def test_functions_drive_the_stages(package, workers, kind):
    for forwards, backwards, pairs, threads in workers.run(train, package.name, kind, ranks=2):
        assert pairs > 0
        assert forwards == (2 * pairs if kind == "pairs in threads" else 2 * 2 * MICROBATCHES)
        assert backwards == 2 * pairs if kind != "all" else backwards > 2 * pairs
        assert threads == (kind == "pairs in threads")


def backward_from_the_cache(action, ctx):
    """A backward of one's own: from what the forward has left."""
    schedule = ctx.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    index, microbatch = action.stage_index, action.microbatch_index
    stage = stages[index]
    if (index, microbatch) in schedule.bwd_recv_ops:
        schedules_of(schedule)._wait_batch_p2p(schedule.bwd_recv_ops.pop((index, microbatch)))
    outputs, inputs = stage.fwd_cache.pop(microbatch)
    assert all(isinstance(output, torch.Tensor) and output.requires_grad for output in outputs)
    if stage.is_last:
        schedule._maybe_get_loss(stage, microbatch).backward()
    else:
        torch.autograd.backward(outputs, stage._retrieve_recv_grads(microbatch))
    schedule.backward_counter[index] += 1
    stage.bwd_cache[microbatch] = tuple(tensor.grad for tensor in inputs)
    if index - 1 in stages:
        stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)


def schedules_of(schedule):
    """The module that a schedule comes from: its package has one with this name."""
    name = "torch.distributed" if type(schedule).__module__.startswith("torch.") else "penstock"
    return Package(f"{name}.pipelining").schedules


def train_from_the_cache(rank, ranks, name, *, group):
    package, placement = Package(name), [rank, rank + ranks]
    model = layers(2 * ranks)
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    expected = unsplit(model, x, target)
    stages = [package.stage.PipelineStage(model[i], i, 2 * ranks, CPU, group=group) for i in placement]
    schedule = package.schedules.ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=summed, scale_grads=False)
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    schedule.register_custom_function(package.schedules.FULL_BACKWARD, backward_from_the_cache)
    for _ in range(2):
        model.zero_grad()
        args, kwargs = step_arguments(stages, x, target, [])
        schedule.step(*args, **kwargs)
        assert_gradients(model, placement, expected.gradients)
    return True


def test_a_backward_of_ones_own_finds_the_outputs(package, workers):
    assert workers.run(train_from_the_cache, package.name, ranks=2) == [True, True]


# On one rank ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def schedule(package):
    with fake_group():
        model = layers(2)
        stages = [package.stage.PipelineStage(model[i], i, 2, CPU) for i in range(2)]
        yield package.schedules.ScheduleInterleavedZeroBubble(stages, 4, loss_fn=summed)


def test_the_context_has_the_microbatches_of_the_step(package, schedule):
    s = package.schedules
    seen = []
    schedule.register_custom_function(s.REDUCE_GRAD, lambda action, ctx: seen.append((action, ctx)))
    x, target, losses = numbers(1, 8, WIDTH), numbers(2, 8, WIDTH), []
    schedule.step(x, target=target, losses=losses)
    assert sorted(str(action) for action, _ in seen) == ["0REDUCE_GRAD", "1REDUCE_GRAD"]
    _, ctx = seen[0]
    assert isinstance(ctx, s._PipelineContext)
    assert ctx.schedule_ref is schedule
    torch.testing.assert_close(torch.cat([args[0] for args in ctx.arg_mbs]), x)
    assert ctx.kwarg_mbs == [{}] * 4
    torch.testing.assert_close(torch.cat(ctx.target_mbs), target)
    assert ctx.losses is losses
    assert [field for field in ctx.__dataclass_fields__] == [  # noqa: C416
        "schedule_ref", "arg_mbs", "kwarg_mbs", "target_mbs", "losses",
    ]  # fmt: skip
    assert s._PipelineContext(schedule).arg_mbs is None


@pytest.mark.parametrize("kind", ["F", "I", "W", "UNSHARD", "RESHARD", "REDUCE_GRAD"])
def test_a_function_takes_the_place_of_its_actions(package, schedule, kind):
    s = package.schedules
    kind = s._ComputationType(kind)
    seen = []
    doing = {s.F: forward, s.I: backward_input, s.W: backward_weight, s.REDUCE_GRAD: reduce_grad}

    def function(action, ctx):
        seen.append(action)
        doing.get(kind, lambda *_: None)(action, ctx)

    schedule.register_custom_function(kind, function)
    x, target = numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    schedule.step(x, target=target)
    planned = [action for action in schedule.pipeline_order_with_comms[0] if action.computation_type == kind]
    assert seen == planned
    assert seen
    for stage in schedule._stages:
        assert all(parameter.grad is not None for parameter in stage.submod.parameters())
    schedule.step(x, target=target)
    assert seen == planned * 2


def forward(action, ctx):
    schedule = ctx.schedule_ref
    stage = schedule._stages[action.stage_index]
    microbatch = action.microbatch_index
    output = stage.forward_one_chunk(microbatch, ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch])
    schedule._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
    if stage.stage_index == 0:
        schedule._stages[1].set_local_fwd_input(output, microbatch)


def backward_input(action, ctx):
    schedule = ctx.schedule_ref
    stage, microbatch = schedule._stages[action.stage_index], action.microbatch_index
    loss = schedule._maybe_get_loss(stage, microbatch)
    stage.backward_one_chunk(microbatch, loss=loss, full_backward=False, last_backward=False)
    if stage.stage_index == 1:
        schedule._stages[0].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)


def backward_weight(action, ctx):
    schedule = ctx.schedule_ref
    schedule.backward_counter[action.stage_index] += 1
    last = schedule.backward_counter[action.stage_index] == schedule._n_microbatches
    schedule._stages[action.stage_index].backward_weight_one_chunk(action.microbatch_index, last_backward=last)


def reduce_grad(action, ctx):
    ctx.schedule_ref._stages[action.stage_index].perform_reduce_grad(ctx.schedule_ref._n_microbatches)


def test_a_function_is_registered_after_the_first_step(package, schedule):
    x, target = numbers(1, 8, WIDTH), numbers(2, 8, WIDTH)
    schedule.step(x, target=target)
    seen = []
    schedule.register_custom_function(package.schedules.UNSHARD, lambda action, ctx: seen.append("one"))
    schedule.step(x, target=target)
    schedule.register_custom_function(package.schedules.UNSHARD, lambda action, ctx: seen.append("two"))
    schedule.step(x, target=target)
    assert seen == ["one"] * 2 + ["two"] * 2


@pytest.mark.parametrize("kind", ["SEND_F", "RECV_F", "SEND_B", "RECV_B"])
def test_no_function_for_communication(package, schedule, kind):
    with pytest.raises(ValueError, match=kind):
        schedule.register_custom_function(package.schedules._ComputationType(kind), lambda *_: None)


def test_an_error_of_a_function_is_the_error_of_the_step(package, schedule):
    def broken(action, ctx):
        raise ZeroDivisionError(str(action))

    schedule.register_custom_function(package.schedules.FORWARD, broken)
    with pytest.raises(ZeroDivisionError, match="0F0"):
        schedule.step(numbers(1, 8, WIDTH), target=numbers(2, 8, WIDTH))


def test_the_state_of_a_schedule_between_steps(package, schedule):
    assert schedule.fwd_recv_ops == {}
    assert schedule.bwd_recv_ops == {}
    assert schedule.backward_counter == {}
    assert schedule.unsharded_stages == set()
    assert schedule.unshard_ops == {}
    schedule.step(numbers(1, 8, WIDTH), target=numbers(2, 8, WIDTH))
    assert schedule.backward_counter == {0: 4, 1: 4}
    assert schedule.unsharded_stages == set()
