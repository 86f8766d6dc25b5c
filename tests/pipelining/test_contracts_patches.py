"""What programs replace after the fact: modules of stages, methods of classes, orders, names in modules."""

import inspect
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipelining.contracts import (
    CPU,
    OURS,
    UPSTREAM,
    WIDTH,
    Package,
    assert_gradients,
    fake_group,
    layers,
    numbers,
    step_arguments,
    summed,
    text,
    unsplit,
)

BATCH, MICROBATCHES = 8, 4
STAGES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}


def pipelined(package, name, model, **options):
    stages = [package.stage.PipelineStage(module, i, len(model), CPU) for i, module in enumerate(model)]
    kind = package.schedule_class(name)
    return kind(stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=summed, scale_grads=False, **options)


def data():
    return numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)


# Modules --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", STAGES)
def test_the_module_of_a_stage_is_replaced(package, name):
    """Trainers make stages first, and put the parallel module in later: before the schedule, or after it."""
    (x, target), count = data(), STAGES[name]
    schedule = pipelined(package, name, layers(count))
    stages = [schedule._stage] if count == 1 else schedule._stages
    for seed in (1, 2):
        model = layers(count, seed=seed)
        expected = unsplit(model, x, target)
        for stage, module in zip(stages, model, strict=True):
            stage.submod = module
        torch.testing.assert_close(schedule.step(x, target=target), expected.output)
        assert_gradients(model, range(count), expected.gradients)


# Classes --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("method", ["forward_one_chunk", "backward_one_chunk", "backward_maybe_with_nosync"])
def test_a_method_of_all_stages_is_replaced(package, name, method, monkeypatch):
    base, seen = package.stage._PipelineStageBase, []
    original = getattr(base, method)

    def replacement(self, *args, **kwargs):
        seen.append(self.stage_index)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(base, method, replacement)
    x, target = data()
    pipelined(package, name, layers(STAGES[name])).step(x, target=target)
    assert len(seen) >= STAGES[name] * MICROBATCHES


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", STAGES)
def test_the_step_of_all_schedules_is_replaced(package, name, monkeypatch):
    """By one that takes microbatches which are split already."""
    s = package.schedules
    base = s.PipelineScheduleSingle if STAGES[name] == 1 else s.PipelineScheduleMulti

    def step(self, *, arg_mbs, target_mbs, losses=None, return_outputs=False, loss_kwargs=None):
        for stage in [self._stage] if STAGES[name] == 1 else self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        empty = [{}] * len(arg_mbs)
        self._step_microbatches(arg_mbs, empty, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)

    monkeypatch.setattr(base, "step", step)
    (x, target), model, losses = data(), layers(STAGES[name]), []
    expected = unsplit(model, x, target)
    schedule = pipelined(package, name, model)
    schedule.step(arg_mbs=[(part,) for part in x.chunk(4)], target_mbs=list(target.chunk(4)), losses=losses)
    torch.testing.assert_close(sum(losses), expected.loss)
    assert_gradients(model, range(STAGES[name]), expected.gradients)


@pytest.mark.usefixtures("one_rank")
def test_the_function_of_the_loss_is_replaced(package, monkeypatch):
    seen = []

    def compute(self, output, target, loss_kwargs=None):
        seen.append(loss_kwargs)
        return summed(output, target)

    monkeypatch.setattr(package.schedules._PipelineSchedule, "_compute_loss", compute)
    x, target = data()
    for name, count in STAGES.items():
        schedule = pipelined(package, name, layers(count))
        schedule._loss_fn = lambda output, target, a: summed(output, target)  # which finding shapes may call
        seen.clear()
        schedule.step(x, target=target, loss_kwargs={"a": 1})
        assert seen == [{"a": 1}] * MICROBATCHES


# Orders ---------------------------------------------------------------------------------------------------------------


