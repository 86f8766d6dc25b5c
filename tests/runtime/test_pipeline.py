"""What a Pipeline does besides giving the right gradients: evaluation, arguments of every kind, mistakes."""

import re
import threading
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import MetadataError, PenstockError, ScheduleError, StageError, StepError
from penstock.execution.dry_run import Call, dry_run
from penstock.runtime import (
    DistributedTransport,
    Microbatches,
    Pipeline,
    Replicate,
    Stage,
    TensorChunkSpec,
    run_in_threads,
)

mse = functional.mse_loss


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    yield
    torch.set_num_threads(threads)
    assert set(threading.enumerate()) <= before


def layers(count: int, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(count)]


def x_and_y(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, generator=chance), torch.randn(size, 3, generator=chance)


def on_threads(modules, schedule, use, *, model=None, **options):
    """What ``use(pipe)`` gives on each rank."""

    def worker(transport):
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        return use(Pipeline(mine, schedule, transport=transport, **{"loss_fn": mse, **options}))

    return run_in_threads(worker, schedule.ranks, model=model, timeout=60)


def step(pipe, x, y, **kwargs):
    return pipe.step(*([x] if pipe.has_first else []), target=y if pipe.has_last else None, **kwargs)


def evaluated(pipe, x, y=None, **kwargs):
    return pipe.eval(*([x] if pipe.has_first else []), target=y if pipe.has_last else None, **kwargs)


def gradients(modules):
    return [parameter.grad for module in modules for parameter in module.parameters()]


def same(some, others, tolerance=1e-6):
    return all(torch.allclose(one, other, atol=tolerance) for one, other in zip(some, others, strict=True))


# Evaluation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GPipe", "ZBVZeroBubble", "Interleaved1F1B", "ForwardOnly"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_evaluation_of_any_size(name, size):
    """Also of fewer samples than microbatches, with losses, before and after a step."""
    schedule = ps.build(name, ranks=2, microbatches=4)
    modules = layers(schedule.stages)
    x, y = x_and_y(size)
    whole = nn.Sequential(*deepcopy(modules))

    def use(pipe):
        results = []
        for number in range(3):
            losses = []
            results.append((evaluated(pipe, x, y, losses=losses), losses))
            if number < 2:
                step(pipe, *x_and_y(8))
        return results

    others = on_threads(modules, schedule, use)
    last = others.pop(schedule.placement.rank_of[-1])
    assert all(result == (None, []) for rank in others for result in rank)
    for output, losses in last:
        assert torch.allclose(output, whole(x), atol=1e-6)
        assert not output.requires_grad
        assert len(losses) == min(4, size)
        assert torch.allclose(
            sum(loss * len(part) for loss, part in zip(losses, y.tensor_split(len(losses)), strict=True)) / size,
            mse(whole(x), y),
        )


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
def test_evaluation_leaves_training_alone(shapes):
    """Before, between and after steps, under every mode, with other sizes: gradients add up as if there were none."""
    schedule = ps.build("InterleavedZeroBubble", ranks=2, microbatches=3)
    modules = layers(4)
    whole = deepcopy(modules)
    x, y = x_and_y(7)

    def use(pipe):
        outputs = [evaluated(pipe, x[:5])]
        step(pipe, x, y)
        with torch.no_grad():
            outputs.append(evaluated(pipe, x[:2], y[:2]))
        with torch.inference_mode():
            outputs.append(evaluated(pipe, x))
        step(pipe, x, y)
        with torch.inference_mode():
            outputs.append(evaluated(pipe, torch.cat([x, x])))
        return outputs

    outputs = on_threads(modules, schedule, use, shapes=shapes)[1]
    expected = nn.Sequential(*whole)
    for output, size in zip(outputs, (5, 2, 7, 14), strict=True):
        assert torch.allclose(output, expected(torch.cat([x, x])[:size]), atol=1e-6)
    (2 * mse(expected(x), y)).backward()
    assert same(gradients(modules), gradients(whole))


