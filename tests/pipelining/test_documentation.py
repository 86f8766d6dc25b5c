"""What the public documentation of torch.distributed.pipelining shows its readers, done with ours.

A stage built by hand, a schedule that steps through a batch or through microbatches, the utilities for microbatches,
schedules of one's own, files, names of schedules. Those that trace a model say that they are not there yet.
"""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from penstock.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipe_split,
    pipeline,
)
from penstock.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from penstock.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

CPU = torch.device("cpu")
WIDTH, ROWS = 6, 8


class Transformer(nn.Module):
    """Of which any part may be deleted or None."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleDict({str(layer): nn.Linear(WIDTH, WIDTH) for layer in range(2)})
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, 11)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            h = torch.tanh(layer(h))
        h = self.norm(h) if self.norm else h
        return self.output(h).float() if self.output else h


def whole():
    torch.manual_seed(0)
    return Transformer()


def part(stage):
    """Made on the meta device first, cut, and filled with the weights of the whole."""
    with torch.device("meta"):
        model = Transformer()
        if stage == 0:
            del model.layers["1"]
            model.norm = None
            model.output = None
        else:
            model.tok_embeddings = None
            del model.layers["0"]
    model.to_empty(device=CPU)
    state = whole().state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model


def tokens():
    return torch.arange(ROWS * 3).reshape(ROWS, 3) % 11


def gpipe_of_two_parts(rank, ranks, *, group):
    """Step 1 and step 2 of the guide: an inference over two ranks."""
    stage = PipelineStage(part(rank), rank, ranks, CPU, group=group)
    schedule = ScheduleGPipe(stage, 4)
    return schedule.step(tokens()) if rank == 0 else schedule.step()


def test_a_model_cut_by_hand(workers):
    first, last = workers.run(gpipe_of_two_parts, ranks=2)
    assert first is None
    torch.testing.assert_close(last, whole()(tokens()))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        return torch.tanh(self.linear(x)) * mask


def microbatches(rank, ranks, *, group):
    """A loader that gives microbatches: they are passed as they are."""
    torch.manual_seed(rank)
    module = Masked()
    schedule = ScheduleGPipe(PipelineStage(module, rank, ranks, CPU, group=group), 2, loss_fn=functional.mse_loss)
    x = torch.ones(ROWS, WIDTH)
    masks = [{"mask": torch.full((ROWS // 2, 1), value)} for value in (1.0, 0.5)]
    losses = []
    if rank == 0:
        schedule.step(arg_mbs=[(each,) for each in x.chunk(2)], kwarg_mbs=masks)
        out = None
    else:
        out = schedule.step(kwarg_mbs=masks, target_mbs=list(x.chunk(2)), losses=losses)
    return out, losses, module.linear.weight.grad


def test_microbatches_that_are_there(workers):
    (_, _, first), (out, losses, last) = workers.run(microbatches, ranks=2)
    modules = []
    for seed in range(2):
        torch.manual_seed(seed)
        modules.append(Masked())
    x = torch.ones(ROWS, WIDTH)
    mask = torch.tensor([1.0] * 4 + [0.5] * 4).unsqueeze(1)
    expected = modules[1](modules[0](x, mask=mask), mask=mask)
    functional.mse_loss(expected, x).backward()
    torch.testing.assert_close(out.detach(), expected.detach())
    assert len(losses) == 2
    torch.testing.assert_close(first, modules[0].linear.weight.grad)
    torch.testing.assert_close(last, modules[1].linear.weight.grad)


def layer(index):
    torch.manual_seed(50 + index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def batch():
    torch.manual_seed(9)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def expected(stages):
    """Loss and gradients of the layers in one."""
    modules = [layer(index) for index in range(stages)]
    x, target = batch()
    loss = functional.mse_loss(nn.Sequential(*modules)(x), target)
    loss.backward()
    return loss.detach(), {index: module[0].weight.grad for index, module in enumerate(modules)}


def trained(rank, mine, stages, group, make):
    """The mean of the losses, if they are on this rank, and the gradients of its stages."""
    modules = {index: layer(index) for index in mine}
    made = [PipelineStage(module, index, stages, CPU, group=group) for index, module in modules.items()]
    schedule = make(made)
    x, target = batch()
    losses = []
    schedule.step(*([x] if 0 in mine else []), target=target if stages - 1 in mine else None, losses=losses)
    loss = torch.stack(losses).mean().detach() if losses else None
    return loss, {index: module[0].weight.grad for index, module in modules.items()}


def assert_like_the_whole(results, stages):
    loss, gradients = expected(stages)
    (reported,) = [each for each, _ in results if each is not None]
    torch.testing.assert_close(reported, loss)
    assert sorted(index for _, own in results for index in own) == list(range(stages))
    for _, own in results:
        for index, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[index])


KINDS = {
    kind.__name__: kind
    for kind in (
        ScheduleGPipe,
        Schedule1F1B,
        ScheduleInterleaved1F1B,
        ScheduleLoopedBFS,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
        ScheduleDualPipeV,
    )
}


def listed(rank, ranks, name, *, group):
    kind = KINDS[name]
    if issubclass(kind, PipelineScheduleSingle):
        return trained(rank, [rank], ranks, group, lambda made: kind(made[0], 4, loss_fn=functional.mse_loss))
    v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    mine = [rank, 2 * ranks - 1 - rank] if v else [rank, rank + ranks]
    return trained(rank, mine, 2 * ranks, group, lambda made: kind(made, 4, loss_fn=functional.mse_loss))


@pytest.mark.parametrize("name", KINDS)
def test_the_schedules_that_are_listed(workers, name):
    stages = 2 if issubclass(KINDS[name], PipelineScheduleSingle) else 4
    assert issubclass(KINDS[name], (PipelineScheduleSingle, PipelineScheduleMulti))
    assert get_schedule_class(name.removeprefix("Schedule").lower()) is KINDS[name]
    assert_like_the_whole(workers.run(listed, name, ranks=2), stages)


class OneAtATime(PipelineScheduleMulti):
    """A schedule of one's own: a microbatch goes all the way before the next begins."""

    def __init__(self, stages, n_microbatches, loss_fn=None):
        super().__init__(stages, n_microbatches, loss_fn=loss_fn)
        ranks, count = self.pp_group_size, self._num_stages
        rows = {rank: [] for rank in range(ranks)}
        for microbatch in range(n_microbatches):
            order = [f"{stage}F{microbatch}" for stage in range(count)]
            order += [f"{stage}B{microbatch}" for stage in reversed(range(count))]
            for cell in order:
                for rank, row in rows.items():
                    row.append(_Action.from_str(cell) if int(cell[0]) % ranks == rank else None)
        self.pipeline_order = rows
        self._validate_and_set_stage_mapping(self.pipeline_order)


