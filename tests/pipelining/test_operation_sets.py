"""Which operations a step runs: the native ones, or the methods of stages; chosen by each rank for itself."""

import logging
from contextlib import ExitStack, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.pipelining import PipelineStage, schedules
from penstock.pipelining._engine import mode_selection as selection
from penstock.pipelining._engine.mode_selection import Mode, select_mode, step_scope
from penstock.pipelining._schedule import base as _schedule_base
from penstock.pipelining._stage.compute import StageCompute
from penstock.pipelining.stage import _PipelineStageBase
from pipelining.contracts import (
    CPU,
    OURS,
    WIDTH,
    Package,
    assert_gradients,
    averaged,
    fake_group,
    layers,
    numbers,
    step_arguments,
    summed,
    unsplit,
)

BATCH, MICROBATCHES = 8, 4
PLACEMENTS = {
    "GPipe": ([0], [1]),
    "1F1B": ([0], [1]),
    "Interleaved1F1B": ([0, 2], [1, 3]),
    "ZBVZeroBubble": ([0, 3], [1, 2]),
}


class Stage(PipelineStage):
    """One that changes nothing of what messages need."""


class SendsItself(PipelineStage):
    def get_fwd_send_ops(self, fwd_chunk_id):
        return super().get_fwd_send_ops(fwd_chunk_id)


class ComputesItself(PipelineStage):
    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


@pytest.fixture
def stage():
    with fake_group():
        yield Stage(nn.Linear(WIDTH, WIDTH), 0, 1, CPU)


def replaced(name):
    return mock.patch.object(schedules, name, return_value=[])


def posts_directly(stages):
    return select_mode(stages, schedules, is_plain=False) is Mode.DIRECT


REPLACED = {
    "_batch_p2p": lambda: replaced("_batch_p2p"),
    "_sorted_batch_p2p": lambda: replaced("_sorted_batch_p2p"),
    "_wait_batch_p2p": lambda: replaced("_wait_batch_p2p"),
    "dist": lambda: mock.patch.object(schedules, "dist"),
    "isend": lambda: mock.patch.object(dist, "isend"),
    "irecv": lambda: mock.patch.object(dist, "irecv"),
    "batch_isend_irecv": lambda: mock.patch.object(dist, "batch_isend_irecv"),
    "P2POp": lambda: mock.patch.object(dist, "P2POp"),
    "a profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
    "a dispatch mode": TorchDispatchMode,
}


@pytest.mark.parametrize("what", REPLACED)
def test_messages_begin_directly_unless_something_is_between(stage, what):
    assert posts_directly([stage])
    with REPLACED[what]():
        assert not posts_directly([stage])
    assert posts_directly([stage])


def test_messages_that_are_logged_do_not_begin_directly(stage, caplog):
    with caplog.at_level(logging.DEBUG, "penstock.pipelining.schedules"):
        assert not posts_directly([stage])


def test_a_stage_that_makes_messages_itself_is_asked_for_them(stage):
    other = SendsItself(nn.Linear(WIDTH, WIDTH), 0, 1, CPU)
    assert not posts_directly([stage, other])
    stage.get_bwd_recv_ops = stage.get_bwd_recv_ops
    assert not posts_directly([stage])


def test_a_stage_is_plain_during_a_step_and_no_longer(stage):
    own = ComputesItself(nn.Linear(WIDTH, WIDTH), 0, 1, CPU)
    builder = Stage(nn.Linear(WIDTH, WIDTH), 0, 1, CPU, dw_builder=lambda: lambda: None)
    with step_scope([stage, own, builder], ()):
        assert [one._is_plain for one in (stage, own, builder)] == [True, False, False]
    assert not stage._is_plain


@pytest.mark.parametrize(
    ("custom", "watched"),
    [(schedules.B, True), (schedules.I, True), (schedules.OVERLAP_F_B, True), (schedules.F, False)],
)
def test_a_stage_is_watched_while_somebody_else_runs_backwards(stage, custom, watched):
    with step_scope([stage], {custom}):
        assert (stage._is_plain, stage._is_watched) == (False, watched)
    assert not stage._is_watched


METHODS = [name for name in selection._ALL if name not in selection._MESSAGES]