def test_evaluation_with_keywords():
    """Numbers go to every microbatch; a batch that is split already is taken as it is."""

    class Scaled(nn.Linear):
        def forward(self, x, scale, shift=None):
            return super().forward(x) * scale + (0 if shift is None else shift)

    schedule = ps.build("1F1B", ranks=2, microbatches=3)
    modules = [Scaled(3, 3), Scaled(3, 3)]
    x, shift = x_and_y(7)

    def use(pipe):
        several = Microbatches(x.tensor_split(3))
        return [
            evaluated(pipe, x, scale=2.0),
            evaluated(pipe, several, scale=2.0),
            evaluated(pipe, x[:2], scale=2.0),
            evaluated(pipe, x, scale=2.0, shift=shift),
            evaluated(pipe, x[:2], scale=2.0, shift=shift[:2]),
        ]

    outputs = on_threads(modules, schedule, use)[1]
    expected = modules[1](modules[0](x, 2.0), 2.0)
    shifted = modules[1](modules[0](x, 2.0, shift), 2.0, shift)
    for output, wanted in zip(outputs, (expected, expected, expected[:2], shifted, shifted[:2]), strict=True):
        assert torch.allclose(output, wanted, atol=1e-6)


class Passing(nn.Linear):
    """Hands on what it was given, too."""

    def forward(self, x, *more):
        return super().forward(x), x, *more


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_of_what_needs_a_gradient(ranks):
    """Slices of slices, made without gradients, would need one and have none to give."""
    schedule = ps.Schedule([["0F0", "1F0", "0F1", "1F1"]] if ranks == 1 else [["0F0", "0F1"], ["1F0", "1F1"]])
    modules = [Passing(3, 3), Passing(3, 3)]
    x = (torch.ones(8, 3, requires_grad=True) * 2)[:4]
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):

        def use(pipe, mode=mode):
            with mode():
                return [evaluated(pipe, x), evaluated(pipe, Microbatches(x.split(2)))]

        for output in on_threads(modules, schedule, use)[-1]:
            assert all(torch.equal(*pair) for pair in zip(output, modules[1](*modules[0](x)), strict=True))
            assert not any(one.requires_grad for one in output)


class Giving(nn.Linear):
    """Hands on its weight, too, as one that shares it with a later stage."""

    def forward(self, x, *_):
        return super().forward(x), self.weight


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_evaluation_of_a_stage_that_hands_on_a_weight(ranks, mode):
    schedule = ps.Schedule([["0F0", "1F0"]] if ranks == 1 else [["0F0"], ["1F0"]])
    modules = [Giving(3, 3), Giving(3, 3)]
    x, _ = x_and_y(4)

    def use(pipe):
        with mode():
            return evaluated(pipe, x)

    output = on_threads(modules, schedule, use)[-1]
    assert all(torch.equal(*pair) for pair in zip(output, modules[1](*modules[0](x)), strict=True))


def evaluation_in_processes(rank, ranks, *, group):
    schedule = ps.build("ZBVZeroBubble", ranks=ranks, microbatches=4)
    modules = layers(schedule.stages)
    whole = nn.Sequential(*deepcopy(modules))
    found = []
    with Pipeline(
        {index: modules[index] for index in schedule.placement.stages_of(rank)}, schedule, loss_fn=mse, group=group
    ) as pipe:
        for size in (1, 2, 4, 9):
            x, y = x_and_y(size)
            losses = []
            with torch.inference_mode(size % 2 == 0):
                output = evaluated(pipe, x, y, losses=losses)
            if pipe.has_last:
                found.append(torch.allclose(output, whole(x), atol=1e-6) and len(losses) == min(4, size))
            step(pipe, *x_and_y(8))
        trained = gradients(modules[index] for index in sorted(pipe.stages))
    for _ in range(4):
        mse(whole(x_and_y(8)[0]), x_and_y(8)[1]).backward()
    return all(found), same(trained, gradients(whole[index] for index in sorted(pipe.stages)))


def test_evaluation_in_processes(workers):
    assert workers.run(evaluation_in_processes) == [(True, True)] * 4


# Arguments ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Takes batches in dimension 1, and a table that all microbatches need."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, table):
        return torch.tanh(self.layer(x)) + table.sum(0)