def own_schedule(rank, ranks, *, group):
    make = lambda made: OneAtATime(made, 2, loss_fn=functional.mse_loss)  # noqa: E731
    return trained(rank, [rank, rank + ranks], 2 * ranks, group, make)


def test_a_schedule_of_ones_own(workers):
    assert_like_the_whole(workers.run(own_schedule, ranks=2), 4)


def from_a_file(rank, ranks, *, group):
    def make(made):
        schedule = _PipelineScheduleRuntime(made, 2, loss_fn=functional.mse_loss)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "mine.csv"
            path.write_text("0F0,0F1,,3F0,3B0,3F1,3B1,0B0,0B1\n,1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
            schedule._load_csv(str(path))
        return schedule

    return trained(rank, [[0, 3], [1, 2]][rank], 4, group, make)


def test_a_schedule_from_a_file(workers):
    assert_like_the_whole(workers.run(from_a_file, ranks=2), 4)


def with_ddp(rank, ranks, *, group):
    """Two pipelines of two ranks, whose stages are replicated."""
    replica, place = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    module = layer(place)
    wrapped = nn.parallel.DistributedDataParallel(module, process_group=replicas[place])
    stage = PipelineStage(wrapped, place, 2, CPU, group=pipelines[replica])
    schedule = Schedule1F1B(stage, 2, loss_fn=functional.mse_loss)
    x, target = (each.chunk(2)[replica] for each in batch())
    if place == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)
    return place, module[0].weight.grad


def test_stages_with_data_parallelism(workers):
    _, gradients = expected(2)
    for place, gradient in workers.run(with_ddp, ranks=4):
        torch.testing.assert_close(gradient, gradients[place])


def test_splitting_and_merging():
    x, mask = torch.arange(12.0).reshape(4, 3), torch.ones(2, 6)
    args, kwargs = split_args_kwargs_into_chunks(
        (x, 7), {"mask": mask}, 2, kwargs_chunk_spec={"mask": TensorChunkSpec(1)}
    )
    assert [each[1] for each in args] == [7, 7]
    assert [each["mask"].shape for each in kwargs] == [(2, 3), (2, 3)]
    merged = merge_chunks([(each[0], each[0]) for each in args], (TensorChunkSpec(0), TensorChunkSpec(1)))
    assert torch.equal(merged[0], x)
    assert merged[1].shape == (2, 6)
    assert TensorChunkSpec.from_tuple((0, 1))[1].split_dim == 1
    assert TensorChunkSpec.from_dict({"x": 1})["x"].split_dim == 1


def test_tracing():
    model = whole()
    pipe = pipeline(model, mb_args=(tokens(),), split_spec={"layers.1": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2
    torch.testing.assert_close(pipe(tokens())[0], model(tokens()))
    assert pipe_split() is None  # a mark for tracing alone: a model that has it runs as before
