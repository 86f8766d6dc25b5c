"""Subclasses of a stage that do a part of its work in their own way, as trainers have them."""

import types

import pytest
import torch
import torch.distributed as dist

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

BATCH = 8
PLACEMENTS = {"GPipe": [[0], [1]], "1F1B": [[0], [1]], "Interleaved1F1B": [[0, 2], [1, 3]],
              "InterleavedZeroBubble": [[0, 2], [1, 3]], "ZBVZeroBubble": [[0, 3], [1, 2]],
              "DualPipeV": [[0, 3], [1, 2]]}  # fmt: skip


def own_backward(package):
    """A stage that calls the functions of the backward itself."""
    b = package._backward

    class Own(package.stage.PipelineStage):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.kinds = []

        def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
            self.kinds.append((backward_type, sorted(bwd_kwargs), last_backward))
            if backward_type == "full":
                given = (bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
                return b.stage_backward(*given), None
            if backward_type == "input":
                given = (bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
                return b.stage_backward_input(*given, self.submod.parameters())
            assert backward_type == "weight"
            return b.stage_backward_weight(self.submod.parameters(), bwd_kwargs["param_groups"]), None

    return Own


def own_sends(package):
    """A stage that makes its messages itself, of the outputs in its cache."""

    class Own(package.stage.PipelineStage):
        sent = 0

        def get_fwd_send_ops(self, fwd_chunk_id):
            outputs, _ = self.fwd_cache[fwd_chunk_id]
            operations = []
            for index, output in enumerate(outputs):
                for stage in self.act_send_info[index]:
                    if stage is None:
                        continue
                    peer = dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])
                    operations.append(dist.P2POp(dist.isend, output.detach(), peer, self.group))
            self.sent += len(operations)
            return operations

    return Own


def sends_by_itself(package):
    """A stage that sends at once, and waits when the backward of the microbatch comes."""

    class Own(package.stage.PipelineStage):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.works = {}

        def get_fwd_send_ops(self, fwd_chunk_id):
            operations = super().get_fwd_send_ops(fwd_chunk_id)
            if operations and self.has_backward:
                self.works[fwd_chunk_id] = package.schedules._batch_p2p(operations)
                return []
            return operations

        def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
            for work in self.works.pop(bwd_chunk_id, []):
                work.wait()

    return Own


def own_forward(package):
    """A stage with a forward of its own: it takes what was received, and fills the caches."""

    class Own(package.stage.PipelineStage):
        found_shapes = False

        def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
            given = args if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
            output = self.forward_maybe_with_nosync(*given, **(kwargs or {}))
            if self.is_last and save_forward_output:
                self.output_chunks.append(output)
            flat = package._utils.flatten_args(given) + package._utils.flatten_args(kwargs or {})
            self.fwd_cache[fwd_chunk_id] = ((output,), flat)
            return output

        def _retrieve_recv_grads(self, bwd_chunk_id):
            grads = super()._retrieve_recv_grads(bwd_chunk_id)
            assert isinstance(grads, tuple)
            return tuple(grad.clone() for grad in grads)

        def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
            if not self.is_first:
                self.bwd_cache[bwd_chunk_id] = tuple(grad.contiguous() for grad in self.bwd_cache[bwd_chunk_id])

        def _compute_outputs(self, *args, module, **kwargs):
            self.found_shapes = True
            return super()._compute_outputs(*args, module=module, **kwargs)

        def _compute_input_grads(self, outputs, all_fwd_inputs, grad_outputs=None):
            assert len(outputs) == 1
            return super()._compute_input_grads(outputs, all_fwd_inputs, grad_outputs)

    return Own


def only_on_the_object(package):
    """No subclass: the method is put on the object after the schedule was made."""
    return package.stage.PipelineStage


STAGES = {
    "backward": own_backward,
    "sends": own_sends,
    "sends by itself": sends_by_itself,
    "forward": own_forward,
    "object": only_on_the_object,
}


def train(rank, ranks, name, kind, schedule_name, *, group):
    package = Package(name)
    placement = PLACEMENTS[schedule_name]
    count = sum(map(len, placement))
    model = layers(count)
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    expected = unsplit(model, x, target)
    own = STAGES[kind](package)
    stages = [own(model[index], index, count, CPU, group=group) for index in placement[rank]]
    single = len(stages) == 1
    schedule = package.schedule_class(schedule_name)(
        stages[0] if single else stages, 4, loss_fn=summed, scale_grads=False
    )
    if kind == "object":
        for stage in stages:
            override = own_backward(package).backward_maybe_with_nosync
            stage.kinds = []
            stage.backward_maybe_with_nosync = types.MethodType(override, stage)
    with no_tensors_in_cycles():
        for _ in range(2):
            model.zero_grad()
            losses = []
            args, kwargs = step_arguments(stages, x, target, losses)
            output = schedule.step(*args, **kwargs)
    if any(stage.is_last for stage in stages):
        torch.testing.assert_close(output, expected.output)
        torch.testing.assert_close(sum(losses), expected.loss)
    assert_gradients(model, placement[rank], expected.gradients)
    return {stage.stage_index: seen(kind, stage) for stage in stages}


