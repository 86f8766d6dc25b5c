"""A parameter that several stages of a traced model use trains as one: schedules sum the gradients of its copies."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from models.tracing.traced_models import WIDTH, numbers
from penstock.errors import StageError
from penstock.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, pipe_split, pipeline, schedules

CPU = torch.device("cpu")
MICROBATCHES = 4
SAMPLES = 2 * MICROBATCHES
VOCABULARY = 7


class Tied(nn.Module):
    """An embedding and a head that are one matrix, and a gain of the root in every stage."""

    def __init__(self, *, cuts=1, sparse=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(cuts + 1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(numbers(3, WIDTH))
        self.unused = nn.Parameter(numbers(4, WIDTH))

    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            if number:
                pipe_split()
            x = torch.tanh(layer(x)) * self.gain
        return self.head(x)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (SAMPLES, 3), generator=generator), numbers(
        seed, SAMPLES, 3, VOCABULARY
    ).double()


def make(*, cuts=1, seed=1, **options):
    torch.manual_seed(seed)
    return Tied(cuts=cuts, **options).double()


def of_rank(rank, ranks, whole, group, *, sums=True):
    """The pipe and the stages of this rank; round robin."""
    pipe = pipeline(copy.deepcopy(whole), (batch(0)[0][:2],))
    pipe.sums_replicas = sums
    return pipe, [pipe.build_stage(index, CPU, group) for index in range(rank, pipe.num_stages, ranks)]


def step(schedule, stages, seed):
    ids, target = batch(seed)
    schedule.step(*([ids] if stages[0].is_first else []), target=target)


def run_whole(whole, seed):
    ids, target = batch(seed)
    nn.functional.mse_loss(whole(ids), target).backward()


def parameters(stages):
    return {
        (stage.stage_index, name): parameter for stage in stages for name, parameter in stage.submod.named_parameters()
    }


def check_gradients(stages, whole):
    for (_, name), parameter in parameters(stages).items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=0, atol=1e-12)


def make_schedule(kind, stages):
    stages = stages if kind is ScheduleInterleaved1F1B else stages[0]
    return kind(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)


class WithOwnStep(Schedule1F1B):
    """A program's own step, which calls that of the class."""

    def step(self, *args, target=None):
        microbatches = self._begin_step([self._stage], args, {}, target, needs_autograd=True)
        self._step_microbatches(*microbatches)


class OwnMicrobatches(schedules.PipelineScheduleSingle):
    """A program's own order of the methods of the stage, which divides the loss itself."""

    def _step_microbatches(self, arg_mbs, kwarg_mbs, target_mbs, losses=None, return_outputs=True, loss_kwargs=None):
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0], target_mbs[0])
        stage, works = self._stage, []
        for microbatch in range(self._n_microbatches):
            schedules._wait_batch_p2p(schedules._batch_p2p(stage.get_fwd_recv_ops(microbatch)))
            output = stage.forward_one_chunk(microbatch, arg_mbs[microbatch], kwarg_mbs[microbatch])
            works += schedules._batch_p2p(stage.get_fwd_send_ops(microbatch))
            self._maybe_compute_loss(stage, output, target_mbs, microbatch)
        for microbatch in range(self._n_microbatches):
            schedules._wait_batch_p2p(schedules._batch_p2p(stage.get_bwd_recv_ops(microbatch)))
            loss = self._maybe_get_loss(stage, microbatch)
            stage.backward_one_chunk(microbatch, loss=None if loss is None else loss / self._n_microbatches)
            works += schedules._batch_p2p(stage.get_bwd_send_ops(microbatch))
        schedules._wait_batch_p2p(works)
        self._update_losses(stage, losses)


CASES = [(ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 3), (OwnMicrobatches, 1), (WithOwnStep, 1)]


def train(rank, ranks, case, *, group):
    """Three steps of AdamW; the second adds up two batches."""
    kind, cuts = CASES[case]
    whole = make(cuts=cuts)
    _, stages = of_rank(rank, ranks, whole, group)
    schedule = make_schedule(kind, stages)
    optimizers = [torch.optim.AdamW(each, lr=0.1) for each in (whole.parameters(), parameters(stages).values())]
    for seeds in ((0,), (1, 2), (3,)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for seed in seeds:
            run_whole(whole, seed)
            step(schedule, stages, seed)
            check_gradients(stages, whole)
        for optimizer in optimizers:
            optimizer.step()
    for (_, name), parameter in parameters(stages).items():
        torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=0, atol=1e-10)
    return {name: value.detach() for (_, name), value in parameters(stages).items()}


@pytest.mark.parametrize("case", range(len(CASES)), ids=[kind.__name__ for kind, _ in CASES])
def test_copies_train_as_one_parameter(workers, case):
    first, last = workers.run(train, case, ranks=2)
    assert torch.equal(first["embed.weight"], last["head.weight"])
    assert torch.equal(first["gain"], last["gain"])


def train_sparse(rank, ranks, *, group):
    """The gradient of the embedding is sparse, that of the head dense: their sum is dense, as in the whole model."""
    whole = make(sparse=True)
    _, stages = of_rank(rank, ranks, whole, group)
    schedule = make_schedule(ScheduleGPipe, stages)
    for seed in range(2):
        run_whole(whole, seed)
        step(schedule, stages, seed)
    check_gradients(stages, whole)
    return [parameter.grad.layout for parameter in parameters(stages).values()]


def test_a_sparse_gradient_and_a_dense_one(workers):
    for layouts in workers.run(train_sparse, ranks=2):
        assert set(layouts) == {torch.strided}


