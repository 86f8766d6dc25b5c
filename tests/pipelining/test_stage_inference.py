"""What stages agree on before the first microbatch: by examples, or by a run that leaves no trace."""

from functools import cache

import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given
from hypothesis import strategies as some
from torch import nn
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from penstock.pipelining import stage as our_stage
from penstock.pipelining._stage.announcement import DetailedForwardMeta, decode, encode
from penstock.pipelining._utils import (
    InferenceMode,
    PipeliningMetadataError,
    _DTensorMeta,
    _StageBackwardMeta,
    _StageForwardMeta,
    _TensorMeta,
)
from pipelining.driving import known_to_torch

CPU = torch.device("cpu")
WIDTH = 4
MICROBATCHES = 4
BATCH = 8


def schedule_of(name, stage, **options):
    kind = torch_schedules.get_schedule_class(name)
    return kind(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss, **options)


def stepped(schedule, rank, x, target, call="step", **kwargs):
    arguments = (x,) if rank == 0 else ()
    last = {"target": target} if rank == 1 else {}
    with known_to_torch():
        return getattr(schedule, call)(*arguments, **last, **kwargs)


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The wire -------------------------------------------------------------------------------------------------------------

sizes = some.lists(some.integers(0, 2**40), max_size=6)
dtypes = some.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
placements = some.one_of(
    some.builds(Replicate),
    some.builds(Shard, some.integers(0, 5)),
    some.builds(Partial, some.sampled_from(["sum", "avg", "max"])),
    some.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), some.integers(0, 5), some.integers(1, 9)),
)
layouts = some.one_of(
    some.none(), some.lists(some.integers(1, 8), min_size=1, max_size=3).map(tuple).map(_MeshLayout.from_sizes_strides)
)
plain = some.builds(_TensorMeta, sizes.map(torch.Size), sizes.map(tuple), dtypes, some.booleans())
distributed = some.builds(
    _DTensorMeta,
    sizes.map(torch.Size),
    sizes.map(tuple),
    dtypes,
    some.booleans(),
    sizes.map(torch.Size),
    sizes.map(tuple),
    some.lists(placements, max_size=3).map(tuple),
    some.lists(some.text(max_size=9), max_size=3).map(tuple),
    layouts,
)
metas = some.one_of(plain, distributed)
several = some.builds(
    lambda first, others: DetailedForwardMeta(first, (0, *range(1, 1 + len(others)), 0), tuple(others)),
    some.lists(metas, max_size=3).map(tuple),
    some.lists(some.lists(metas, max_size=3).map(tuple), max_size=3),
)
messages = some.one_of(
    several,
    some.lists(metas, max_size=9).map(tuple).map(_StageForwardMeta),
    some.lists(some.one_of(some.none(), metas), max_size=9).map(tuple).map(_StageBackwardMeta),
)


def passed(tensors):
    parts = iter(tensors)
    return decode(lambda tensor: tensor.copy_(next(parts)))


@given(messages)
def test_messages_come_back(message):
    assert passed(encode(message)) == message


@given(messages, some.data())
def test_a_message_that_is_damaged_is_an_error(message, data):
    tensors = encode(message)
    part = data.draw(some.sampled_from(range(len(tensors))))
    place = data.draw(some.integers(0, len(tensors[part]) - 1))
    tensors[part][place] += data.draw(some.integers(1, 255))
    with pytest.raises(PipeliningMetadataError):
        passed(tensors)


@pytest.mark.parametrize(
    "value", [None, "text", ["sideways", []], ["forward", [None]], ["forward", [[[], [], "nn", 1]]]]
)
def test_other_values_are_no_messages(value):
    from penstock.execution.value_spec import describe
    from penstock.execution.wire_format import header_tensor

    with pytest.raises(PipeliningMetadataError):
        passed([part for part in header_tensor(describe(value)) if part is not None])
    with pytest.raises(PipeliningMetadataError):
        encode(value)


# A run that leaves no trace -------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return nn.functional.dropout(self.norm(self.layer(x)), 0.5)


def leave_no_trace(rank, ranks, *, group):
    torch.manual_seed(rank)
    module = Normalized()
    module.layer.weight.grad = torch.ones_like(module.layer.weight)
    stage = our_stage.PipelineStage(module, rank, 2, CPU, group=group)
    acc = stage._warmup_forward_vote(True)
    result = stage._warmup_backward_result(acc if rank == 1 else None)
    assert result.item() == 0
    stage._inference_mode = InferenceMode.DYNAMIC
    seed = torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    stage._prepare_forward_infra(4, (numbers(1, 2, WIDTH),) if rank == 0 else None, {}, has_backward=True)
    stage._prepare_backward_infra(4, loss_fn=nn.functional.mse_loss, target=numbers(2, 2, WIDTH) if rank else None)
    stage._post_metadata_inference_cleanup()
    assert module.calls == 1
    assert torch.equal(torch.get_rng_state(), seed)
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert module.layer.weight.grad.eq(1).all()
    assert module.layer.bias.grad is None
    return stage._stage_meta