@pytest.mark.parametrize("name", METHODS)
def test_an_action_is_one_function_unless_the_stage_has_its_own_way(stage, name):
    assert select_mode([stage], schedules, is_plain=True) is Mode.NATIVE
    with mock.patch.object(Stage, name, getattr(Stage, name).__get__(stage), create=True):
        assert select_mode([stage], schedules, is_plain=True) is Mode.DIRECT
    assert select_mode([stage], schedules, is_plain=True) is Mode.NATIVE
    vars(stage)[name] = None
    assert select_mode([stage], schedules, is_plain=True) is Mode.DIRECT


@pytest.mark.parametrize("name", selection._MESSAGES)
def test_no_way_is_short_if_the_stage_makes_messages_itself(stage, name):
    with mock.patch.object(Stage, name, create=True):
        assert select_mode([stage], schedules, is_plain=True) is Mode.METHODS


def test_an_action_is_one_function_unless_something_else_wants_to_know(stage):
    assert select_mode([stage], schedules, is_plain=False) is Mode.DIRECT
    builder = Stage(nn.Linear(WIDTH, WIDTH), 0, 1, CPU, dw_builder=lambda: lambda: None)
    assert select_mode([builder], schedules, is_plain=True) is Mode.DIRECT
    stage._runtime_validate = True
    assert select_mode([stage], schedules, is_plain=True) is Mode.DIRECT


class Bare(_PipelineStageBase):
    """A stage that finds no shapes itself."""

    def _prepare_forward_infra(self, *args, **kwargs): ...

    def _prepare_backward_infra(self, *args, **kwargs): ...

    def _create_grad_recv_info(self, *args, **kwargs): ...


def test_a_stage_that_knows_no_shapes_runs_by_methods(stage):
    bare = Bare(nn.Linear(WIDTH, WIDTH), 0, 1, CPU)
    assert select_mode([stage], schedules, is_plain=True) is Mode.NATIVE
    assert select_mode([stage, bare], schedules, is_plain=True) is Mode.DIRECT


def modes_of(schedule, *args, **kwargs):
    """The modes that a step selects."""
    modes = []

    def noted(*given, **named):
        modes.append(select_mode(*given, **named))
        return modes[-1]

    with mock.patch.object(_schedule_base, "select_mode", noted):
        schedule.step(*args, **kwargs)
    return modes


def single(kind, **options):
    """A schedule of one rank."""
    example = torch.ones(BATCH // MICROBATCHES, WIDTH)
    stage = Stage(nn.Linear(WIDTH, WIDTH), 0, 1, CPU, input_args=example, output_args=example.clone().requires_grad_())
    return kind([stage] if issubclass(kind, schedules.PipelineScheduleMulti) else stage, MICROBATCHES, **options)


@pytest.mark.parametrize("name", ["_maybe_compute_loss", "_maybe_get_loss"])
def test_a_schedule_with_its_own_way_to_a_loss_is_asked_for_it(name):
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    with fake_group():
        schedule = single(schedules.ScheduleGPipe, loss_fn=averaged)
        assert modes_of(schedule, x, target=target) == [Mode.NATIVE]
        for owner in (schedule, schedules.ScheduleGPipe, schedules._PipelineSchedule):
            original = getattr(schedule, name)
            with mock.patch.object(owner, name, side_effect=original) as asked:
                assert modes_of(schedule, x, target=target) == [Mode.DIRECT]
            assert asked.call_count == MICROBATCHES
        assert modes_of(schedule, x, target=target) == [Mode.NATIVE]


def test_custom_functions_take_the_long_way():
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    seen = []
    with fake_group():
        schedule = single(schedules._PipelineScheduleRuntime, loss_fn=averaged)
        schedule._prepare_schedule_with_comms({0: Package(OURS).actions("0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3")})
        assert modes_of(schedule, x, target=target) == [Mode.NATIVE]
        schedule.register_custom_function(schedules.B, lambda action, _: seen.append(str(action)))
        assert modes_of(schedule, x, target=target) == [Mode.DIRECT]
    assert seen == ["0B0", "0B1", "0B2", "0B3"]


# What a step must not take for granted --------------------------------------------------------------------------------


class Lazy(nn.Module):
    """Makes its weight in the first call."""

    def forward(self, x):
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.full((WIDTH,), 2.0))
        return x * self.gain


def replace_weight(module, _):
    if not hasattr(module, "was_replaced"):
        module.was_replaced = True
        module.weight = nn.Parameter(module.weight.detach() * 2)


