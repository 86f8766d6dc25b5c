"""A stage in one process: what it is made of, what it does for a microbatch, and what it refuses."""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge

from penstock.pipelining._utils import PipeliningMetadataError
from penstock.pipelining.stage import PipelineStage
from pipelining.contracts import CPU, WIDTH, fake_group, numbers, wrong_upstream

MICROBATCHES = 4


@pytest.fixture(autouse=True)
def _group():
    with fake_group(1, 3):
        yield


def made(package, index=1, stages=3, module=None, **options):
    """A stage of three that knows what comes to it and goes from it."""
    module = nn.Linear(WIDTH, WIDTH) if module is None else module
    example = torch.empty(2, WIDTH, requires_grad=True)
    stage = package.stage.PipelineStage(module, index, stages, CPU, input_args=example, output_args=example, **options)
    stage.has_backward = True
    stage._inference_mode = package._utils.InferenceMode.STATIC
    args = (numbers(0, 2, WIDTH),) if index == 0 else None
    stage._prepare_forward_infra(MICROBATCHES, args, has_backward=True)
    stage._prepare_backward_infra(MICROBATCHES)
    return stage


def receive(stage, microbatch, value):
    (op,) = stage.get_fwd_recv_ops(microbatch)
    op.tensor.copy_(value)


def receive_gradient(stage, microbatch, value):
    (op,) = stage.get_bwd_recv_ops(microbatch)
    op.tensor.copy_(value)


# What it is -----------------------------------------------------------------------------------------------------------


def test_a_stage_says_what_it_is(package):
    module = nn.Linear(1, 1)
    stage = package.stage.PipelineStage(module, 1, 6, CPU)
    assert stage.submod is module
    assert (stage.stage_index, stage.num_stages, stage.device, stage.group) == (1, 6, CPU, None)
    assert (stage.group_rank, stage.group_size) == (1, 3)
    assert (stage.is_first, stage.is_last, stage.has_backward, stage._has_backward) == (False, False, False, False)
    assert stage.stage_index_to_group_rank == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}
    assert stage.chunks is stage.grad_send_info is stage.dw_builder is stage._inference_mode is None
    assert stage.fwd_cache == stage.bwd_cache == stage.args_recv_info == stage.act_send_info == stage.dw_runner == {}
    assert stage.grad_recv_info == stage.backward_state == {}
    assert stage.output_chunks == []
    assert stage.log_prefix == "[Stage 1]"
    assert not stage._runtime_validate
    assert not stage._stage_meta.has_any()
    assert len(stage._mesh_cache) == 0
    stage.has_backward = True
    assert stage._has_backward


def test_places_that_do_not_exist(package):
    with pytest.raises(ValueError, match="6"):
        package.stage.PipelineStage(nn.Identity(), 6, 6, CPU)
    with pytest.raises(RuntimeError, match="3"):
        package.stage.PipelineStage(nn.Identity(), 1, 2, CPU)


@pytest.mark.parametrize("wrong", ["text", (None,), ("text",), 3])
def test_examples_are_tensors(package, wrong):
    for name in ("input_args", "output_args"):
        with pytest.raises(package._utils.PipeliningMetadataError):
            package.stage.PipelineStage(nn.Identity(), 1, 3, CPU, **{name: wrong})
    assert issubclass(package._utils.PipeliningMetadataError, RuntimeError)


def test_neighbours_are_reached_in_both_directions(package):
    stage = package.stage.PipelineStage(nn.Identity(), 1, 3, CPU)
    ops = stage._get_init_p2p_neighbors_ops()
    assert [(op.op, op.group_peer) for op in ops] == [
        (dist.irecv, 0), (dist.isend, 2), (dist.isend, 0), (dist.irecv, 2)
    ]  # fmt: skip
    first = package.stage.PipelineStage(nn.Identity(), 0, 3, CPU)
    assert [(op.op, op.peer) for op in first._get_init_p2p_neighbors_ops()] == [(dist.isend, 1), (dist.irecv, 1)]


# One microbatch -------------------------------------------------------------------------------------------------------