def test_the_order_of_a_rank_without_a_constructor(package):
    """A picture of a schedule is made of an object that has only what its order depends on."""
    s = package.schedules
    bare = s.ScheduleInterleaved1F1B.__new__(s.ScheduleInterleaved1F1B)
    bare.pp_group_size, bare._num_stages, bare._n_microbatches, bare.n_local_stages = 2, 4, 4, 2
    bare.stage_index_to_group_rank = {0: 0, 1: 1, 2: 0, 3: 1}
    bare.rank, bare.number_of_rounds, bare.microbatches_per_round = 0, 2, 2
    found = bare._calculate_single_rank_operations(1)
    assert text([action for action in found if action is not None]) == (
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_the_order_of_a_rank_is_overridden(package, name):
    """A subclass of a schedule with an order of its own: the constructor asks for it."""
    rows = "0F0 1F0 0F1 1F1 0F2 1F2 0F3 1F3 1B0 1B1 1B2 1B3 0B0 0B1 0B2 0B3"
    asked = []

    class Other(package.schedule_class(name)):
        def _calculate_single_rank_operations(self, rank):
            asked.append(rank)
            return package.actions(rows)

    model, (x, target) = layers(2), data()
    expected = unsplit(model, x, target)
    stages = [package.stage.PipelineStage(model[i], i, 2, CPU) for i in range(2)]
    schedule = Other(stages, MICROBATCHES, loss_fn=summed, scale_grads=False)
    assert asked == [0]
    assert text([action for action in schedule.pipeline_order[0] if action is not None]) == rows
    schedule.step(x, target=target)
    assert_gradients(model, [0, 1], expected.gradients)


@pytest.mark.parametrize(
    "name", ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_passes_agree_with_torch_on_its_own_rows(name):
    """With idle steps as they are in torch's rows, and halves merged before."""
    results = []
    for package in (Package(OURS), Package(UPSTREAM)):
        stage = mock.Mock(group_rank=0, group_size=4, num_stages=8, submod=None)
        with mock.patch.object(Package(UPSTREAM).schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
            rows = Package(UPSTREAM).schedule_class(name)([stage, stage], 8).pipeline_order
        given = {rank: package.actions(text(row)) for rank, row in rows.items()}
        s = package.schedules
        ranks = s._validate_schedule(given, 4, 8, 8)
        merged = {rank: s._merge_bw(list(row)) for rank, row in given.items()}  # torch's passes empty what they get
        found = [merged]
        for compute in (given, merged):
            copied = {rank: list(row) for rank, row in compute.items()}
            found.append(s._add_send_recv(copied, stage_to_rank=ranks.__getitem__, num_stages=8))
        found.append(s._defer_recv_ops(found[-1], ranks.__getitem__))
        if name != "DualPipeV":
            found.append(s._simulate_comms_compute(found[1], stage_to_rank=ranks.__getitem__, num_stages=8))
        results.append([{rank: text(row) for rank, row in each.items()} for each in found])
    assert results[0] == results[1]


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("schedules", "dist logger record_function merge_chunks split_args_kwargs_into_chunks TensorChunkSpec"
                      " PipelineStage _PipelineStageBase generate_stage_to_rank_mapping _split_tensor InferenceMode"),
        ("stage", "dist logger stage_backward stage_backward_input stage_backward_weight flatten_args map_debug_info"
                  " PipeliningMetadataError _RecvInfo _make_tensor_from_meta to_local_if_dtensor InferenceMode"),
        ("microbatch", "BlockMask logger DEFAULT_CHUNK_DIM sum_reducer _debug_mask_minibatches"),
    ],
)  # fmt: skip
def test_names_that_programs_take_from_a_module(package, module, names):
    """Some only pass through, and are reached for or replaced there all the same."""
    found = getattr(package, module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("op", ["isend", "irecv"])
def test_operations_are_made_by_the_name_in_the_module(package, op):
    module = layers(1)[0]
    given = numbers(1, 2, WIDTH).requires_grad_()
    with fake_group(1, 3):
        stage = package.stage.PipelineStage(module, 1, 3, CPU, input_args=given, output_args=module(given))
        stage._inference_mode = package._utils.InferenceMode.STATIC
        stage._prepare_forward_infra(1, (), {}, has_backward=False)
        with mock.patch(f"{package.name}.stage.dist.P2POp") as made:
            if op == "irecv":
                operations = stage.get_fwd_recv_ops(0)
            else:
                stage.fwd_cache[0] = ((given.detach(),), [])
                operations = stage.get_fwd_send_ops(0)
        assert operations == [made.return_value]
        (given_op, tensor, peer, *_), options = made.call_args
        assert given_op is getattr(dist, op)
        assert tensor.numel() == given.numel()
        assert peer == (0 if op == "irecv" else 2)
        assert options.get("group", stage.group) == stage.group


def test_a_mesh_function_is_read_back(package):
    """By programs that make a stage of another class from one."""
    with fake_group():

        def get_mesh(names, layout):
            return None

        stage = package.stage.PipelineStage(nn.Identity(), 0, 1, CPU, get_mesh=get_mesh)
        assert stage._mesh_cache._get_mesh_cb is get_mesh
        again = type(stage)(
            stage.submod, stage.stage_index, stage.num_stages, stage.device, group=stage.group,
            dw_builder=stage.dw_builder, get_mesh=stage._mesh_cache._get_mesh_cb,
        )  # fmt: skip
        again.stage_index_to_group_rank = stage.stage_index_to_group_rank
        assert again.stage_index_to_group_rank == {0: 0}


@pytest.mark.usefixtures("one_rank")
def test_a_device_by_its_name(package):
    """A string will do, and is what the stage has then."""
    model, (x, target) = layers(2), data()
    expected = unsplit(model, x, target)
    stages = [package.stage.PipelineStage(model[i], i, 2, "cpu") for i in range(2)]
    schedule = package.schedules.ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=summed, scale_grads=False)
    torch.testing.assert_close(schedule.step(x, target=target), expected.output)
    assert_gradients(model, [0, 1], expected.gradients)
    assert torch.device(stages[0].device) == CPU


# Backwards without autograd -------------------------------------------------------------------------------------------


class Explicit:
    """A forward and a backward that are written out: what they save goes through the cache of the stage."""

    def __init__(self, package):
        self.s, self.normal = package.schedules, package.stage._normalize_model_output_as_tuple

    def forward(self, action, ctx):
        schedule = ctx.schedule_ref
        stages = {stage.stage_index: stage for stage in schedule._stages}
        index, microbatch = action.stage_index, action.microbatch_index
        stage = stages[index]
        if not stage.is_first and index - 1 not in stages:
            self.s._wait_batch_p2p(schedule.fwd_recv_ops.pop((index, microbatch)))
        (x,) = ctx.arg_mbs[microbatch] if stage.is_first else stage._retrieve_recv_activations(microbatch)
        output = x.detach() @ stage.submod.weight.detach().t()
        if stage.is_last:
            stage.output_chunks.append(output)
        stage.fwd_cache[microbatch] = (self.normal(output), [x.detach(), output])
        schedule._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
        self.targets = ctx.target_mbs
        if index + 1 in stages:
            stages[index + 1].set_local_fwd_input(output, microbatch)

    def backward(self, action, ctx):
        schedule = ctx.schedule_ref
        stages = {stage.stage_index: stage for stage in schedule._stages}
        index, microbatch = action.stage_index, action.microbatch_index
        stage = stages[index]
        if not stage.is_last and index + 1 not in stages:
            self.s._wait_batch_p2p(schedule.bwd_recv_ops.pop((index, microbatch)))
        schedule.backward_counter[index] += 1
        assert schedule._maybe_get_loss(stage, microbatch) is not None or not stage.is_last
        _, (x, output) = stage.fwd_cache.pop(microbatch)
        if stage.is_last:
            gradient = 2 * (output - ctx.target_mbs[microbatch])
        else:
            (gradient,) = stage._retrieve_recv_grads(microbatch)
        weight = stage.submod.weight
        with torch.no_grad():
            part = gradient.t() @ x
            weight.grad = part if weight.grad is None else weight.grad + part
            stage.bwd_cache[microbatch] = (gradient @ weight,)
        if index - 1 in stages:
            stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)
        elif stage.is_first:
            stage.bwd_cache.pop(microbatch)