def test_a_run_for_its_own_sake_leaves_no_trace(workers):
    first, second = workers.run(leave_no_trace, ranks=2)
    assert first.outputs == second.inputs
    assert first.output_grads == second.input_grads
    assert second.inputs[0].requires_grad
    assert second.output_grads is None
    assert not first.inputs[0].requires_grad


class Tokens(nn.Module):
    """Hands indices on, which must be valid ones in a run without values too."""

    def __init__(self, last):
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)
        self.last = last

    def forward(self, tokens, x=None):
        found = self.table(tokens) if x is None else x + self.table(tokens)
        return found if self.last else (tokens, found)


def indices(rank, ranks, *, group):
    junk = [torch.full((2,), 2**60) for _ in range(64)]
    del junk
    schedule = schedule_of("GPipe", our_stage.PipelineStage(Tokens(rank == 1), rank, 2, CPU, group=group))
    tokens = torch.randint(0, 3, (BATCH,), generator=torch.Generator().manual_seed(0))
    stepped(schedule, rank, tokens, numbers(1, BATCH, WIDTH))
    return schedule._stage.submod.table.weight.grad.abs().sum().item()


def test_indices_on_an_edge(workers):
    assert all(total > 0 for total in workers.run(indices, ranks=2))


# Examples -------------------------------------------------------------------------------------------------------------


def by_examples(rank, ranks, needs_gradient, *, group):
    """Gradients with examples: as with a run through the stages, and without one."""
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    nn.functional.mse_loss(layers[1](layers[0](x)), target).backward()
    expected = [parameter.grad for parameter in layers[rank].parameters()]
    layers[rank].zero_grad()
    calls = []
    layers[rank].register_forward_hook(lambda *_: calls.append(1))
    example = torch.empty(BATCH // MICROBATCHES, WIDTH, device="meta", requires_grad=needs_gradient)
    stage = our_stage.PipelineStage(layers[rank], rank, 2, CPU, input_args=example, output_args=(example,), group=group)
    schedule = schedule_of("1F1B", stage)
    for _ in range(2):
        layers[rank].zero_grad()
        stepped(schedule, rank, x, target)
        torch.testing.assert_close([parameter.grad for parameter in layers[rank].parameters()], expected)
    assert len(calls) == 2 * MICROBATCHES
    assert stage._inference_mode.value == "static"


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_examples_spare_the_run(workers, needs_gradient):
    workers.run(by_examples, needs_gradient, ranks=2)


def wrong_example(rank, ranks, *, group):
    """Only one stage has examples, so all are run; and what is found is compared."""
    example = torch.empty(3, WIDTH)
    options = {"input_args": example, "output_args": example} if rank == 0 else {}
    stage = our_stage.PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 2, CPU, group=group, **options)
    stage._warmup_backward_result(stage._warmup_forward_vote(False))
    stage._inference_mode = InferenceMode.DYNAMIC
    if rank == 0:
        with pytest.raises(PipeliningMetadataError, match="shape mismatch"):
            stage._prepare_forward_infra(4, (numbers(1, 2, WIDTH),), {}, has_backward=False)
    else:
        stage._prepare_forward_infra(4, None, {}, has_backward=False)
        assert stage._stage_meta.inputs[0].shape == (2, WIDTH)


def test_examples_are_compared_with_what_is_found(workers):
    workers.run(wrong_example, ranks=2, fresh=True)


# Training and evaluation by turns -------------------------------------------------------------------------------------


def by_turns(rank, ranks, name, *, group):
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    output = layers[1](layers[0](x))
    nn.functional.mse_loss(output, target).backward()
    expected = [parameter.grad for parameter in layers[rank].parameters()]
    stage = our_stage.PipelineStage(layers[rank], rank, 2, CPU, group=group)
    schedule = schedule_of(name, stage)
    for turn in ("eval", "step", "inference", "eval", "step", "step"):
        layers[rank].zero_grad()
        if turn == "inference":
            with torch.inference_mode():
                found = stepped(schedule, rank, x, target, "eval")
        else:
            found = stepped(schedule, rank, x, target, turn)
        if rank == 1:
            torch.testing.assert_close(found, output)
        if turn == "step":
            torch.testing.assert_close([parameter.grad for parameter in layers[rank].parameters()], expected)
        else:
            assert all(parameter.grad is None for parameter in layers[rank].parameters())


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_training_and_evaluation_by_turns(workers, name):
    workers.run(by_turns, name, ranks=2)


# Distributed tensors --------------------------------------------------------------------------------------------------