def test_specs():
    """The same on every rank, also where there is nothing that they are for."""
    schedule = ps.build("GPipe", ranks=3, microbatches=4)
    modules = [Attention(), *layers(2)]
    whole = deepcopy(modules)
    chance = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 6, 3, generator=chance), torch.randn(2, 6, 3, generator=chance)
    table = torch.randn(5, 3, generator=chance)
    options = {
        "args_spec": (TensorChunkSpec(1), Replicate),
        "target_spec": (TensorChunkSpec(1), None),
        "output_spec": TensorChunkSpec(1),
        "loss_fn": lambda output, target: mse(output, target[0]),
    }

    def use(pipe):
        args = (x, table) if pipe.has_first else ()
        target = (y, "name") if pipe.has_last else None
        return pipe.step(*args, target=target), pipe.eval(*args, target=target)

    output, evaluation = on_threads(modules, schedule, use, **options)[2]
    expected = nn.Sequential(*whole[1:])(whole[0](x, table))
    mse(expected, y).backward()
    assert torch.allclose(output, expected, atol=1e-6)
    assert torch.allclose(evaluation, expected, atol=1e-6)
    assert same(gradients(modules), gradients(whole))


def test_batches_that_are_split_already():
    """Of any sizes: the loss of each counts by its samples."""
    schedule = ps.build("1F1B", ranks=2, microbatches=3)
    modules = layers(2)
    whole = nn.Sequential(*deepcopy(modules))
    x, y = x_and_y(8)
    sizes = [1, 5, 2]

    def use(pipe):
        return step(pipe, Microbatches(x.split(sizes)), Microbatches(y.split(sizes)))

    assert torch.allclose(on_threads(modules, schedule, use)[1], whole(x), atol=1e-6)
    mse(whole(x), y).backward()
    assert same(gradients(modules), gradients(whole))


def test_sequences_of_any_length():
    """With shapes per microbatch, each may be of another length, in every step."""
    schedule = ps.build("InterleavedZeroBubble", ranks=2, microbatches=3)
    modules = layers(4)
    whole = nn.Sequential(*deepcopy(modules))
    chance = torch.Generator().manual_seed(1)
    batches = [
        [torch.randn(2, length, 3, generator=chance) for length in lengths] for lengths in ([3, 1, 5], [2, 2, 9])
    ]
    targets = [[torch.ones_like(part) for part in batch] for batch in batches]

    def use(pipe):
        outputs = []
        for x, y in zip(batches, targets, strict=True):
            outputs.append(step(pipe, Microbatches(x), Microbatches(y)))
            evaluated(pipe, Microbatches(x))
        return outputs

    outputs = on_threads(modules, schedule, use, shapes="per_microbatch", output_spec=Microbatches)[1]
    for x, y, output in zip(batches, targets, outputs, strict=True):
        assert same(output, [whole(part) for part in x])
        sum(mse(whole(part), target) / 3 for part, target in zip(x, y, strict=True)).backward()
    assert same(gradients(modules), gradients(whole))


def test_outputs_only_if_asked_for():
    schedule = ps.build("GPipe", ranks=2, microbatches=2)
    modules = layers(2)
    losses = []

    def use(pipe):
        return step(pipe, *x_and_y(), return_outputs=False, losses=losses if pipe.has_last else None)

    assert on_threads(modules, schedule, use) == [None, None]
    assert len(losses) == 2


# What a run leaves as it was ------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("replaced", torch.zeros(1))

    def forward(self, x):
        self.replaced = self.replaced + 1
        return self.dropout(self.norm(self.layer(x)))


def test_the_dry_run_leaves_no_trace():
    """The first step, before which shapes are found, is as random as the unsplit model, and so are buffers."""
    forwards = ["0F0", "1F0", "2F0", "0F1", "1F1", "2F1"]
    backwards = ["2B0", "1B0", "0B0", "2B1", "1B1", "0B1"]
    modules = [Noisy(), Noisy(), Noisy()]
    whole = nn.Sequential(*deepcopy(modules))
    x, y = x_and_y()
    torch.manual_seed(7)
    losses = []
    pipe = Pipeline(dict(enumerate(modules)), ps.Schedule([forwards + backwards]), loss_fn=mse)
    pipe.step(x, target=y, losses=losses)
    after = torch.random.get_rng_state()
    torch.manual_seed(7)
    expected = [mse(whole(part), target) for part, target in zip(x.chunk(2), y.chunk(2), strict=True)]
    assert torch.equal(after, torch.random.get_rng_state())
    assert same(losses, expected)
    (sum(expected) / 2).backward()
    assert same(gradients(modules), gradients(whole))
    for module, other in zip(modules, whole, strict=True):
        assert module.norm.num_batches_tracked == module.replaced == 2
        assert same(module.state_dict().values(), other.state_dict().values())


