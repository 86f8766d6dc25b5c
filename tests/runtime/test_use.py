"""Switching a live pipeline to another schedule of the same stages."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import EdgeError, StageError, VerificationError
from penstock.ir.edges import chain
from penstock.runtime import Pipeline, Stage, run_in_threads

FORWARD = ps.ComputationType.FORWARD
#: Schedules with the same placement, for two ranks.
GROUPS = [
    ("1F1B", "ZB-H1", "GPipe"),
    ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"),
    ("ZBVZeroBubble", "DualPipeV", "V-Half"),
]


def build(name, microbatches=4):
    return ps.build(name, ranks=2, microbatches=microbatches)


class Layer(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.drop(self.linear(x)).tanh()


def modules_of(stages):
    return [Layer(stage) for stage in range(stages)]


X, Y = (torch.randn(24, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


def train(transport, modules, schedules, steps=2, **options):
    """Train under each of the schedules in turn; returns the losses of every step, and the parameters."""
    placement = schedules[0].placement
    mine = {index: modules[index] for index in placement.stages_of(transport.rank)}
    options.setdefault("loss_fn", functional.mse_loss)
    losses = []
    with Pipeline(mine, schedules[0], transport=transport, share_losses=True, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        for number, schedule in enumerate(schedules):
            if number:
                pipe.use(schedule)
            assert pipe.compute.microbatches == schedule.microbatches
            for _ in range(steps):
                optimizer.zero_grad()
                of_step = []
                pipe.step(X, target=Y, losses=of_step)
                losses.append([float(loss) for loss in of_step])
                optimizer.step()
        assert not pipe.check_parity(X, target=Y).wrong
    return losses


def unsplit(modules, microbatches, steps):
    whole = nn.Sequential(*modules)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    losses = []
    for count in microbatches:
        for _ in range(steps):
            optimizer.zero_grad()
            parts = zip(X.chunk(count), Y.chunk(count), strict=True)
            each = [functional.mse_loss(whole(x), y) for x, y in parts]
            (sum(each) / count).backward()
            losses.append([float(loss.detach()) for loss in each])
            optimizer.step()
    return losses


@pytest.mark.parametrize("names", GROUPS, ids="-".join)
@pytest.mark.parametrize("microbatches", [(4, 4, 4), (4, 6, 3)])
def test_training_goes_on_like_that_of_the_unsplit_model(names, microbatches):
    schedules = [build(name, count) for name, count in zip(names, microbatches, strict=True)]
    modules = modules_of(schedules[0].stages)
    whole = copy.deepcopy(modules)
    found, other = run_in_threads(lambda transport: train(transport, modules, schedules), 2)
    assert found == other
    for one, expected in zip(found, unsplit(whole, microbatches, steps=2), strict=True):
        assert one == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(nn.ModuleList(modules).parameters(), nn.ModuleList(whole).parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("names", GROUPS, ids="-".join)
def test_losses_before_and_after_are_the_same_bit_by_bit(names):
    """Without an optimizer; and nothing is negotiated again."""
    schedules = [build(name) for name in names]
    modules = modules_of(schedules[0].stages)

    def worker(transport):
        mine = {index: modules[index] for index in schedules[0].placement.stages_of(transport.rank)}
        found, links = [], []
        with Pipeline(mine, schedules[0], loss_fn=functional.mse_loss, transport=transport, share_losses=True) as pipe:
            for schedule in [*schedules, schedules[0]]:
                pipe.use(schedule)
                losses = []
                pipe.step(X, target=Y, losses=losses)
                found.append([float(loss) for loss in losses])
                links.append(pipe._engine.programs.links)
                assert float(pipe.eval(X, target=Y, losses=losses) is not None) == pipe.has_last
        return found, all(one is links[0] for one in links)

    for losses, kept in run_in_threads(worker, 2):
        assert [*losses] == [losses[0]] * 4
        assert kept


def in_process(rank, ranks, names, *, group=None):
    schedules = [build(name) for name in names]
    modules = modules_of(schedules[0].stages)
    pipe = Pipeline(
        {index: modules[index] for index in schedules[0].placement.stages_of(rank)},
        schedules[0],
        loss_fn=functional.mse_loss,
        share_losses=True,
        group=group,
    )
    found = []
    try:
        with pipe.recording() as record:
            for schedule in schedules:
                pipe.use(schedule)
                losses = []
                pipe.step(X, target=Y, losses=losses)
                found.append([float(loss) for loss in losses])
        pipe.step(X, target=Y, losses=losses)
        assert not pipe.check_parity(X, target=Y).wrong
        with pytest.raises(StageError):
            pipe.use(build("1F1B") if rank else ps.build("1F1B", ranks=3, microbatches=2))
        pipe.step(X, target=Y)
    finally:
        pipe.close()
    return found, len(record.steps), record.costs().backward is not None


def test_switching_processes_while_recording(workers):
    for losses, steps, whole in workers.run(in_process, ("ZBVZeroBubble", "DualPipeV"), ranks=2):
        assert losses[0] == losses[1]
        assert steps == 2
        assert whole


def refused(use, given=None, error=StageError, **options):
    """What each rank raises for ``use(rank)``; then the pipeline goes on with the schedule it had."""
    schedule = given or build("ZB-H1")
    modules = modules_of(schedule.stages)

    def worker(transport):
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        with Pipeline(mine, schedule, loss_fn=functional.mse_loss, transport=transport, **options) as pipe:
            lowered = pipe.schedule
            with pytest.raises(error) as caught:
                pipe.use(use(transport.rank))
            assert pipe.schedule is lowered
            pipe.step(X, target=Y)
        return str(caught.value)

    return run_in_threads(worker, 2)


def test_another_number_of_ranks_or_stages():
    for message in refused(lambda _: build("Interleaved1F1B")):
        assert message == (
            "the schedule is for 2 ranks and 4 stages, but this pipeline has 2 ranks and 2 stages; make another "
            "Pipeline"
        )


def test_another_placement():
    for message in refused(lambda _: build("ZBVZeroBubble"), build("Interleaved1F1B")):
        assert message.startswith("the schedule has stage 2 on rank 1, but this pipeline has it on rank 0; use a")


def test_ranks_that_use_different_schedules():
    first, second = refused(lambda rank: build(["1F1B", "GPipe"][rank]))
    assert first.startswith("rank 1 was given a different schedule from rank 0: 'GPipe, 2 ranks")
    assert second.startswith("rank 0 was given a different schedule from rank 1: '1F1B, 2 ranks")


def test_a_mistake_on_one_rank():
    first, second = refused(lambda rank: [build("1F1B"), "1F1B"][rank], error=ps.PenstockError)
    assert first.startswith("rank 1 cannot use the schedule it was given: expected a Schedule")
    assert second.startswith("expected a Schedule, e.g. penstock.build('1F1B', ...), got '1F1B'")


def test_other_edges():
    edges = [*chain(2), ps.Edge(0, (1,), "skip")]
    other = ps.lower(build("1F1B").with_edges(edges), unshard=False)
    for message in refused(lambda _: other, error=EdgeError):
        assert "other edges than this pipeline" in message


def test_a_schedule_that_would_not_run():
    broken = ps.Schedule.from_text("0F0 0B0\n1B0 1F0")
    for message in refused(lambda _: broken, error=VerificationError):
        assert "1B0" in message


def test_no_backward():
    for message in refused(lambda _: build("ForwardOnly")):
        assert message.startswith("the schedule has no backward, unlike that of this pipeline")


def test_custom_functions_ties_and_a_scaler_stay():
    names = ("1F1B", "ZB-H1")
    schedules = [build(name) for name in names]
    modules = modules_of(2)
    modules[1].load_state_dict(modules[0].state_dict())
    seen = {0: [], 1: []}

    def worker(transport):
        rank = transport.rank

        def noted(action, context):
            seen[rank].append(str(action))
            context.run(action)

        options = {"ties": [("linear.weight",)], "scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}
        stage = Stage(rank, modules[rank])
        with Pipeline([stage], schedules[0], loss_fn=functional.mse_loss, transport=transport, **options) as pipe:
            pipe.register_custom_function(FORWARD, noted)
            grads = []
            for schedule in schedules:
                pipe.use(schedule)
                modules[rank].zero_grad()
                pipe.step(X, target=Y)
                grads.append(modules[rank].linear.weight.grad.clone())
        return grads

    (before, after), (other_before, other_after) = run_in_threads(worker, 2)
    assert torch.equal(before, other_before)
    assert torch.equal(after, other_after)
    assert torch.allclose(before, after, rtol=1e-5)
    assert seen[0] == [f"0F{number}" for number in range(4)] * 2
    assert seen[1] == [f"1F{number}" for number in range(4)] * 2


def test_a_pipeline_with_skips_gives_its_edges_to_the_schedule():
    edges = [*chain(2), ps.Edge(0, (1,), "skip")]

    class Two(Layer):
        def forward(self, x):
            return super().forward(x), x

    class Sum(Layer):
        def forward(self, hidden, skip):
            return super().forward(hidden + skip)

    modules = [Two(0), Sum(1)]

    def worker(transport):
        given = {transport.rank: modules[transport.rank]}
        options = {"edges": edges, "loss_fn": functional.mse_loss, "transport": transport, "share_losses": True}
        found = []
        with Pipeline(given, build("1F1B"), **options) as pipe:
            for name in ("ZB-H1", "GPipe"):
                losses = []
                pipe.step(X, target=Y, losses=losses)
                found.append([float(loss) for loss in losses])
                pipe.use(build(name))
            assert pipe.schedule.edges == tuple(edges)
            assert not pipe.check_parity(X, target=Y).wrong
        return found

    for first, second in run_in_threads(worker, 2):
        assert first == second