@cache
def mesh():
    """Ranks of the pipeline by parts of a tensor; made once in a process."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))


class Split(nn.Module):
    """A layer whose weight is cut by columns: what comes out is distributed over them, and so is its gradient."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.layer = nn.Linear(WIDTH, WIDTH)
        part = mesh()["tensor"]
        self.layer.weight = nn.Parameter(distribute_tensor(self.layer.weight, part, [Shard(0)]))
        self.layer.bias = nn.Parameter(distribute_tensor(self.layer.bias, part, [Shard(0)]))

    def forward(self, x):
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh()["tensor"], [Replicate()])
        return torch.tanh(self.layer(x.redistribute(placements=[Replicate()])))


class Whole(nn.Module):
    def forward(self, x):
        return x.full_tensor()


def over_meshes(rank, ranks, name, static):
    place, _ = mesh().get_coordinate()
    modules = [Split(0), nn.Sequential(Split(1), Whole())]
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    output = modules[1](modules[0](x))
    nn.functional.mse_loss(output, target).backward()
    expected = [parameter.grad.full_tensor() for parameter in modules[place].parameters()]
    modules[place].zero_grad()
    stage = our_stage.PipelineStage(
        modules[place],
        place,
        2,
        CPU,
        group=mesh().get_group("pipeline"),
        get_mesh=lambda names, layout: mesh()["tensor"],
        **(examples(place) if static else {}),
    )
    schedule = schedule_of(name, stage)
    for _ in range(2):
        modules[place].zero_grad()
        found = stepped(schedule, place, x, target)
        if place == 1:
            torch.testing.assert_close(found, output)
        found = [parameter.grad.full_tensor() for parameter in modules[place].parameters()]
        torch.testing.assert_close(found, expected)
    assert stage._inference_mode.value == ("static" if static else "dynamic")
    return stage._stage_meta


def examples(place):
    size = BATCH // MICROBATCHES
    part = mesh()["tensor"]
    edge = distribute_tensor(torch.zeros(size, WIDTH), part, [Shard(1)]).requires_grad_()
    gradient = distribute_tensor(torch.zeros(size, WIDTH), part, [Shard(1)])
    plain_example = torch.zeros(size, WIDTH)
    if place == 0:
        return {"input_args": plain_example, "input_grads": (None,), "output_args": edge, "output_grads": gradient}
    whole = torch.zeros(size, WIDTH, requires_grad=True)
    return {"input_args": edge, "input_grads": gradient, "output_args": whole, "output_grads": torch.zeros(size, WIDTH)}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_distributed_tensors_on_an_edge(workers, name, static):
    first, _, second, _ = workers.run(over_meshes, name, static, ranks=4)
    assert isinstance(second.inputs[0], _DTensorMeta)
    assert second.inputs[0].placements == (Shard(1),)
    assert first.outputs == second.inputs
    assert first.output_grads == second.input_grads


def test_placements_that_are_not_known_are_not_sent():
    class Elsewhere(Shard):
        pass

    meta = _DTensorMeta(torch.Size([1]), (1,), torch.float32, False, torch.Size([1]), (1,), (Elsewhere(0),), (), None)
    with pytest.raises(PipeliningMetadataError, match=r"placed by"):
        encode(_StageForwardMeta((meta,)))


# Microbatches of several shapes ---------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, scale):
        return torch.tanh(self.layer(x)) * scale, x.detach()

    @staticmethod
    def loss(output, target):
        return nn.functional.mse_loss(output[0], target, reduction="sum")


class Following(Scaled):
    def forward(self, x, _, *, scale):
        return super().forward(x, scale=scale)


def uneven(rank, ranks, name, static, *, group):
    """Seven rows in three microbatches: 3, 2 and 2."""
    from penstock.pipelining import schedules

    torch.manual_seed(1)
    modules = [Scaled(), Following()]
    x, target, scale = numbers(1, 7, WIDTH), numbers(2, 7, WIDTH), numbers(3, 7, 1)
    output = modules[1](*modules[0](x, scale=scale), scale=scale)
    Scaled.loss(output, target).backward()
    expected = [parameter.grad for parameter in modules[rank].parameters()]
    example = torch.empty(3, WIDTH)
    first = {"input_args": example, "output_args": (example.requires_grad_(), torch.empty(3, WIDTH))}
    second = {"input_args": first["output_args"], "output_args": (example, example)}
    stage = our_stage.PipelineStage(
        modules[rank], rank, 2, CPU, group=group, **([first, second][rank] if static else {})
    )
    made = schedules.get_schedule_class(name)(stage, 3, loss_fn=Scaled.loss, scale_grads=False)
    for call in ("eval", "step", "step"):
        modules[rank].zero_grad()
        arguments = (x,) if rank == 0 else ()
        found = getattr(made, call)(*arguments, **({"target": target} if rank == 1 else {}), scale=scale)
        if rank == 1:
            torch.testing.assert_close(found[0], output[0])
        if call == "step":
            torch.testing.assert_close([parameter.grad for parameter in modules[rank].parameters()], expected)
    assert stage._kinds == (0, 1, 1)
    assert stage._next_microbatches == ([], [])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_microbatches_that_differ_in_their_shapes(workers, name, static):
    workers.run(uneven, name, static, ranks=2)