def test_a_microbatch_there_and_back(package):
    stage = made(package)
    x, gradient = numbers(1, 2, WIDTH), numbers(2, 2, WIDTH)
    receive(stage, 0, x)
    output = stage.forward_one_chunk(0, ())
    torch.testing.assert_close(output, stage.submod(x))
    (send,) = stage.get_fwd_send_ops(0)
    assert (send.op, send.peer, send.group_peer, send.tag) == (dist.isend, 2, 2, 0)
    assert send.group is dist.group.WORLD
    assert not send.tensor.requires_grad
    receive_gradient(stage, 0, gradient)
    stage.backward_one_chunk(0)
    (back,) = stage.get_bwd_send_ops(0)
    assert (back.op, back.peer) == (dist.isend, 0)
    torch.testing.assert_close(back.tensor, gradient @ stage.submod.weight)
    torch.testing.assert_close(stage.submod.weight.grad, gradient.T @ x)
    assert stage.fwd_cache == stage.bwd_cache == {}


def test_a_backward_in_two_halves(package):
    stage = made(package)
    x, gradient = numbers(1, 2, WIDTH), numbers(2, 2, WIDTH)
    receive(stage, 3, x)
    stage.forward_one_chunk(3, ())
    stage.get_fwd_send_ops(3)
    receive_gradient(stage, 3, gradient)
    stage.backward_one_chunk(3, full_backward=False)
    assert stage.submod.weight.grad is None
    assert 3 in stage.dw_runner
    torch.testing.assert_close(stage.get_local_bwd_output(3), (gradient @ stage.submod.weight,))
    stage.backward_weight_one_chunk(3)
    torch.testing.assert_close(stage.submod.weight.grad, gradient.T @ x)
    assert stage.backward_state == {}


def test_the_first_stage_does_all_in_the_second_half(package):
    stage = made(package, index=0)
    x, gradient = numbers(1, 2, WIDTH), numbers(2, 2, WIDTH)
    stage.forward_one_chunk(0, (x,))
    stage.get_fwd_send_ops(0)
    receive_gradient(stage, 0, gradient)
    stage.backward_one_chunk(0, full_backward=False)
    assert stage.submod.weight.grad is None
    assert stage.get_bwd_send_ops(0) == []
    stage.backward_weight_one_chunk(0)
    torch.testing.assert_close(stage.submod.weight.grad, gradient.T @ x)


@pytest.mark.parametrize("full", [True, False])
def test_the_last_stage_begins_with_the_loss(package, full):
    stage = made(package, index=2)
    x = numbers(1, 2, WIDTH)
    receive(stage, 0, x)
    output = stage.forward_one_chunk(0, ())
    assert stage.output_chunks == [output]
    assert stage.get_fwd_send_ops(0) == []
    assert stage.get_bwd_recv_ops(0) == []
    stage.backward_one_chunk(0, loss=(output * 3).sum(), full_backward=full)
    if not full:
        stage.backward_weight_one_chunk(0)
    assert not output.requires_grad
    (op,) = stage.get_bwd_send_ops(0)
    torch.testing.assert_close(op.tensor, torch.full((2, WIDTH), 3.0) @ stage.submod.weight)
    torch.testing.assert_close(stage.submod.weight.grad, torch.full((WIDTH, 2), 3.0) @ x)


def test_outputs_are_kept_on_demand(package):
    stage = made(package, index=2)
    receive(stage, 0, numbers(1, 2, WIDTH))
    stage.forward_one_chunk(0, (), save_forward_output=False)
    assert stage.output_chunks == []


def test_without_backward_nothing_is_done_or_sent_back(package):
    stage = made(package)
    stage.has_backward = False
    receive(stage, 0, numbers(1, 2, WIDTH))
    output = stage.forward_one_chunk(0, ())
    (send,) = stage.get_fwd_send_ops(0)
    assert send.tensor.data_ptr() == output.data_ptr()
    assert stage.backward_one_chunk(0) is None
    assert stage.backward_weight_one_chunk(0) is None
    assert stage.get_bwd_recv_ops(0) == stage.get_bwd_send_ops(0) == []
    assert stage.submod.weight.grad is None