def swapped():
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    module.register_forward_pre_hook(replace_weight)
    return module


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("make", [Lazy, swapped])
def test_weights_that_are_made_in_a_step_are_divided_too(make, name):
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    with fake_group():
        module = make()
        example = torch.ones(BATCH // MICROBATCHES, WIDTH)
        stage = PipelineStage(module, 0, 1, CPU, input_args=example, output_args=example.clone().requires_grad_())
        kind = Package(OURS).schedule_class(name)
        kind([stage] if name == "Interleaved1F1B" else stage, MICROBATCHES, loss_fn=averaged).step(x, target=target)
    (weight,) = module.parameters()
    found, weight.grad = weight.grad, None
    averaged(module(x), target).backward()
    torch.testing.assert_close(found, weight.grad)


class OnItsWay(dist.Work):
    """A message that never comes."""

    def wait(self):
        return True

    def is_completed(self):
        return False


def test_after_a_step_that_failed_among_messages_there_is_no_other():
    def refuse(*_):
        raise ArithmeticError

    example = torch.ones(2, WIDTH, requires_grad=True)
    with fake_group(1, 2), mock.patch.object(schedules, "_batch_p2p", side_effect=lambda *_, **__: [OnItsWay()]):
        stage = PipelineStage(nn.Linear(WIDTH, WIDTH), 1, 2, CPU, input_args=example, output_args=example)
        schedule = schedules.ScheduleGPipe(stage, MICROBATCHES, loss_fn=refuse)
        with pytest.raises(ArithmeticError):
            schedule.step(target=numbers(2, BATCH, WIDTH))
        with pytest.raises(RuntimeError, match="the previous step failed with messages still in flight"):
            schedule.step(target=numbers(2, BATCH, WIDTH))


class FailsOnce(nn.Module):
    """Fails in one of its forwards."""

    def __init__(self, number):
        super().__init__()
        self.layer, self.left = nn.Linear(WIDTH, WIDTH), number

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError
        return self.layer(x)


@pytest.mark.parametrize("mode", Mode)
def test_a_rank_that_failed_between_its_sends_takes_no_other_step(mode):
    """The rank after it would take the messages of the next step for those that are missing."""
    example = torch.ones(2, WIDTH, requires_grad=True)
    with fake_group(0, 2), mock.patch.object(_schedule_base, "select_mode", return_value=mode):
        stage = PipelineStage(FailsOnce(3), 0, 2, CPU, input_args=example, output_args=example)
        schedule = schedules.PipelineScheduleMulti([stage], MICROBATCHES, loss_fn=None)
        schedule.pipeline_order = {
            rank: Package(OURS).actions(" ".join(f"{rank}F{each}" for each in range(MICROBATCHES))) for rank in range(2)
        }
        with pytest.raises(RuntimeError, match="failed to run forward of microbatch 2"):
            schedule.step(numbers(1, BATCH, WIDTH))
        with pytest.raises(RuntimeError, match="the previous step failed with messages still in flight"):
            schedule.step(numbers(1, BATCH, WIDTH))


# On several ranks -----------------------------------------------------------------------------------------------------


def train(rank, ranks, name, between, *, group):
    """Steps of which each goes another way on each rank; the gradients of every one are those of the unsplit model."""
    package, placement = Package(OURS), PLACEMENTS[name]
    count = sum(map(len, placement))
    model = layers(count)
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    expected = unsplit(model, x, target)
    stages = [PipelineStage(model[index], index, count, CPU, group=group) for index in placement[rank]]
    schedule = package.schedule_class(name)(
        stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=summed, scale_grads=False
    )
    posted = []
    original = schedules._batch_p2p

    def counted(operations, desc=None):
        posted.append(len(operations))
        return original(operations, desc)

    counts = []
    for number in range(4):
        model.zero_grad()
        posted.clear()
        own_way = number % 2 == (rank if between == "by turns" else 1)
        with ExitStack() as around:
            around.enter_context(mock.patch.object(schedules, "_batch_p2p", counted) if own_way else nullcontext())
            args, kwargs = step_arguments(stages, x, target, [])
            schedule.step(*args, **kwargs)
        assert_gradients(model, placement[rank], expected.gradients)
        assert not any(stage._channel.is_open for stage in stages)  # a group that ends is not held
        counts.append((own_way, sum(posted)))
    return counts


@pytest.mark.parametrize("between", ["by turns", "together"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_ranks_go_either_way_whichever_the_others_go(workers, name, between):
    for rank, counts in enumerate(workers.run(train, name, between, ranks=2)):
        stages, count = PLACEMENTS[name][rank], sum(map(len, PLACEMENTS[name]))
        ends = [each for stage in stages for each in (stage - 1, stage + 1) if 0 <= each < count and each not in stages]
        for own_way, posted in counts:
            assert posted == (2 * MICROBATCHES * len(ends) if own_way else 0)


class Scaled(nn.Module):
    """Takes a factor by keyword."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, factor=None):
        return self.layer(x) if factor is None else self.layer(x) * factor.sum(1, keepdim=True)


class Twice(nn.Module):
    """Two tensors on an edge, of which the second needs no gradient."""

    def __init__(self, layer, last):
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, x, count=None):
        y = self.layer(x) + (0 if count is None else count)
        return y if self.last else (y, y.detach() + 1)


class View(nn.Module):
    """What it returns is a view, and cannot be sent as it is."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.T.contiguous().T).T.contiguous().T


def frozen(model):
    model[0].requires_grad_(False)
    return model


class Wrapped(nn.Module):
    """The last stage returns more than a tensor."""

    def __init__(self, layer, last):
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, x):
        return {"y": self.layer(x), "none": None} if self.last else self.layer(x)


def of_any(output, target):
    return averaged(output["y"] if isinstance(output, dict) else output, target)


MODELS = {
    "a dictionary": lambda model: nn.ModuleList([Wrapped(one, one is model[-1]) for one in model]),
    "one tensor": lambda model: model,
    "by keyword": lambda model: nn.ModuleList(map(Scaled, model)),
    "two tensors": lambda model: nn.ModuleList([Twice(one, one is model[-1]) for one in model]),
    "views": lambda model: nn.ModuleList(map(View, model)),
    "a frozen stage": frozen,
}


def summary_of(value):
    """What can be compared of a value that a stage holds."""
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.requires_grad, value.grad_fn is None
    if isinstance(value, dict):
        return {key: summary_of(one) for key, one in value.items()}
    return [summary_of(one) for one in value] if isinstance(value, list | tuple) else type(value)


def step_each_way(rank, ranks, name, kind, *, group):
    """What steps leave, for each way: gradients, losses, outputs, and what the stages hold; and calls of methods."""
    placement = PLACEMENTS[name]
    count = sum(map(len, placement))
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    left, calls = {}, {}
    for mode in Mode:
        model = MODELS[kind](layers(count))
        stages = [PipelineStage(model[index], index, count, CPU, group=group) for index in placement[rank]]
        schedule = Package(OURS).schedule_class(name)(
            stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=of_any
        )
        keywords = {"factor": numbers(3, BATCH, WIDTH)} if kind == "by keyword" else {}
        left[mode], counts = [], []
        with (
            mock.patch.object(_schedule_base, "select_mode", return_value=mode),
            mock.patch.object(StageCompute, "_backward", autospec=True, side_effect=StageCompute._backward) as backward,
            mock.patch.object(
                StageCompute, "_outgoing_tensors", autospec=True, side_effect=StageCompute._outgoing_tensors
            ) as sent,
            mock.patch.object(
                StageCompute, "_receive_buffers", autospec=True, side_effect=StageCompute._receive_buffers
            ) as come,
        ):
            for method in (schedule.step, schedule.step, torch.no_grad()(schedule.eval), schedule.eval):
                counts.append((backward.call_count, sent.call_count, come.call_count))
                losses = []
                args, kwargs = step_arguments(stages, x, target, losses)
                output = method(*args, **kwargs, **keywords)
                held = [
                    (one.fwd_cache, one.bwd_cache, one.output_chunks, one.backward_state, one.dw_runner)
                    for one in stages
                ]
                buffers = [[info.buffer for infos in one.args_recv_info.values() for info in infos] for one in stages]
                gradients = [parameter.grad for one in stages for parameter in one.submod.parameters()]
                left[mode].append(summary_of([output, losses, gradients, held, buffers]))
            calls[mode] = counts[-1]  # an evaluation with gradients always runs by methods
    return left, calls


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_all_ways_leave_the_same(workers, name, kind):
    for left, calls in workers.run(step_each_way, name, kind, ranks=2):
        for mode in (Mode.DIRECT, Mode.NATIVE):
            assert left[mode] == left[Mode.METHODS]
        backwards, _, receives = calls[Mode.DIRECT]
        assert backwards > 0
        assert receives > 0
        if kind == "one tensor":
            assert calls[Mode.NATIVE] == (0, 0, 0)


def halves_apart(mode):
    """I in a step, W after it, by the program."""
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    with fake_group():
        stages = [PipelineStage(layer, index, 2, CPU) for index, layer in enumerate(layers(2))]
        schedule = schedules._PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=summed, scale_grads=False)
        with mock.patch.object(_schedule_base, "select_mode", return_value=mode):
            row = " ".join(f"0F{each} 1F{each} 1I{each} 0I{each}" for each in range(MICROBATCHES))
            schedule.pipeline_order_with_comms = {0: Package(OURS).actions(row)}
            schedule.step(x, target=target)
        left = [(list(stage.dw_runner), list(stage.backward_state)) for stage in stages]
        for each in range(MICROBATCHES):
            for stage in stages:
                stage.backward_weight_one_chunk(each)
    return left, [parameter.grad.tolist() for stage in stages for parameter in stage.submod.parameters()]


def test_weights_may_get_their_gradients_after_the_step():
    expected = halves_apart(Mode.METHODS)
    assert expected[0] == [([0, 1, 2, 3], [0, 1, 2, 3])] * 2
    assert halves_apart(Mode.NATIVE) == expected


class NoKeywords(schedules.ScheduleGPipe):
    def _split_inputs(self, args, kwargs=None):
        return super()._split_inputs(args, kwargs)[0], [None] * MICROBATCHES


def test_no_keyword_arguments_may_be_none():
    with fake_group():
        assert modes_of(single(NoKeywords), numbers(1, BATCH, WIDTH)) == [Mode.NATIVE]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("half", ["B", "I"])
def test_errors_are_alike(failing, half):
    def refuse(*_):
        raise ArithmeticError("boom")

    messages = []
    for mode in Mode:
        with fake_group(), mock.patch.object(_schedule_base, "select_mode", return_value=mode):
            stages = [PipelineStage(layer, index, 2, CPU) for index, layer in enumerate(layers(2))]
            stages[failing].submod[1].register_full_backward_hook(refuse)
            schedule = schedules._PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=summed)
            row = " ".join(f"0F{each} 1F{each} 1{half}{each} 0B{each}" for each in range(MICROBATCHES))
            schedule.pipeline_order_with_comms = {0: Package(OURS).actions(row)}
            with pytest.raises(RuntimeError, match="boom") as caught:
                schedule.step(numbers(1, BATCH, WIDTH), target=numbers(2, BATCH, WIDTH))
        messages.append(str(caught.value).partition("\n")[0])
    assert messages[0] == messages[1] == messages[2]