def test_the_dry_run_changes_nothing_that_can_be_seen():
    module = Noisy()
    state = deepcopy(module.state_dict())
    buffer = module.replaced
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    output, _ = dry_run(module, torch.device("cpu"), Call((torch.ones(4, 3, requires_grad=True),), {}))
    assert output.shape == (4, 3)
    assert output.requires_grad
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert module.replaced is buffer
    assert all(parameter.grad is None for parameter in module.parameters())


def test_steps_under_no_grad_compute_gradients():
    schedule = ps.build("GPipe", ranks=1, microbatches=2)
    modules = layers(1)
    with torch.no_grad():
        Pipeline({0: modules[0]}, schedule, loss_fn=mse).step(x_and_y()[0], target=x_and_y()[1])
    assert all(gradient is not None for gradient in gradients(modules))


def test_a_profiler_shows_every_action():
    schedule = ps.build("InterleavedZeroBubble", ranks=1, microbatches=2)
    pipe = Pipeline(dict(enumerate(layers(2))), schedule, loss_fn=mse)
    x, y = x_and_y()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.step(x, target=y)
    names = {event.name for event in profile.events()}
    assert {"0F0", "0F1", "1F0", "1I1", "0W1"} <= names
    pipe.step(x, target=y)


# Functions of the user's own ------------------------------------------------------------------------------------------


def test_a_function_for_overlaps_sees_its_parts():
    schedule = ps.build("DualPipeV", ranks=2, microbatches=6)
    modules = layers(4)
    whole = nn.Sequential(*deepcopy(modules))
    x, y = x_and_y(12)
    seen = []

    def overlap(action, context):
        seen.append(str(action))
        for part in action.sub_actions:
            assert context.stage(part).module is modules[part.stage_index]
            context.run(part)

    def use(pipe):
        pipe.register_custom_function(ps.ComputationType.OVERLAP_F_B, overlap)
        step(pipe, x, y)

    on_threads(modules, schedule, use)
    wanted = [str(action) for row in schedule.actions for action in row if action and action.sub_actions]
    assert sorted(seen) == sorted(wanted)
    mse(whole(x), y).backward()
    assert same(gradients(modules), gradients(whole))


def test_a_function_registered_by_one_rank_between_steps():
    """The others need not know, and nothing is agreed once more."""
    schedule = ps.build("Interleaved1F1B", ranks=2, microbatches=2)
    modules = layers(4)
    whole = nn.Sequential(*deepcopy(modules))
    x, y = x_and_y()
    seen = []

    def forward(action, context):
        seen.append(str(action))
        context.run(action)

    def use(pipe):
        step(pipe, x, y)
        if pipe.rank == 0:
            pipe.register_custom_function(ps.ComputationType.FORWARD, forward)
        step(pipe, x, y)
        return evaluated(pipe, x)

    on_threads(modules, schedule, use)
    assert len(seen) == 8
    (2 * mse(whole(x), y)).backward()
    assert same(gradients(modules), gradients(whole))


def test_no_function_for_what_is_no_type():
    pipe = Pipeline({0: layers(1)[0]}, ps.build("GPipe", ranks=1, microbatches=1), loss_fn=mse)
    for kind in ("forwards", 3, None):
        with pytest.raises(StageError, match="ComputationType"):
            pipe.register_custom_function(kind, print)


def test_functions_for_sharding():
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=2)
    pipe = Pipeline(dict(enumerate(layers(2))), schedule, loss_fn=mse)
    seen = []
    for kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD"):
        pipe.register_custom_function(ps.ComputationType(kind), lambda action, _: seen.append(str(action)))
    x, y = x_and_y()
    pipe.step(x, target=y)
    assert {"0UNSHARD", "1UNSHARD", "0REDUCE_GRAD", "1REDUCE_GRAD"} <= set(seen)