def test_a_function_for_the_gradients_of_weights(package):
    calls = []

    def builder():
        calls.append("build")
        return lambda: calls.append("run")

    stage = made(package, dw_builder=builder)
    for microbatch, full in enumerate((True, False)):
        receive(stage, microbatch, numbers(1, 2, WIDTH))
        stage.forward_one_chunk(microbatch, ())
        stage.get_fwd_send_ops(microbatch)
        receive_gradient(stage, microbatch, numbers(2, 2, WIDTH))
        stage.backward_one_chunk(microbatch, full_backward=full)
        assert len(stage.get_bwd_send_ops(microbatch)) == 1
    assert calls == ["build", "run", "build"]
    stage.backward_weight_one_chunk(1)
    assert calls == ["build", "run", "build", "run"]


def test_the_second_half_comes_after_the_first(package):
    for options in ({}, {"dw_builder": lambda: None}):
        with pytest.raises(AssertionError, match="backward_one_chunk"):
            made(package, **options).backward_weight_one_chunk(bwd_chunk_id=0)


def test_gradients_are_divided(package):
    stage = made(package)
    for parameter in stage.submod.parameters():
        parameter.grad = torch.ones_like(parameter)
    stage.submod.bias.grad = None
    stage.scale_grads(1)
    stage.perform_reduce_grad(1)
    assert stage.submod.weight.grad.eq(1).all()
    stage.scale_grads(4)
    stage.perform_reduce_grad(2)
    assert stage.submod.weight.grad.eq(1 / 8).all()


def test_keyword_arguments_keep_their_gradients(package):
    class Shifted(nn.Module):
        def forward(self, x, *, shift, more=None):
            return x + shift

    stage = made(package, module=Shifted())
    shift = torch.ones(WIDTH, requires_grad=True)
    receive(stage, 0, numbers(1, 2, WIDTH))
    stage.forward_one_chunk(0, (), {"shift": shift, "more": [1, "text"]})
    stage.get_fwd_send_ops(0)
    receive_gradient(stage, 0, torch.ones(2, WIDTH))
    stage.backward_one_chunk(0)
    assert len(stage.get_bwd_send_ops(0)) == 1
    with wrong_upstream(
        package, "it takes the gradients of keyword arguments away, and gives them to nobody", AttributeError
    ):
        assert shift.grad.eq(2).all()


def test_an_error_names_the_stage_and_its_cause(package):
    stage = made(package, module=nn.Linear(WIDTH + 1, 2))
    receive(stage, 0, numbers(1, 2, WIDTH))
    with pytest.raises(RuntimeError, match=r"(?s)\[Stage 1\] failed to run forward.*args.*kwargs") as caught:
        stage.forward_one_chunk(0, ())
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_microbatches_that_do_not_exist(package):
    stage = made(package)
    with pytest.raises(RuntimeError, match="4"):
        stage.backward_one_chunk(4)
    stage.chunks = None
    with pytest.raises(RuntimeError, match="chunk"):
        stage.backward_one_chunk(0)
    with pytest.raises(RuntimeError):
        stage.backward_maybe_with_nosync("half", {})


# Handed over on one rank ----------------------------------------------------------------------------------------------


def test_handing_over(package):
    stage = made(package)
    x = numbers(1, 2, WIDTH).requires_grad_()
    before = x * 2
    stage.set_local_fwd_input(before, 0)
    output = stage.forward_one_chunk(0, ())
    torch.testing.assert_close(output, stage.submod(before))
    gradient = numbers(2, 2, WIDTH)
    stage.set_local_bwd_input((gradient,), 0)
    stage.backward_one_chunk(0)
    torch.testing.assert_close(stage.get_local_bwd_output(0), (gradient @ stage.submod.weight,))
    assert x.grad is None


def test_what_cannot_be_handed_over(package):
    stage = made(package)
    with pytest.raises(AssertionError):
        stage.set_local_fwd_input("text", 0)
    with pytest.raises(ValueError, match="zip"):
        stage.set_local_fwd_input((numbers(1, 2, WIDTH),) * 2, 0)
    with pytest.raises(AssertionError):
        stage.set_local_bwd_input([numbers(1, 2, WIDTH)], 0)
    with pytest.raises(AssertionError):
        stage.set_local_bwd_input(("text",), 0)
    with pytest.raises(AssertionError):
        made(package, index=0).set_local_fwd_input(numbers(1, 2, WIDTH), 0)
    with pytest.raises(AssertionError):
        made(package, index=0).get_local_bwd_output(0)
    with pytest.raises(AssertionError):
        made(package, index=2).set_local_bwd_input((None,), 0)
    stage.has_backward = False
    with pytest.raises(AssertionError):
        stage.get_local_bwd_output(0)
    with pytest.raises(AssertionError):
        stage.set_local_bwd_input((None,), 0)