def seen(kind, stage):
    return {
        "backward": lambda: stage.kinds[-4:],
        "object": lambda: stage.kinds[-4:],
        "sends": lambda: stage.sent,
        "sends by itself": lambda: stage.works,
        "forward": lambda: stage.found_shapes,
        "plain backward": lambda: True,
        "further inputs": lambda: [grads for grads in stage.taken if len(grads) == 2 and grads[1] is not None] != [],
    }[kind]()


WHOLE = ["input_values", "output_grads", "stage_output"]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("kind", ["backward", "object"])
def test_the_whole_backward_in_ones_own_way(package, workers, kind, schedule):
    for stages in workers.run(train, package.name, kind, schedule, ranks=2):
        for kinds in stages.values():
            assert kinds == [("full", WHOLE, False)] * 3 + [("full", WHOLE, True)]


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.parametrize("kind", ["backward", "object"])
def test_halves_of_the_backward_in_ones_own_way(package, workers, kind, schedule):
    """The first stage has no gradients of inputs to make, and does all when those of the weights are due."""
    first, second = workers.run(train, package.name, kind, schedule, ranks=2)
    for index, kinds in (first | second).items():
        assert {each[0] for each in kinds} == ({"full"} if index == 0 else {"input", "weight"})
        assert kinds[-1][-1] is True
        assert all(each[1] == ["param_groups", "stage_output"] for each in kinds if each[0] == "weight")


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipeV"])
@pytest.mark.parametrize("kind", ["sends", "sends by itself", "forward"])
def test_other_parts_in_ones_own_way(package, workers, kind, schedule):
    found = workers.run(train, package.name, kind, schedule, ranks=2)
    for index, result in (found[0] | found[1]).items():
        last = index == sum(map(len, PLACEMENTS[schedule])) - 1
        beside = schedule == "DualPipeV" and index == 1
        sent = 0 if last or beside else 2 * 4
        assert result == {"sends": sent, "sends by itself": {}, "forward": True}[kind]


# On one rank ----------------------------------------------------------------------------------------------------------


def two_stages(package, own=None, **options):
    model = layers(2)
    kind = own or package.stage.PipelineStage
    return model, [kind(model[index], index, 2, CPU, **options) for index in range(2)]


def test_the_gradients_of_weights_in_ones_own_way(package):
    """A builder makes a function for each microbatch, called where the gradients of its weights are due."""
    built, called = [], []

    def dw_builder():
        number = len(built)
        built.append(number)
        return lambda: called.append(number)

    with fake_group():
        for name in ("InterleavedZeroBubble", "Interleaved1F1B"):
            model, stages = two_stages(package, dw_builder=dw_builder)
            schedule = package.schedule_class(name)(stages, 4, loss_fn=summed, scale_grads=False)
            x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
            expected = unsplit(model, x, target)
            built.clear()
            called.clear()
            schedule.step(x, target=target)
            assert sorted(called) == built == list(range(8))
            assert_gradients(model, [0, 1], expected.gradients)


def test_gradients_of_weights_that_are_not_due(package):
    with fake_group():
        for options in ({}, {"dw_builder": lambda: lambda: None}):
            stage = package.stage.PipelineStage(layers(1)[0], 0, 1, CPU, **options)
            stage.backward_weight_one_chunk(0)  # without a backward there is nothing to do
            stage._has_backward = True
            with pytest.raises(AssertionError, match="backward_one_chunk"):
                stage.backward_weight_one_chunk(bwd_chunk_id=0)


def test_a_stage_is_driven_by_hand(package):
    """Forward, backward and both halves, with what is handed over read and written in between."""
    with fake_group():
        model, stages = two_stages(package)
        x, target = numbers(1, 2, WIDTH), numbers(2, 2, WIDTH)
        expected = unsplit(model, x, target)
        schedule = package.schedules.ScheduleInterleaved1F1B(stages, 1, loss_fn=summed)
        for stage in stages:
            stage.has_backward = True
        schedule._initialize_stages((x,), {}, target)
        first, last = stages
        for full in (True, False):
            model.zero_grad()
            hidden = first.forward_one_chunk(0, (x,), {})
            last.set_local_fwd_input(hidden, 0)
            output = last.forward_one_chunk(0, ())
            torch.testing.assert_close(output, expected.output)
            assert list(last.fwd_cache) == [0]
            outputs, inputs = last.fwd_cache[0]
            assert outputs == (output,)
            assert len(inputs) == 1
            torch.testing.assert_close(inputs[0], hidden)
            assert inputs[0].is_leaf
            assert inputs[0].requires_grad
            last.backward_one_chunk(0, loss=summed(output, target), full_backward=full)
            (grad,) = last.get_local_bwd_output(0)
            first.set_local_bwd_input((grad,), 0)
            first.backward_one_chunk(0, full_backward=full, last_backward=True)
            if not full:
                last.backward_weight_one_chunk(0)
                first.backward_weight_one_chunk(0, last_backward=True)
            assert_gradients(model, [0, 1], expected.gradients)
            assert first.fwd_cache == last.fwd_cache == {}
            for stage in stages:
                stage.clear_runtime_states()


