"""Steps on one rank: outputs, losses, gradients, training and evaluation by turns, and what a step refuses."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from pipelining.contracts import (
    CPU,
    WIDTH,
    assert_gradients,
    averaged,
    gradients,
    layers,
    no_tensors_in_cycles,
    numbers,
    summed,
    unsplit,
    wrong_upstream,
)

pytestmark = pytest.mark.usefixtures("one_rank")

STAGES = {
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 3, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}  # fmt: skip
BATCH = 8
MICROBATCHES = 4


def pipelined(package, name, model, microbatches=MICROBATCHES, loss_fn=summed, **options):
    """A schedule with all stages on this rank."""
    stages = [package.stage.PipelineStage(module, i, len(model), CPU) for i, module in enumerate(model)]
    single = STAGES[name] == 1
    return package.schedule_class(name)(stages[0] if single else stages, microbatches, loss_fn=loss_fn, **options)


def forward_only(package, name):
    """Around steps without backward."""
    if STAGES[name] == 1:
        return nullcontext()
    return wrong_upstream(package, "neighbours on one rank hand over gradients that nobody has made")


def stages_of(schedule):
    return [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages


def data(batch=BATCH):
    return numbers(1, batch, WIDTH), numbers(2, batch, WIDTH)


@pytest.mark.parametrize("name", STAGES)
def test_a_step_is_that_of_the_unsplit_model(package, name):
    model, (x, target) = layers(STAGES[name]), data()
    expected = unsplit(model, x, target)
    schedule = pipelined(package, name, model, scale_grads=False)
    with no_tensors_in_cycles():
        for _ in range(2):
            model.zero_grad()
            losses = ["left over"]
            output = schedule.step(x, target=target, losses=losses)
    torch.testing.assert_close(output, expected.output)
    torch.testing.assert_close(sum(losses), expected.loss)
    assert len(losses) == MICROBATCHES
    torch.testing.assert_close(losses[1], summed(expected.output[2:4], target[2:4]))
    assert_gradients(model, range(STAGES[name]), expected.gradients)


@pytest.mark.parametrize("name", STAGES)
def test_scaled_gradients_are_of_the_mean(package, name):
    model, (x, target) = layers(STAGES[name]), data()
    expected = unsplit(model, x, target, averaged)
    losses = []
    pipelined(package, name, model, loss_fn=averaged).step(x, target=target, losses=losses)
    torch.testing.assert_close(torch.stack(losses).mean(), expected.loss)
    assert_gradients(model, range(STAGES[name]), expected.gradients)


@pytest.mark.parametrize("name", STAGES)
def test_evaluation_and_training_by_turns(package, name):
    model, (x, target) = layers(STAGES[name]), data()
    expected = unsplit(model, x, target)
    schedule = pipelined(package, name, model, scale_grads=False)
    with forward_only(package, name):
        for turn in ("eval", "step", "eval", "step"):
            model.zero_grad()
            losses = []
            output = getattr(schedule, turn)(x, target=target, losses=losses)
            torch.testing.assert_close(output, expected.output)
            torch.testing.assert_close(sum(losses), expected.loss)
            if turn == "step":
                assert_gradients(model, range(STAGES[name]), expected.gradients)
            else:
                assert set(gradients(model).values()) == {None}
            assert schedule._has_backward
        assert all(stage.has_backward for stage in stages_of(schedule))


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients(package, name, mode):
    model, (x, target) = layers(STAGES[name]), data()
    expected = unsplit(model, x, target)
    schedule = pipelined(package, name, model)
    with forward_only(package, name):
        with mode():
            output = schedule.eval(x, target=target)
        torch.testing.assert_close(output, expected.output)
        assert not output.requires_grad
    with torch.no_grad(), pytest.raises(RuntimeError, match="eval"):
        schedule.step(x, target=target)


def test_evaluation_takes_what_a_step_takes(package):
    model, (x, target) = layers(1), data()
    schedule = pipelined(
        package, "GPipe", model, loss_fn=lambda output, target, weight=1: weight * summed(output, target)
    )
    losses, again = [], []
    assert schedule.eval(x, target=target, losses=losses, return_outputs=False) is None
    schedule.eval(x, target=target, losses=again, loss_kwargs={"weight": 3})
    torch.testing.assert_close(sum(again), 3 * sum(losses))


@pytest.mark.parametrize("name", STAGES)
def test_what_is_left_after_a_step(package, name):
    model, (x, target) = layers(STAGES[name]), data()
    schedule = pipelined(package, name, model)
    *others, last = stages_of(schedule)
    assert last.output_chunks == []
    schedule.step(x, target=target)
    assert len(last.output_chunks) == MICROBATCHES
    assert all(stage.fwd_cache == {} for stage in [*others, last])
    assert all(stage.output_chunks == [] for stage in others)
    last.clear_runtime_states()
    assert last.output_chunks == []
    assert schedule.step(x, target=target, return_outputs=False) is None
    assert last.output_chunks == []
    assert schedule._internal_losses == []


@pytest.mark.parametrize("name", STAGES)
def test_keyword_arguments_and_those_of_the_loss(package, name):
    class Scaled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, *, scale):
            return self.inner(x) * scale

    model, (x, target) = nn.ModuleList(map(Scaled, layers(STAGES[name]))), data()
    scale = numbers(3, BATCH, 1)
    output = x
    for module in model:
        output = module(output, scale=scale)
    loss = 3 * summed(output, target)
    loss.backward()
    expected = gradients(model)
    model.zero_grad()

    def weighted(output, target, weight=1):
        return weight * summed(output, target)

    schedule = pipelined(package, name, model, loss_fn=weighted, scale_grads=False)
    losses = []
    found = schedule.step(x, target=target, losses=losses, loss_kwargs={"weight": 3}, scale=scale)
    torch.testing.assert_close(found, output.detach())
    torch.testing.assert_close(sum(losses), loss.detach())
    assert_gradients(model, range(STAGES[name]), expected)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_what_is_split_and_merged_by_specification(package, name):
    """Along another dimension, and a keyword that goes whole to every microbatch."""
    spec = package.microbatch.TensorChunkSpec
    schedule = pipelined(
        package,
        name,
        nn.ModuleList([Tagged()]),
        loss_fn=None,
        args_chunk_spec=spec.from_tuple((1,)),
        kwargs_chunk_spec={"bias": package.microbatch._Replicate},
        output_merge_spec=(spec(1), package.microbatch._CustomReducer(0, lambda a, b: a + b)),
    )
    x, bias = numbers(1, WIDTH, BATCH), numbers(2, WIDTH, 1)
    output, count = schedule.step(x, bias=bias)
    torch.testing.assert_close(output, x + bias)
    assert count == MICROBATCHES


class Tagged(nn.Module):
    def forward(self, x, *, bias):
        return x + bias, torch.ones(())


def test_microbatches_of_different_sizes(package):
    model, (x, target) = layers(1), data(10)
    expected = unsplit(model, x, target)
    schedule = pipelined(package, "GPipe", model, scale_grads=False)
    output = schedule.step(x, target=target)
    torch.testing.assert_close(output, expected.output)
    assert_gradients(model, [0], expected.gradients)


def test_gradients_of_the_input(package):
    model, (x, target) = layers(2), data()
    x.requires_grad_()
    unsplit(model, x, target)
    expected, x.grad = x.grad, None
    pipelined(package, "Interleaved1F1B", model, scale_grads=False).step(x, target=target)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("name", STAGES)
def test_the_generator_is_not_moved_by_finding_shapes(package, name):
    """Dropout in a pipeline draws what it draws without: shapes are found before, and leave no trace."""
    model = nn.ModuleList(nn.Sequential(layer, nn.Dropout(0.5)) for layer in layers(STAGES[name]))
    x, target = data()
    torch.manual_seed(5)
    expected = model[0](x[:2]).detach()
    torch.manual_seed(5)
    seen = []
    model[0].register_forward_hook(lambda _module, _args, output: seen.append(output.detach().clone()))
    pipelined(package, name, model).step(x, target=target)
    torch.testing.assert_close(seen[-MICROBATCHES], expected)


# Refused --------------------------------------------------------------------------------------------------------------


def test_lists_of_microbatches_are_checked(package):
    schedule = pipelined(package, "GPipe", layers(1))
    x = numbers(0, 2, WIDTH)
    with pytest.raises(TypeError, match="arg_mbs must be a list"):
        schedule._step_microbatches(arg_mbs=((x,),))
    with pytest.raises(ValueError, match="Expecting 4 arg_mbs but got 1"):
        schedule._step_microbatches(arg_mbs=[(x,)])
    with pytest.raises(ValueError, match="Expecting 4 kwarg_mbs but got 0"):
        schedule._step_microbatches(arg_mbs=[(x,)] * 4, kwarg_mbs=[])
    with pytest.raises(ValueError, match="Expecting 4 target_mbs but got 1"):
        schedule._step_microbatches(arg_mbs=[(x,)] * 4, target_mbs=[x])
    with pytest.raises(TypeError, match="losses must be a list"):
        schedule._step_microbatches(arg_mbs=[(x,)] * 4, target_mbs=[x] * 4, losses=())
    assert schedule._check_inputs() == ([()] * 4, [{}] * 4)


def test_a_forward_only_schedule_has_no_loss(package):
    model, (x, target) = layers(1), data()
    stage = package.stage.PipelineStage(model[0], 0, 1, CPU)
    schedule = package.schedules._ScheduleForwardOnly(stage, MICROBATCHES)
    torch.testing.assert_close(schedule.step(x), model[0](x))
    for extra in ({"target": target}, {"losses": []}):
        with pytest.raises(RuntimeError, match="loss"):
            schedule.step(x, **extra)


def test_losses_are_there_when_they_are_asked_for(package):
    schedule = pipelined(package, "GPipe", layers(1))
    stage = schedule._stage
    assert schedule._maybe_get_loss(stage, 0) is None
    schedule._maybe_compute_loss(stage, numbers(0, 1), [numbers(1, 1)], 0)
    torch.testing.assert_close(schedule._maybe_get_loss(stage, 0), summed(numbers(0, 1), numbers(1, 1)))
    with pytest.raises(RuntimeError, match="1"):
        schedule._maybe_get_loss(stage, 1)
    with pytest.raises(RuntimeError, match="Expecting 4 losses but got 1"):
        schedule._update_losses(stage, [])


def test_more_microbatches_than_rows(package):
    schedule = pipelined(package, "GPipe", layers(1))
    with pytest.raises(Exception):  # noqa: B017, PT011 (torch has it from a shape that does not fit, we from the split)
        schedule.step(numbers(0, 3, WIDTH), target=numbers(1, 3, WIDTH))


def test_an_error_in_a_stage_names_the_stage(package):
    class Broken(nn.Module):
        def forward(self, x):
            if len(x) == 1:
                raise KeyError("broken")
            return x

    stage = package.stage.PipelineStage(Broken(), 0, 1, CPU)
    schedule = package.schedules.ScheduleGPipe(stage, 2)
    schedule.step(numbers(0, 4, WIDTH))
    with pytest.raises(RuntimeError, match=r"\[Stage 0\]") as found:
        schedule.step(numbers(0, 2, WIDTH))
    assert isinstance(found.value.__cause__, KeyError)


# What programs change on a schedule -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STAGES)
def test_the_loss_function_is_replaced(package, name):
    """As trainers do that have another loss in every step."""
    model, (x, target) = layers(STAGES[name]), data()
    schedule = pipelined(package, name, model, scale_grads=False)
    for factor in (1, 3):
        model.zero_grad()
        schedule._loss_fn = lambda output, target, factor=factor: factor * summed(output, target)
        losses = []
        schedule.step(x, target=target, losses=losses)
        found = gradients(model)
        expected = unsplit(model, x, target, schedule._loss_fn)
        torch.testing.assert_close(sum(losses), expected.loss)
        assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.gradients.items()}
        for key, value in found.items():
            torch.testing.assert_close(value, expected.gradients[key])


@pytest.mark.parametrize("name", STAGES)
def test_training_is_switched_off_by_hand(package, name):
    """Without loss and backward for a while, as for log-probabilities: the outputs come back, no gradient is made."""
    model, (x, target) = layers(STAGES[name]), data()
    expected = unsplit(model, x, target)
    schedule = pipelined(package, name, model, scale_grads=False)
    loss_fn, schedule._loss_fn, schedule._has_backward = schedule._loss_fn, None, False
    with forward_only(package, name):
        torch.testing.assert_close(schedule.step(x), expected.output)
    assert set(gradients(model).values()) == {None}
    schedule = schedule if package.ours else pipelined(package, name, model, scale_grads=False)
    schedule._loss_fn, schedule._has_backward = loss_fn, True
    schedule.step(x, target=target)
    assert_gradients(model, range(STAGES[name]), expected.gradients)


@pytest.mark.parametrize("name", STAGES)
def test_shapes_are_found_anew_on_demand(package, name):
    """The flags of a schedule are set back by trainers whose sequences change their length."""
    model = layers(STAGES[name])
    schedule = pipelined(package, name, model, scale_grads=False)
    for batch in (8, 16, 4):
        x, target = data(batch)
        expected = unsplit(model, x, target)
        flags = "_stage" if STAGES[name] == 1 else "_stages"
        setattr(schedule, f"{flags}_forward_initialized", False)
        setattr(schedule, f"{flags}_backward_initialized", False)
        torch.testing.assert_close(schedule.step(x, target=target), expected.output)
        assert_gradients(model, range(STAGES[name]), expected.gradients)
        assert getattr(schedule, f"{flags}_forward_initialized")
        assert getattr(schedule, f"{flags}_backward_initialized")


@pytest.mark.parametrize("name", STAGES)
def test_methods_of_a_stage_are_replaced_between_steps(package, name):
    """On the object, after the schedule was made and has run: what is called is what is there."""
    model, (x, target) = layers(STAGES[name]), data()
    schedule = pipelined(package, name, model)
    schedule.step(x, target=target)
    seen = []
    for stage in stages_of(schedule):
        for method in ("forward_one_chunk", "backward_one_chunk", "perform_reduce_grad", "backward_maybe_with_nosync"):
            traced(stage, method, seen)
    schedule.step(x, target=target)
    count = STAGES[name] * MICROBATCHES
    assert sum(method == "forward_one_chunk" for method, _ in seen) == count
    assert sum(method == "backward_one_chunk" for method, _ in seen) == count
    assert sum(method == "perform_reduce_grad" for method, _ in seen) == STAGES[name]
    assert sum(method == "backward_maybe_with_nosync" for method, _ in seen) >= count


def traced(stage, method, seen):
    original = getattr(stage, method)

    def replacement(*args, **kwargs):
        seen.append((method, args))
        return original(*args, **kwargs)

    setattr(stage, method, replacement)


@pytest.mark.parametrize("name", STAGES)
def test_the_stages_of_a_schedule_are_replaced(package, name):
    """By stages of the same places with other modules, before the first step."""
    model, (x, target) = layers(STAGES[name], seed=1), data()
    expected = unsplit(model, x, target)
    schedule = pipelined(package, name, layers(STAGES[name]), scale_grads=False)
    others = stages_of(pipelined(package, name, model))
    if STAGES[name] == 1:
        schedule._stage = others[0]
    else:
        schedule._stages = others
    torch.testing.assert_close(schedule.step(x, target=target), expected.output)
    assert_gradients(model, range(STAGES[name]), expected.gradients)


@pytest.mark.parametrize("name", [name for name, count in STAGES.items() if count > 1])
def test_the_order_of_a_schedule_is_replaced(package, name):
    model, (x, target) = layers(STAGES[name]), data()
    expected = unsplit(model, x, target)
    schedule = pipelined(package, name, model, scale_grads=False)
    schedule.step(x, target=target)
    stages = range(STAGES[name])
    order = [f"{stage}F{m}" for m in range(MICROBATCHES) for stage in stages]
    order += [f"{stage}B{m}" for m in reversed(range(MICROBATCHES)) for stage in reversed(stages)]
    model.zero_grad()
    schedule._prepare_schedule_with_comms(package.rows(" ".join(order)))
    output = schedule.step(x, target=target)
    torch.testing.assert_close(output, expected.output)
    assert_gradients(model, stages, expected.gradients)


@pytest.mark.parametrize("name", STAGES)
def test_a_step_of_ones_own(package, name):
    """Programs that split by themselves do what ``step`` does around ``_step_microbatches``."""
    model, (x, target) = layers(STAGES[name]), data()
    expected = unsplit(model, x, target)
    schedule = pipelined(package, name, model, scale_grads=False)
    for _ in range(2):
        model.zero_grad()
        for stage in stages_of(schedule):
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        losses = []
        args = [(part,) for part in x.tensor_split(MICROBATCHES)]
        targets = list(target.tensor_split(MICROBATCHES))
        schedule._step_microbatches(args, [{}] * MICROBATCHES, targets, losses, True, loss_kwargs=None)
        torch.testing.assert_close(schedule._merge_outputs(stages_of(schedule)[-1].output_chunks), expected.output)
        torch.testing.assert_close(sum(losses), expected.loss)
        assert_gradients(model, range(STAGES[name]), expected.gradients)


def test_step_is_replaced_on_the_object(package):
    """And evaluation goes through the replacement."""
    model, (x, target) = layers(1), data()
    schedule = pipelined(package, "GPipe", model)
    original, seen = schedule.step, []

    def step(*args, **kwargs):
        seen.append(kwargs)
        return original(*args, **kwargs)

    schedule.step = step
    schedule.eval(x, target=target)
    assert seen == [{"target": target, "losses": None}]


def test_gradients_add_up_over_steps(package):
    """Without a scale they do; with it, torch divides what was there before once more, and we do not."""
    model, (x, target) = layers(2), data()
    expected = unsplit(model, x, target, averaged)
    for scale in (False, True):
        model.zero_grad()
        schedule = pipelined(package, "Interleaved1F1B", model, loss_fn=averaged, scale_grads=scale)
        schedule.step(x, target=target)
        schedule.step(x, target=target)
        factor = 2.0 if scale else 2.0 * MICROBATCHES
        if scale and not package.ours:
            factor = (1.0 + 1.0 * MICROBATCHES) / MICROBATCHES
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, factor * expected.gradients[name])


def test_a_deep_copy_of_a_model_is_not_the_model(package):
    """Stages hold the module that they were given, not a copy."""
    model = layers(1)
    schedule = pipelined(package, "GPipe", model)
    assert schedule._stage.submod is model[0]
    assert copy.deepcopy(model)[0] is not schedule._stage.submod


# Scales ---------------------------------------------------------------------------------------------------------------


def left_out(package, kind, schedule, stages):
    """Leave the division of gradients out, in one of the ways in which programs do."""
    if kind == "function":
        schedule.register_custom_function(package.schedules.REDUCE_GRAD, lambda action, ctx: None)
    elif kind == "order":
        rows = schedule.pipeline_order_with_comms
        reduce = package.schedules.REDUCE_GRAD
        rows[0] = [action for action in rows[0] if action.computation_type != reduce]
    for stage in stages:
        if kind == "reduction on the object":
            stage.perform_reduce_grad = lambda factor: None
        elif kind == "scale on the object":
            stage.scale_grads = lambda factor: None


@pytest.mark.parametrize(
    "kind", ["function", "order", "reduction on the object", "scale on the object", "scale of the class"]
)
def test_gradients_that_a_program_does_not_want_divided(package, kind):
    """Nothing is divided then, and nothing is made up for: gradients of earlier steps stay as they are."""

    class Stage(package.stage.PipelineStage):
        if kind == "scale of the class":

            def scale_grads(self, grad_scale_factor):
                pass

    model, (x, target) = layers(2), data()
    expected = unsplit(model, x, target, averaged)
    stages = [Stage(module, i, 2, CPU) for i, module in enumerate(model)]
    schedule = package.schedules.ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=averaged)
    left_out(package, kind, schedule, stages)
    for steps in (1, 2):
        schedule.step(x, target=target)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, steps * MICROBATCHES * expected.gradients[name])


@pytest.mark.parametrize("rows", ["0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", "0F0 0F1 1F0 1F1 1I0 1I1 0I0 1W0 0I1 0W0 0W1 1W1"])
def test_an_order_of_computations_alone(package, rows):
    """Taken as it is: without reductions, gradients are not divided."""
    model, (x, target) = layers(2), data()
    expected = unsplit(model, x, target)
    stages = [package.stage.PipelineStage(module, i, 2, CPU) for i, module in enumerate(model)]
    schedule = package.schedules._PipelineScheduleRuntime(stages, 2, loss_fn=summed)
    schedule._prepare_schedule_with_comms(package.rows(rows), format="compute_comms")
    with no_tensors_in_cycles():
        for _ in range(2):
            model.zero_grad()
            losses = []
            output = schedule.step(x, target=target, losses=losses)
    torch.testing.assert_close(output, expected.output)
    torch.testing.assert_close(sum(losses), expected.loss)
    assert_gradients(model, [0, 1], expected.gradients)