def test_no_gradient_from_the_next_stage_is_zeros(package):
    stage = made(package)
    stage.set_local_fwd_input(numbers(1, 2, WIDTH), 0)
    stage.forward_one_chunk(0, ())
    stage.set_local_bwd_input((None,), 0)
    stage.backward_one_chunk(0)
    assert stage.submod.weight.grad.eq(0).all()


def test_what_is_retrieved_can_be_replaced(package):
    stage = made(package)
    x = numbers(1, 2, WIDTH).requires_grad_()
    stage._retrieve_recv_activations = lambda microbatch: (x,)
    stage._retrieve_recv_grads = lambda microbatch: (torch.ones(2, WIDTH),)
    stage.forward_one_chunk(0, ())
    stage.backward_one_chunk(0)
    torch.testing.assert_close(stage.get_local_bwd_output(0), (torch.ones(2, WIDTH) @ stage.submod.weight,))


def test_buffers_that_someone_has_put_there(package):
    """As programs do that drive a stage by themselves."""
    stage = made(package)
    buffer, gradient = numbers(1, 2, WIDTH), numbers(2, 2, WIDTH)
    describe = package._utils.extract_tensor_meta
    meta = describe(numbers(0, 2, WIDTH).requires_grad_())
    stage.args_recv_info[0] = (package.stage._RecvInfo("x", 0, buffer, meta),)
    stage.grad_recv_info[0] = (package.stage._RecvInfo("g", 2, gradient, describe(gradient)),)
    (op,) = stage.get_fwd_recv_ops(0)
    assert op.tensor is buffer
    assert op.peer == 0
    torch.testing.assert_close(stage.forward_one_chunk(0, ()), stage.submod(buffer))
    assert stage.args_recv_info[0][0].buffer is buffer
    stage.backward_one_chunk(0)
    torch.testing.assert_close(stage.submod.weight.grad, gradient.T @ buffer.detach())
    stage.clear_runtime_states()
    assert stage.args_recv_info[0][0].buffer is buffer


# Gradients that are not there -----------------------------------------------------------------------------------------


def test_zeros_are_sent_for_an_input_that_nothing_depends_on(package):
    class Second(nn.Module):
        def forward(self, _, y):
            return y * 2

    example = torch.empty(2, WIDTH, requires_grad=True)
    stage = package.stage.PipelineStage(Second(), 2, 3, CPU, input_args=(example, example), output_args=example)
    stage.has_backward = True
    stage._inference_mode = package._utils.InferenceMode.STATIC
    stage._prepare_forward_infra(1, None, has_backward=True)
    stage._prepare_backward_infra(1)
    for op in stage.get_fwd_recv_ops(0):
        op.tensor.fill_(1)
    output = stage.forward_one_chunk(0, ())
    stage.backward_one_chunk(0, loss=output.sum())
    first, second = stage.get_bwd_send_ops(0)
    assert first.tensor.eq(0).all()
    assert second.tensor.eq(2).all()


def test_a_gradient_that_nobody_waits_for(package):
    stage = package.stage.PipelineStage(nn.Identity(), 1, 3, CPU)
    stage.has_backward, stage.chunks = True, 1
    gradient = numbers(1, 2, WIDTH)
    stage.grad_send_info = [0]
    stage._stage_meta = package._utils._StageMeta(input_grads=(None,))
    stage.bwd_cache[0] = (gradient,)
    with pytest.raises(package._utils.PipeliningMetadataError, match="DTensor grad metadata cannot be derived"):
        stage.get_bwd_send_ops(0)
    stage.bwd_cache[0] = (None,)
    assert stage.get_bwd_send_ops(0) == []
    stage.grad_send_info = [None]
    stage.bwd_cache[0] = (gradient,)
    with pytest.raises(package._utils.PipeliningMetadataError):
        stage.get_bwd_send_ops(0)
    stage._stage_meta = package._utils._StageMeta()
    stage.grad_send_info, stage.bwd_cache[0] = [0], (gradient,)
    with pytest.raises(package._utils.PipeliningMetadataError):
        stage.get_bwd_send_ops(0)