def test_what_is_handed_over_is_checked(package):
    with fake_group():
        _, stages = two_stages(package)
        x, target = numbers(1, 2, WIDTH), numbers(2, 2, WIDTH)
        schedule = package.schedules.ScheduleInterleaved1F1B(stages, 1, loss_fn=summed)
        schedule.step(x, target=target)
        first, last = stages
        with pytest.raises(AssertionError):
            last.set_local_fwd_input("text", 0)
        with pytest.raises(AssertionError):
            first.set_local_fwd_input(x, 0)
        with pytest.raises(AssertionError):
            first.set_local_bwd_input([x], 0)
        with pytest.raises(AssertionError):
            last.set_local_bwd_input((x,), 0)
        with pytest.raises(AssertionError):
            first.get_local_bwd_output(0)
        with pytest.raises(ValueError):  # noqa: PT011
            last.set_local_fwd_input((x, x), 0)
        first.has_backward = last.has_backward = False
        with pytest.raises(AssertionError):
            last.get_local_bwd_output(0)
        with pytest.raises(AssertionError):
            first.set_local_bwd_input((x,), 0)
        assert first.get_bwd_recv_ops(0) == []
        assert last.get_bwd_send_ops(0) == []


def test_gradients_are_divided_by_hand(package):
    with fake_group():
        stage = package.stage.PipelineStage(layers(1)[0], 0, 1, CPU)
        for parameter in stage.submod.parameters():
            parameter.grad = torch.full_like(parameter, 6.0)
        stage.scale_grads(1)
        stage.scale_grads(3)
        assert all((parameter.grad == 2.0).all() for parameter in stage.submod.parameters())
        stage.perform_reduce_grad(2)
        assert all((parameter.grad == 1.0).all() for parameter in stage.submod.parameters())
        frozen = next(stage.submod.parameters())
        frozen.grad = None
        stage.scale_grads(2)
        assert frozen.grad is None


def test_attributes_of_a_new_stage(package):
    with fake_group(1, 2):
        module = layers(1)[0]
        stage = package.stage.PipelineStage(module, 1, 4, CPU)
        assert stage.submod is module
        assert (stage.stage_index, stage.num_stages, stage.device) == (1, 4, CPU)
        assert (stage.group, stage.group_rank, stage.group_size) == (None, 1, 2)
        assert (stage.is_first, stage.is_last) == (False, False)
        assert (stage.has_backward, stage._has_backward) == (False, False)
        assert stage.stage_index_to_group_rank == {0: 0, 1: 1, 2: 0, 3: 1}
        for name in ("fwd_cache", "bwd_cache", "backward_state", "dw_runner", "args_recv_info", "act_send_info"):
            assert getattr(stage, name) == {}
        assert stage.grad_recv_info == {}
        assert stage.grad_send_info is None
        assert stage.output_chunks == []
        assert stage.chunks is None
        assert stage._runtime_validate is False
        assert isinstance(stage._stage_meta, package._utils._StageMeta)
        assert isinstance(stage._mesh_cache, package._utils._MeshCache)
        assert stage.dw_builder is None
        assert stage.log_prefix == "[Stage 1]"
        stage.has_backward = True
        assert stage._has_backward is True


# What an override is given --------------------------------------------------------------------------------------------


def plain_backward(package):
    """A stage that looks at the tensors which it differentiates, and calls autograd itself."""

    class Own(package.stage.PipelineStage):
        def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
            assert backward_type == "full"
            outputs = bwd_kwargs["stage_output"]
            outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
            assert all(output.requires_grad and output.grad_fn is not None for output in outputs)
            grads = bwd_kwargs["output_grads"] or (None,) * len(outputs)
            assert all(grad is None or grad.shape == output.shape for grad, output in zip(grads, outputs, strict=True))
            torch.autograd.backward(outputs, grads)
            found = [value.grad for value in bwd_kwargs["input_values"]]
            for value in bwd_kwargs["input_values"]:
                value.grad = None
            return tuple(found), None

    return Own


def further_inputs(package):
    """A stage that gives its module more than it receives, and takes the gradient of that as well."""

    class Own(package.stage.PipelineStage):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.taken = []

        def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
            (given,) = args if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
            further = torch.zeros_like(given).requires_grad_()
            output = self.forward_maybe_with_nosync(given + further)
            if self.is_last and save_forward_output:
                self.output_chunks.append(output)
            self.fwd_cache[fwd_chunk_id] = ((output,), [given, further])
            return output

        def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
            assert backward_type == "weight" or len(bwd_kwargs["input_values"]) == 2
            grads, left = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
            self.taken.append(grads)
            return grads, left

    return Own


STAGES |= {"plain backward": plain_backward, "further inputs": further_inputs}


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_an_override_is_given_tensors(package, workers, schedule):
    assert workers.run(train, package.name, "plain backward", schedule, ranks=2)


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_an_override_is_given_all_inputs_of_its_module(package, workers, schedule):
    for stages in workers.run(train, package.name, "further inputs", schedule, ranks=2):
        assert all(stages.values())