def sum_again(rank, ranks, *, group):
    """The method that sums by hand changes nothing after a step of a schedule, nor after an evaluation."""
    whole = make()
    pipe, stages = of_rank(rank, ranks, whole, group)
    schedule = make_schedule(Schedule1F1B, stages)
    for seed in range(2):
        run_whole(whole, seed)
        step(schedule, stages, seed)
        schedule.eval(*([batch(seed)[0]] if rank == 0 else []), target=batch(seed)[1])
        pipe.sum_replicated_gradients(stages)
        check_gradients(stages, whole)


def test_summing_by_hand_as_well_counts_nothing_twice(workers):
    workers.run(sum_again, ranks=2)


def sum_by_hand(rank, ranks, *, group):
    whole = make()
    pipe, stages = of_rank(rank, ranks, whole, group, sums=False)
    schedule = make_schedule(Schedule1F1B, stages)
    for seed in range(2):
        run_whole(whole, seed)
        step(schedule, stages, seed)
    before = stages[0].submod.get_parameter("gain").grad.clone()
    pipe.sum_replicated_gradients(stages)
    check_gradients(stages, whole)
    return before


def test_the_sum_may_be_left_to_the_program(workers):
    first, last = workers.run(sum_by_hand, ranks=2)
    assert not torch.allclose(first, last)


def test_a_failed_step_keeps_earlier_gradients(one_gloo_rank):
    """They are where they were, and nothing of the step that failed is summed."""
    pipe = pipeline(make(), (batch(0)[0][:2],))
    stages = [pipe.build_stage(index, CPU) for index in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    step(schedule, stages, 0)
    gradients = {key: parameter.grad for key, parameter in parameters(stages).items()}
    before = {key: gradient.clone() for key, gradient in gradients.items()}
    stages[1].forward_one_chunk = None
    with pytest.raises(TypeError):
        step(schedule, stages, 1)
    for key, parameter in parameters(stages).items():
        assert parameter.grad is gradients[key]
        assert torch.equal(parameter.grad, before[key])


def with_different_models(rank, ranks, *, group):
    _, stages = of_rank(rank, ranks, make(seed=rank), group)
    schedule = make_schedule(ScheduleGPipe, stages)
    with pytest.raises(StageError) as caught:
        step(schedule, stages, 0)
    return str(caught.value)


def test_copies_that_begin_with_different_values_are_refused(workers):
    for message in workers.run(with_different_models, ranks=2):
        assert message.startswith(
            "tied parameters begin with different values: embed.weight of stage 0 = head.weight of stage 1"
        )
        assert "build the model with one seed on all ranks" in message


def drift(rank, ranks, *, group):
    _, stages = of_rank(rank, ranks, make(), group)
    schedule = make_schedule(ScheduleGPipe, stages)
    optimizer = torch.optim.SGD(parameters(stages).values(), lr=0.1 if rank else 0.2)
    step(schedule, stages, 0)
    optimizer.step()
    with pytest.raises(StageError, match="drifted apart"):
        step(schedule, stages, 1)


def test_copies_that_come_apart_are_refused(workers):
    workers.run(drift, ranks=2)


def share(rank, ranks, *, group):
    """All stages on one rank; the program has made the copies of the gain one tensor."""
    whole = make(cuts=3)
    _, stages = of_rank(rank, ranks, whole, group)
    for stage in stages[1:]:
        stage.submod.gain = stages[0].submod.gain
    schedule = make_schedule(ScheduleInterleaved1F1B, stages)
    for seed in range(2):
        run_whole(whole, seed)
        step(schedule, stages, seed)
        check_gradients(stages, whole)


def test_copies_that_are_one_tensor_count_once(workers):
    workers.run(share, ranks=1)


def test_stages_of_one_schedule_agree_on_who_sums(one_gloo_rank):
    pipe = pipeline(make(), (batch(0)[0][:2],))
    stages = []
    for index in range(2):
        pipe.sums_replicas = index == 0
        stages.append(pipe.build_stage(index, CPU))
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ValueError, match=r"stages \[0, 1\] of one schedule differ .* sums_replicas"):
        step(schedule, stages, 0)


def test_a_module_that_was_replaced(one_gloo_rank):
    pipe = pipeline(make(), (batch(0)[0][:2],))
    stages = [pipe.build_stage(index, CPU) for index in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    stages[1].submod = nn.Identity()
    with pytest.raises(StageError, match="module of stage 1 no longer has the parameter 'gain'"):
        step(schedule, stages, 0)


# Stages with replicas


def with_ddp(module, replicas):
    return DistributedDataParallel(module, process_group=replicas.get_group())


def with_fsdp(module, replicas):
    return fully_shard(module, mesh=replicas)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train_replicas(rank, ranks, wrap):
    """Two replicas of a pipeline, each with a batch; returns how far gradients are from those of both batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    replica, place = mesh.get_coordinate()
    whole = make()
    _, stages = of_rank(place, 2, whole, mesh.get_group("pipeline"))
    for stage in stages:
        stage.submod = wrap(stage.submod, mesh["replica"])
    schedule = make_schedule(Schedule1F1B, stages)
    optimizers = [torch.optim.AdamW(each, lr=0.1) for each in (whole.parameters(), parameters(stages).values())]
    worst = 0.0
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for seed in (2 * number, 2 * number + 1):
            run_whole(whole, seed)
        for parameter in whole.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / 2
        step(schedule, stages, 2 * number + replica)
        for (_, name), parameter in parameters(stages).items():
            expected = whole.get_parameter(name.removeprefix("module."))
            worst = max(worst, float((full(parameter.grad) - expected.grad).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
    return worst


@pytest.mark.parametrize("wrap", [with_ddp, with_fsdp])
def test_copies_in_stages_with_replicas(workers, wrap):
    assert max(workers.run(train_replicas, wrap, ranks=4)) < 1e-12