class Deferring(nn.Module):
    """Computes the gradients of its weight itself, on request."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) * 0.5)
        self.made = []

    def forward(self, x):
        owner = self

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                context.save_for_backward(x)
                return x @ owner.weight.detach().T

            @staticmethod
            def backward(context, gradient):
                owner.made.append((context.saved_tensors[0], gradient))
                return gradient @ owner.weight.detach()

        return Product.apply(x)

    def weight_gradients(self):
        x, gradient = self.made.pop()

        def compute():
            found = gradient.T @ x
            self.weight.grad = found if self.weight.grad is None else self.weight.grad + found

        return compute


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "Interleaved1F1B"])
def test_weight_gradients_of_the_users_own(name):
    schedule = ps.build(name, ranks=2, microbatches=4)
    modules = [*layers(1), *[Deferring() for _ in range(3)]]
    whole = deepcopy(modules[:1]) + [nn.Linear(3, 3, bias=False) for _ in range(3)]
    with torch.no_grad():
        for module in whole[1:]:
            module.weight.copy_(modules[1].weight)
    x, y = x_and_y()

    def worker(transport):
        mine = [
            Stage(index, modules[index], dw_builder=getattr(modules[index], "weight_gradients", None))
            for index in schedule.placement.stages_of(transport.rank)
        ]
        step(Pipeline(mine, schedule, loss_fn=mse, transport=transport), x, y)

    run_in_threads(worker, 2, timeout=60)
    mse(nn.Sequential(*whole)(x), y).backward()
    assert same(gradients(modules), gradients(whole))
    assert all(not module.made for module in modules[1:])


# Mistakes -------------------------------------------------------------------------------------------------------------


def errors_of(worker, ranks):
    """The error of every rank."""

    def guarded(transport):
        try:
            worker(transport)
        except Exception as error:
            return error
        return None

    return run_in_threads(guarded, ranks, timeout=60)


def mistaken(name, ranks, change=None, call=None, microbatches=4, **options):
    """The errors of all ranks when `change` has been made to the options of rank 1, or `call` is made there."""

    def worker(transport):
        schedule = ps.build(name, ranks=ranks, microbatches=microbatches)
        modules = layers(schedule.stages)
        given = {
            "stages": {index: modules[index] for index in schedule.placement.stages_of(transport.rank)},
            "schedule": schedule,
            "loss_fn": mse,
            **options,
        }
        if change is not None and transport.rank == ranks - 1:
            change(given)
        pipe = Pipeline(given.pop("stages"), given.pop("schedule"), transport=transport, **given)
        (call or (lambda pipe: step(pipe, *x_and_y())))(pipe)

    return errors_of(worker, ranks)


def all_raise(errors, text, kind=PenstockError):
    assert all(isinstance(error, kind) for error in errors), errors
    assert all(text in str(error) for error in errors), [str(error) for error in errors]


def test_wrong_stages_are_raised_on_every_rank():
    all_raise(mistaken("1F1B", 2, lambda given: given["stages"].update({0: nn.Identity()})), "must be given stages [1]")
    all_raise(mistaken("1F1B", 2, lambda given: given["stages"].clear()), "not []")
    all_raise(mistaken("1F1B", 3, lambda given: given.update(stages={2: "model"})), "must be a torch.nn.Module")
    all_raise(mistaken("1F1B", 2, lambda given: given.update(stages=[nn.Identity()])), "modules by stage index")


def test_a_missing_loss_function_is_raised_on_every_rank():
    all_raise(mistaken("1F1B", 3, lambda given: given.update(loss_fn=None)), "pass loss_fn")


def test_wrong_options_are_raised_on_every_rank():
    all_raise(mistaken("1F1B", 2, lambda given: given.update(loss_reduction="max")), "loss_reduction must be")
    all_raise(mistaken("1F1B", 2, lambda given: given.update(shapes="guess")), "shapes must be")
    all_raise(mistaken("1F1B", 2, lambda given: given.update(schedule="1F1B")), "expected a Schedule")


def test_a_wrong_number_of_ranks():
    for ranks, others in ((2, 3), (3, 2)):
        schedule = ps.build("1F1B", ranks=others, microbatches=2)

        def worker(transport, schedule=schedule):
            Pipeline({transport.rank: layers(1)[0]}, schedule, loss_fn=mse, transport=transport)

        all_raise(errors_of(worker, ranks), f"the schedule is for {others} ranks, but the group has {ranks}")


def test_different_schedules():
    def change(given):
        given["schedule"] = ps.build("GPipe", ranks=3, microbatches=4)

    all_raise(mistaken("1F1B", 3, change), "a different schedule")


def test_a_schedule_that_would_not_run():
    def change(given):
        given["schedule"] = ps.Schedule([["0F0", "0B0"], ["1B0", "1F0"]])

    errors = mistaken("1F1B", 2, change)
    all_raise(errors, "1B0 needs 1F0")


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (lambda output, target: (output - target) ** 2, "one number as a tensor"),
        (lambda output, target: 1.5, "one number as a tensor"),
        (lambda output, target: None, "one number as a tensor"),
        (lambda output: output.sum(), "takes 1 positional argument"),
    ],
)
def test_a_loss_that_is_no_number(loss_fn, text):
    errors = mistaken("1F1B", 3, lambda given: given.update(loss_fn=loss_fn))
    all_raise(errors, text, StepError)
    assert {(error.rank, error.stage, error.microbatch, error.action) for error in errors} == {(2, 2, 0, "2F0")}


def test_missing_arguments_are_raised_on_every_rank():
    all_raise(
        mistaken("1F1B", 2, call=lambda pipe: pipe.step(target=x_and_y()[1] if pipe.has_last else None)), "call step"
    )
    assert mistaken("1F1B", 2, call=lambda pipe: pipe.step(x_and_y()[0], target=x_and_y()[1])) == [None, None]
    all_raise(mistaken("1F1B", 2, call=lambda pipe: step(pipe, *x_and_y(3))), "cannot be split into 4 microbatches")


def test_a_target_that_is_given_by_its_position():
    reported = r"takes 2 positional arguments but 3 were given; pass a target by its name: step(x, target=y)"
    all_raise(mistaken("1F1B", 2, call=lambda pipe: pipe.step(*x_and_y())), reported)


def test_after_a_failure_every_call_says_so():
    def call(pipe):
        try:
            step(pipe, *x_and_y(3))
        except PenstockError:
            step(pipe, *x_and_y())

    all_raise(mistaken("1F1B", 2, call=call), "must be rebuilt", StepError)


def test_other_shapes_than_agreed():
    def call(pipe):
        step(pipe, *x_and_y(8))
        step(pipe, *x_and_y(12))

    errors = mistaken("1F1B", 2, call=call)
    assert all(isinstance(error, PenstockError) for error in errors), errors
    # Either rank may be the first to notice: one sees the inputs, the other the target.
    noticed = ("microbatches changed since the first step", "differs in size from the first one")
    assert all(any(text in str(error) for text in noticed) for error in errors), errors
    assert mistaken("1F1B", 2, call=call, shapes="per_microbatch") == [None, None]


def test_an_element_type_that_changes():
    pipe = Pipeline({0: layers(1)[0]}, ps.build("1F1B", ranks=1, microbatches=4), loss_fn=mse)
    x, y = x_and_y()
    pipe.step(x, target=y)
    message = (
        "microbatches changed since the first step: 4 x float16[2, 3], expected 4 x float32[2, 3]; drop a smaller last "
        "batch, or pass shapes='per_microbatch'"
    )
    with pytest.raises(MetadataError, match=re.escape(message)):
        pipe.step(x.half(), target=y)


def test_given_shapes_that_are_wrong():
    for example, text in (
        (torch.empty(3, 3), "float32[3, 3] was agreed"),
        ((torch.empty(2, 3),), "output is a tensor"),
    ):
        all_raise(mistaken("1F1B", 2, shapes={0: example}), text)
    all_raise(mistaken("1F1B", 2, shapes={}), "no example output of stage 0")


def test_steps_in_inference_mode():
    def call(pipe):
        with torch.inference_mode():
            step(pipe, *x_and_y())

    all_raise(mistaken("1F1B", 2, call=call), "inference_mode")


class Odd(nn.Module):
    """Gives what cannot be sent between stages."""

    def forward(self, x):
        return {1, 2}


def test_outputs_that_cannot_be_sent():
    for shapes in ("inferred", "per_microbatch"):
        errors = errors_of(
            lambda transport, shapes=shapes: step(
                Pipeline(
                    {transport.rank: [Odd(), nn.Identity()][transport.rank]},
                    ps.build("GPipe", ranks=2, microbatches=2),
                    loss_fn=mse,
                    transport=transport,
                    shapes=shapes,
                ),
                *x_and_y(),
            ),
            2,
        )
        all_raise(errors, "set, which cannot be sent between stages")


def mistakes_in_processes(rank, ranks, which, *, group):
    """Every mistake that one rank makes is known to all at once, and not when they have waited long enough."""
    schedule = ps.build("1F1B", ranks=ranks, microbatches=2)
    stages, options = {rank: layers(1)[0]}, {"loss_fn": mse}
    if rank == ranks - 1:
        if which == "stages":
            stages = {}
        elif which == "loss_fn":
            options["loss_fn"] = None
        elif which == "schedule":
            schedule = ps.build("GPipe", ranks=ranks, microbatches=2)
        elif which == "option":
            options["shapes"] = "guess"
    transport = None
    try:
        transport = DistributedTransport(group, timeout=20.0)
        step(Pipeline(stages, schedule, transport=transport, **options), *x_and_y())
    except (PenstockError, TypeError) as error:
        return type(error).__name__, str(error)
    finally:
        if transport is not None:
            transport.close()
    return "no error", ""


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("stages", "not []"),
        ("loss_fn", "pass loss_fn"),
        ("schedule", "a different schedule"),
        ("option", "shapes must be"),
    ],
)
def test_mistakes_in_processes(workers, which, text):
    for _, reported in workers.run(mistakes_in_processes, which, ranks=2, limit=15.0):
        assert text in reported


def test_without_a_process_group():
    with pytest.raises(StageError, match="there is no process group"):
        Pipeline({0: layers(1)[0]}, ps.build("1F1B", ranks=2, microbatches=2), loss_fn=mse)
    with pytest.raises(ScheduleError, match="expected a Schedule"):
        Pipeline({0: layers(1)[0]}, "1F1B", loss_fn=mse)


def test_a_module_that_is_replaced_between_steps_is_the_one_that_runs():
    schedule = ps.build("GPipe", ranks=1, microbatches=2)
    old, new = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    with Pipeline({0: old}, schedule, loss_fn=torch.nn.functional.mse_loss) as pipe:
        pipe.step(torch.ones(4, 3), target=torch.zeros(4, 3))
        pipe.stages[0].module = new
        old.zero_grad()
        pipe.step(torch.ones(4, 3), target=torch.zeros(4, 3))
    found, new.weight.grad = new.weight.grad, None
    torch.nn.functional.mse_loss(new(torch.ones(4, 3)), torch.zeros(4, 3)).backward()
    assert old.weight.grad is None
    torch.testing.assert_close(found, new.weight.grad)


def test_the_parameters_of_a_rank_are_those_of_its_stages():
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=2)
    shared = nn.Linear(4, 4)
    layers = {0: nn.Sequential(shared), 1: nn.Sequential(nn.Linear(4, 4)), 2: nn.Sequential(nn.Linear(4, 4))}
    layers[3] = nn.Sequential(shared, nn.Linear(4, 1))

    def worker(transport):
        stages = {index: layers[index] for index in schedule.placement.stages_of(transport.rank)}
        with Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss, transport=transport) as pipe:
            assert [*pipe.parameters()] == [parameter for _, parameter in pipe.named_parameters()]
            return [*pipe.named_parameters()]

    first, second = run_in_threads(worker, 2)
    assert [name for name, _ in first] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert first[0][1] is shared.weight
    assert [name for name, _ in second] == ["0.weight", "0.bias"] * 2