def explicit(rank, ranks, name, placement, *, group):
    package = Package(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    expected = unsplit(model, x, target)
    microbatches = MICROBATCHES if placement[0] == [0, 2] else 2
    given = numbers(3, BATCH // microbatches, WIDTH).requires_grad_()
    known = {"input_args": given, "output_args": given}
    stages = [package.stage.PipelineStage(model[i], i, 4, CPU, group=group, **known) for i in placement[rank]]
    s, functions = package.schedules, Explicit(package)
    options = {"loss_fn": summed, "scale_grads": False, "backward_requires_autograd": False}
    if microbatches == MICROBATCHES:
        schedule = s.ScheduleInterleaved1F1B(stages, microbatches, **options)
    else:
        schedule = s._PipelineScheduleRuntime(stages, microbatches, **options)
        schedule._prepare_schedule_with_comms(
            package.rows("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
        )
    schedule.register_custom_function(s.FORWARD, functions.forward)
    schedule.register_custom_function(s.FULL_BACKWARD, functions.backward)
    schedule.register_custom_function(s.REDUCE_GRAD, lambda action, ctx: None)
    for _ in range(2):
        model.zero_grad()
        losses = []
        args, kwargs = step_arguments(stages, x, target, losses)
        with torch.no_grad():
            schedule.step(*args, **kwargs)
    assert_gradients(model, placement[rank], expected.gradients)
    return [round(loss.item(), 4) for loss in losses]


@pytest.mark.parametrize("placement", [[[0, 2], [1, 3]], [[0, 3], [1, 2]]], ids=["loop", "v"])
def test_steps_without_autograd(package, workers, placement):
    found = workers.run(explicit, package.name, placement, ranks=2)
    assert sum(bool(losses) for losses in found) == 1


def test_signatures_that_programs_look_at(package):
    """Some choose their call by the number of parameters."""
    stage = package.stage.PipelineStage
    assert list(inspect.signature(stage._prepare_forward_infra).parameters)[1:] == [
        "num_microbatches", "args", "kwargs", "has_backward",
    ]  # fmt: skip
    assert "get_mesh" in inspect.signature(stage).parameters
    assert "scale_grads" in inspect.signature(package.schedules.ScheduleGPipe).parameters
    assert "loss_kwargs" in inspect.signature(package.schedules.ScheduleGPipe.step).parameters


# Between steps --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("way", ["in place", "row", "whole"])
def test_an_order_is_changed_between_steps(package, way):
    """Wherever in it: the next step runs what is there."""
    model, (x, target) = layers(2), data()
    schedule = pipelined(package, "Interleaved1F1B", model)
    seen = []
    schedule.register_custom_function(package.schedules.REDUCE_GRAD, lambda action, ctx: seen.append(str(action)))
    schedule.step(x, target=target)
    rows = schedule.pipeline_order_with_comms
    first = next(action for action in rows[0] if str(action) == "0REDUCE_GRAD")
    if way == "in place":
        rows[0].remove(first)
    else:
        without = [action for action in rows[0] if action != first]
        if way == "row":
            rows[0] = without
        else:
            schedule.pipeline_order_with_comms = {0: without}
    schedule.step(x, target=target)
    assert seen == ["1REDUCE_GRAD", "0REDUCE_GRAD", "1REDUCE_GRAD"]


@pytest.mark.usefixtures("one_rank")
def test_an_order_of_time_steps_is_changed_between_steps(package):
    model, (x, target) = layers(1), data()
    expected = unsplit(model, x, target)
    stage = package.stage.PipelineStage(model[0], 0, 1, CPU)
    schedule = package.schedules.PipelineScheduleMulti([stage], 2, loss_fn=summed, scale_grads=False)
    for row in ("0F0 0F1 0B0 0B1", "0F0 0F1 0B1 0B0", "0F0 0F1 . 0I0 0I1 0W1 0W0"):
        model.zero_grad()
        schedule.pipeline_order = package.rows(row)
        schedule._validate_and_set_stage_mapping(schedule.pipeline_order)
        torch.testing.assert_close(schedule.step(x, target=target), expected.output)
        assert_gradients(model, [0], expected.gradients)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_the_number_of_microbatches_is_changed_between_steps(package, name):
    model, (x, target) = layers(1), data()
    expected = unsplit(model, x, target)
    schedule = pipelined(package, name, model)
    for microbatches in (4, 2, 8):
        model.zero_grad()
        schedule._n_microbatches = microbatches
        schedule._stage_forward_initialized = schedule._stage_backward_initialized = False
        losses = []
        torch.testing.assert_close(schedule.step(x, target=target, losses=losses), expected.output)
        assert len(losses) == microbatches
        assert_gradients(model, [0], expected.gradients)
    schedule._n_microbatches = 2  # fewer of the same size: nothing is found anew
    torch.testing.assert_close(schedule.step(x[:2], target=target[:2]), expected.output[:2])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", STAGES)
def test_the_scale_is_changed_between_steps(package, name):
    model, (x, target) = layers(STAGES[name]), data()
    expected = unsplit(model, x, target)
    schedule = pipelined(package, name, model)
    for scale in (True, False, True):
        model.zero_grad()
        schedule.scale_grads = scale
        schedule.step(x, target=target)
        divided = {key: value / MICROBATCHES if scale else value for key, value in expected.gradients.items()}
        assert_gradients(model, range(STAGES[name]), divided)