def test_several_kinds_of_numbers_go_directly(workers):
    assert workers.run(send_kinds, ranks=2) == [True, True]


class Widened(nn.Module):
    """Outputs of several kinds, one of them no view that could be sent as it is."""

    def __init__(self, last):
        super().__init__()
        self.last = last
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64))

    def forward(self, x, phase=None, count=None):
        x = x * self.weight
        if self.last:
            return x.T.sum(0) + phase.abs().sum() + count.sum()
        return x.T.contiguous().T, torch.polar(x.abs().detach() + 1, x.detach()), torch.arange(3)


def send_kinds(rank, ranks, *, group):
    whole = nn.ModuleList([Widened(False), Widened(True)])
    x, target = numbers(1, BATCH, WIDTH).double(), torch.zeros(BATCH, dtype=torch.float64)

    def loss_fn(output, target):
        return ((output - target) ** 2).sum()

    for rows in x.split(BATCH // MICROBATCHES):
        loss_fn(whole[1](*whole[0](rows)), 0).backward()
    expected = whole[rank].weight.grad
    whole[rank].weight.grad = None
    stage = PipelineStage(whole[rank], rank, ranks, CPU, group=group)
    schedule = schedules.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
    args, kwargs = step_arguments([stage], x, target, [])
    schedule.step(*args, **kwargs)
    return torch.allclose(whole[rank].weight.grad, expected)