# Not as agreed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [(lambda y: y.flatten(), "shape mismatch"), (lambda y: y.double(), "dtype mismatch"), (lambda y: (y, y), "2")],
)
def test_details_are_checked_on_demand(package, change, match):
    class Changed(nn.Module):
        def forward(self, x):
            return change(x)

    stage = made(package, module=Changed())
    stage._runtime_validate = True
    receive(stage, 0, numbers(1, 2, WIDTH))
    with pytest.raises(package._utils.PipeliningMetadataError, match=match):
        stage.forward_one_chunk(0, ())


@pytest.mark.parametrize(
    ("change", "match"), [(lambda y: y.flatten(), "shape mismatch"), (lambda y: y.double(), "dtype mismatch")]
)
def test_what_is_not_as_agreed_is_not_sent(change, match):
    class Changed(nn.Module):
        def forward(self, x):
            return change(x)

    stage = made(OURS, module=Changed())
    receive(stage, 2, numbers(1, 2, WIDTH))
    stage.forward_one_chunk(2, ())
    with pytest.raises(PipeliningMetadataError, match=f"stage 1 microbatch 2 output 0: {match}"):
        stage.get_fwd_send_ops(2)


def test_nothing_is_prepared_before_the_vote(package):
    stage = package.stage.PipelineStage(nn.Identity(), 1, 3, CPU)
    with pytest.raises(package._utils.PipeliningMetadataError):
        stage._prepare_forward_infra(1, None)
    stage._inference_mode = package._utils.InferenceMode.DYNAMIC
    with pytest.raises(package._utils.PipeliningMetadataError):
        stage._prepare_backward_infra(1)
    for missing in (stage._retrieve_recv_activations, stage._retrieve_recv_grads):
        infos = stage.args_recv_info if missing == stage._retrieve_recv_activations else stage.grad_recv_info
        infos[0] = (package.stage._RecvInfo("x", 0, None, package._utils.extract_tensor_meta(torch.ones(1))),)
        with pytest.raises(package._utils.PipeliningMetadataError):
            missing(0)


# What is held, and for how long ---------------------------------------------------------------------------------------


class _Ours:
    """The modules of our package, for tests of what torch's does not do."""

    import penstock.pipelining._utils as _utils
    import penstock.pipelining.stage as stage


OURS = _Ours


def test_buffers_are_there_from_the_receive_to_the_use():
    stage = made(OURS)
    (info,), (gradient,) = stage.args_recv_info[0], stage.grad_recv_info[0]
    assert info.buffer is gradient.buffer is None
    receive(stage, 0, numbers(1, 2, WIDTH))
    assert info.buffer is not None
    assert stage.args_recv_info[1][0].buffer is None
    stage.forward_one_chunk(0, ())
    assert info.buffer is None
    receive_gradient(stage, 0, numbers(2, 2, WIDTH))
    stage.backward_one_chunk(0)
    assert gradient.buffer is None


def test_outputs_are_free_when_they_are_sent():
    """A linear layer needs its input for the backward, and not its output."""
    stage = made(OURS)
    receive(stage, 0, numbers(1, 2, WIDTH))
    output = weakref.ref(stage.forward_one_chunk(0, ()))
    assert output() is not None
    ops = stage.get_fwd_send_ops(0)
    assert output() is None
    assert isinstance(stage.fwd_cache[0][0][0], GradientEdge)
    memory = weakref.ref(ops[0].tensor)
    del ops
    assert memory() is None


def test_a_function_of_the_users_own_lives_until_the_backward():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

        @staticmethod
        def backward(context, gradient):
            return gradient * 2

    class Doubled(nn.Module):
        def forward(self, x):
            return Own.apply(x)

    stage = made(OURS, module=Doubled())
    receive(stage, 0, numbers(1, 2, WIDTH))
    stage.forward_one_chunk(0, ())
    stage.get_fwd_send_ops(0)
    receive_gradient(stage, 0, torch.ones(2, WIDTH))
    stage.backward_one_chunk(0)
    (op,) = stage.get_bwd_send_ops(0)
    assert op.tensor.eq(2).all()


def test_the_first_half_frees_what_the_second_does_not_need():
    class Held:
        pass

    made_in_forward = []

    class Holding(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.held = Held()
            made_in_forward.append(weakref.ref(context.held))
            return x * 2

        @staticmethod
        def backward(context, gradient):
            return gradient * 2

    class Doubled(nn.Module):
        def forward(self, x):
            return Holding.apply(x)

    stage = made(OURS, module=nn.Sequential(nn.Linear(WIDTH, WIDTH), Doubled(), nn.Tanh()))
    receive(stage, 0, numbers(1, 2, WIDTH))
    stage.forward_one_chunk(0, ())
    stage.get_fwd_send_ops(0)
    receive_gradient(stage, 0, numbers(2, 2, WIDTH))
    (seen,) = made_in_forward
    assert seen() is not None
    gc.disable()
    try:
        stage.backward_one_chunk(0, full_backward=False)
        assert seen() is None
    finally:
        gc.enable()
    stage.backward_weight_one_chunk(0)
    assert stage.submod[0].weight.grad is not None


@pytest.mark.parametrize("full", [True, False])
def test_a_loss_that_is_kept_keeps_nothing_else(full):
    stage = made(OURS, index=2)
    receive(stage, 0, numbers(1, 2, WIDTH))
    freed = []
    (info,) = stage.args_recv_info[0]
    weakref.finalize(info.buffer, freed.append, "input")
    loss = stage.forward_one_chunk(0, ()).sum()
    assert not freed
    stage.backward_one_chunk(0, loss=loss, full_backward=full)
    if not full:
        stage.backward_weight_one_chunk(0)
    stage.output_chunks.clear()
    assert freed == ["input"]
    assert loss.grad_fn is None


def test_a_step_begins_with_nothing_left():
    stage = made(OURS)
    receive(stage, 0, numbers(1, 2, WIDTH))
    receive_gradient(stage, 1, numbers(1, 2, WIDTH))
    stage.fwd_cache[3] = stage.bwd_cache[3] = stage.backward_state[3] = ((), [])
    stage.output_chunks.append("output")
    stage.clear_runtime_states()
    assert stage.args_recv_info[0][0].buffer is stage.grad_recv_info[1][0].buffer is None
    assert not any((stage.fwd_cache, stage.bwd_cache, stage.backward_state, stage.output_chunks, stage.dw_runner))


def test_gradients_of_two_parameters_share_no_memory():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Parameter(torch.zeros(2, WIDTH))
            self.two = nn.Parameter(torch.zeros(2 * WIDTH))

        def forward(self, x):
            return x + self.one + self.two.view(2, WIDTH)

    stage = made(OURS, module=Sum())
    for microbatch in range(2):
        receive(stage, microbatch, numbers(1, 2, WIDTH))
        stage.forward_one_chunk(microbatch, ())
        stage.get_fwd_send_ops(microbatch)
        receive_gradient(stage, microbatch, torch.ones(2, WIDTH))
        stage.backward_one_chunk(microbatch)
    assert stage.submod.one.grad.eq(2).all()
    assert stage.submod.two.grad.eq(2).all()


# Layouts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda y: y.T, lambda y: y[:, :1].expand(2, WIDTH), lambda y: y[:, ::2]])
def test_any_layout_is_sent_dense(change):
    class Changed(nn.Module):
        def forward(self, x):
            return change(x)

    example = numbers(1, 2, WIDTH).requires_grad_()
    output = change(example)
    stage = PipelineStage(Changed(), 1, 3, CPU, input_args=example, output_args=output)
    following = PipelineStage(nn.Identity(), 2, 3, CPU, input_args=output, output_args=output)
    for one in (stage, following):
        one.has_backward = True
        one._inference_mode = OURS._utils.InferenceMode.STATIC
        one._prepare_forward_infra(1, None, has_backward=True)
        one._prepare_backward_infra(1)
    receive(stage, 0, example.detach())
    sent = stage.forward_one_chunk(0, ())
    (send,), (recv,) = stage.get_fwd_send_ops(0), following.get_fwd_recv_ops(0)
    assert send.tensor.is_contiguous()
    assert recv.tensor.is_contiguous()
    assert send.tensor.shape == recv.tensor.shape
    recv.tensor.copy_(send.tensor)
    torch.testing.assert_close(following.forward_one_chunk(0, ()), sent)


def test_operations_are_those_of_torch():
    """Whoever replaces ``P2POp`` is asked each time; ours are made without its constructor, and equal its own."""
    stage = made(OURS)
    for _ in range(2):
        (found,) = stage.get_fwd_recv_ops(0)
        expected = dist.P2POp(dist.irecv, found.tensor, 0, None)
        assert type(found) is dist.P2POp
        assert vars(found) == vars(expected)
    with patch("penstock.pipelining.stage.dist.P2POp") as operation:
        assert stage.get_fwd_recv_ops(1) == [operation.return_value]
    stage.stage_index_to_group_rank = {0: 2, 1: 1, 2: 0}
    stage.clear_runtime_states()
    assert stage.get_fwd_recv_ops(2)[0].peer == 2


# Examples -------------------------------------------------------------------------------------------------------------


def test_examples_of_shapes_alone_are_trained():
    """Where no example requires a gradient, all that can have one do."""
    stage = PipelineStage(
        nn.Identity(),
        1,
        3,
        CPU,
        input_args=(torch.empty(2), torch.empty(2, dtype=torch.int64)),
        output_args=(torch.empty(2), torch.empty(2, dtype=torch.int64)),
    )
    stage._inference_mode = OURS._utils.InferenceMode.STATIC
    stage._prepare_forward_infra(1, None, has_backward=True)
    stage._prepare_backward_infra(1)
    assert [meta.requires_grad for meta in stage._stage_meta.inputs] == [True, False]
    assert [meta is None for meta in stage._stage_meta.input_grads] == [False, True]
    stage._prepare_forward_infra(1, None, has_backward=False)
    assert [meta.requires_grad for meta in stage._stage_meta.inputs] == [False, False]


def test_a_stage_without_the_constructor(package):
    """As programs make for schedules alone."""

    class Bare(package.stage._PipelineStageBase):
        def __init__(self):
            self.submod, self.group, self.stage_index = None, None, 0
            self.num_stages, self.group_size, self.group_rank = 1, 1, 0

        def _prepare_forward_infra(self, *_, **__):
            raise NotImplementedError

        _prepare_backward_infra = _create_grad_recv_info = _prepare_forward_infra

    stage = Bare()
    stage.has_backward = True
    stage.stage_index_to_group_rank = {0: 0}
    assert (stage.is_first, stage.is_last, stage.has_backward) == (True, True, True)
    with pytest.raises(TypeError, match="abstract"):
        package.stage._PipelineStageBase(nn.Identity(), 0, 3, CPU)


def test_what_a_receive_says_of_itself(package):
    describe = package._utils.extract_tensor_meta
    info = package.stage._RecvInfo("x", 0, torch.ones(2), describe(torch.ones(2)))
    assert repr(info) == "_RecvInfo(input=x, source=0, shape=torch.Size([2]), meta=_TensorMeta)"
    assert "shape=None, meta=None" in repr(package.stage._RecvInfo("x", 0, None, None))
    assert repr(package.stage._RecvInfo("x", None, None, None, is_root_arg=True)) == (
        "_RecvInfo(input=x, root_arg=True)"
    )
    stage = made(package)
    with pytest.raises(package._utils.PipeliningMetadataError):
        stage._map_tensor_from_recv_info((package.stage._RecvInfo("x", None, None, None, is_root_arg=True),))
    (buffer,) = stage._map_tensor_from_recv_info((info,))
    assert buffer is info.buffer
    assert stage._create_grad_send_info(stage.args_recv_info[0]) == [0]


def test_outputs_as_a_tuple(package):
    as_tuple = package.stage._normalize_model_output_as_tuple
    assert as_tuple(1) == (1,)
    assert as_tuple([1, 2]) == as_tuple((1, 2)) == (1, 2)
    assert as_tuple({"a": 1}) == ({"a": 1},)
