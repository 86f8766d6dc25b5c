"""What goes wrong with edges says what, where, and what to write; nothing is silently different."""

import re
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.errors import EdgeError, StageError, StepError
from penstock.ir.edges import chain
from penstock.runtime import DistributedTransport, Pipeline, Stage, run_in_threads
from penstock.runtime.transport.failure_messages import label_of, peer_of

WIDTH = 4
SHAPES = ["inferred", "per_microbatch", "given"]


class Work(nn.Module):
    """Calls a function with its layer and its inputs."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, *inputs, **kwargs):
        return self.function(self.layer, *inputs, **kwargs)


def one(layer, *inputs):
    return layer(sum(inputs))


def twice(layer, *inputs):
    hidden = layer(sum(inputs))
    return hidden, hidden * 2


def same_twice(layer, *inputs):
    hidden = layer(sum(inputs))
    return hidden, hidden


def with_view(layer, *inputs):
    hidden = layer(sum(inputs))
    return hidden, hidden[:, :2]


def in_place(layer, *inputs):
    return layer(inputs[0].mul_(2) + sum(inputs[1:]))


def sum_padded(layer, *inputs):
    return layer(sum(nn.functional.pad(one, (0, WIDTH - one.shape[1])) for one in inputs))


def train(functions, edges, *, ranks=None, shapes="inferred", changes=(), schedule=None, calls=1):
    """Run steps with a stage per function, each on a rank, or all on one.

    ``changes`` are those that are declared to modify their inputs.
    """
    stages = len(functions)
    each = stages if ranks == 1 else 1
    schedule = schedule or ps.build("LoopedBFS", ranks=ranks or stages, microbatches=2, stages_per_rank=each)
    modules = [Work(function) for function in functions]

    def worker(transport):
        mine = [
            Stage(index, modules[index], changes_inputs=index in changes)
            for index in schedule.placement.stages_of(transport.rank)
        ]
        options = {"edges": edges, "loss_fn": mse_loss, "transport": transport, "shapes": shapes}
        with Pipeline(mine, schedule, **options) as pipe:
            for _ in range(calls):
                pipe.step(torch.ones(4, WIDTH), target=torch.zeros(4, WIDTH))

    run_in_threads(worker, schedule.ranks, timeout=30)
    return modules


# Declaring ------------------------------------------------------------------------------------------------------------


def test_a_lowered_schedule_without_the_transfers_is_refused():
    lowered = ps.lower(ps.build("GPipe", ranks=3, microbatches=2))
    with pytest.raises(EdgeError, match=r"lowered for a chain of stages, but edges= has other .*0>2 .*before it"):
        train([twice, one, one], [*chain(3), ps.Edge(0, (2,))], schedule=lowered)


def test_a_lowered_schedule_with_the_same_edges_runs():
    edges = [*chain(3), ps.Edge(0, (2,))]
    lowered = ps.lower(ps.build("GPipe", ranks=3, microbatches=2).with_edges(edges))
    assert all(module.layer.weight.grad is not None for module in train([twice, one, one], edges, schedule=lowered))


def test_a_schedule_with_other_edges_is_refused():
    wired = ps.build("GPipe", ranks=3, microbatches=2).with_edges([*chain(3), ps.Edge(0, (2,))])
    with pytest.raises(EdgeError, match=r"has other edges than edges= \(.* is only in one of them\)"):
        train([twice, one, one], [*chain(3), ps.Edge(0, (2,), gradient=False)], schedule=wired)


def test_edges_that_go_backwards_are_refused():
    with pytest.raises(EdgeError, match="from stage 2 to stage 1 goes backwards"):
        train([one, one, one], [*chain(3), (2, (1,))])


def test_ranks_with_different_edges_are_named():
    schedule = ps.build("GPipe", ranks=2, microbatches=2)

    def worker(transport):
        edges = [ps.Edge(0, (1,)), *[ps.Edge(0, (1,))] * transport.rank]
        Pipeline({transport.rank: Work(one)}, schedule, edges=edges, loss_fn=mse_loss, transport=transport)

    with pytest.raises((StageError, StepError), match=r"rank \d was given a different schedule from rank .*2 edges"):
        run_in_threads(worker, 2, timeout=30)


# What stages return ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "found"), [(one, "a Tensor"), (lambda layer, x: (layer(x),) * 3, "a tuple of 3")])
@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
def test_another_number_of_values_than_edges(function, found, shapes):
    with pytest.raises((StageError, StepError), match=rf"stage 0 returned {found}, but 2 edges start at it \(0>1, "):
        train([function, one, one], [ps.Edge(0, (1,)), ps.Edge(0, (2,)), ps.Edge(1, (2,))], shapes=shapes)


def test_a_missing_example_is_named():
    with pytest.raises((StageError, StepError), match="shapes has no example output of stage 0"):
        train([one, one, one], [ps.Edge(0, (2,)), ps.Edge(1, (2,)), ps.Edge(0, (1,))], shapes={1: torch.empty(2, 4)})


def test_a_stage_that_reaches_no_loss_is_refused():
    with pytest.raises(StepError, match="stage 1 has parameters that require a gradient, but its output does not"):
        train([one, one, one], [ps.Edge(0, (1, 2)), ps.Edge(1, (2,), gradient=False)])


# In place -------------------------------------------------------------------------------------------------------------


def shapes_of(shapes, first):
    """Examples of a first stage, and of others that return one tensor."""
    given = {0: first, 1: torch.empty(2, WIDTH), 2: torch.empty(2, WIDTH)}
    return given if shapes == "given" else shapes


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("ranks", [None, 1])
def test_what_several_stages_take_is_not_modified_by_one(shapes, ranks):
    edges = [ps.Edge(0, (1, 2)), ps.Edge(1, (2,))]
    with pytest.raises(StepError, match="stage modified input from stage 0 in place, but other stages take the"):
        train([one, in_place, one], edges, ranks=ranks, shapes=shapes_of(shapes, torch.empty(2, WIDTH)), changes=(1,))


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("ranks", [None, 1])
@pytest.mark.parametrize("function", [same_twice, with_view])
def test_values_of_two_edges_that_share_memory_are_not_modified(shapes, ranks, function):
    edges = [ps.Edge(0, (1,)), ps.Edge(0, (2,)), ps.Edge(1, (2,))]
    hidden = torch.empty(2, WIDTH)
    example = hidden, hidden if function is same_twice else hidden[:, :2]
    with pytest.raises(StepError, match="stage modified input from stage 0 in place, but other stages take the"):
        train([function, in_place, sum_padded], edges, ranks=ranks, shapes=shapes_of(shapes, example), changes=(1,))


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
@pytest.mark.parametrize("ranks", [None, 1])
def test_also_not_where_a_stage_only_passes_it_on(shapes, ranks):
    """The unsplit model would see the change at stage 3, which gets the value from stage 0."""
    edges = [ps.Edge(0, (1, 3)), ps.Edge(1, (2,)), ps.Edge(2, (3,))]
    functions = [one, lambda layer, x: (x, layer(x).sum()), lambda layer, x, _: layer(x.mul_(2)), one]
    with pytest.raises(StepError, match=r"modified input.*\[0\] in place, but other stages take the same value"):
        train(functions, edges, ranks=ranks, shapes=shapes, changes=(2,))


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
@pytest.mark.parametrize("ranks", [None, 1])
def test_what_one_stage_takes_may_be_modified(shapes, ranks):
    """As in a chain: what a stage returns belongs to the next one."""
    edges = [ps.Edge(0, (1,)), ps.Edge(0, (2,)), ps.Edge(1, (2,))]
    modules = train([twice, in_place, one], edges, ranks=ranks, shapes=shapes, changes=(1,))
    copies = [Work(module.function) for module in modules]
    for copy, module in zip(copies, modules, strict=True):
        copy.load_state_dict(module.state_dict())
    hidden, skip = copies[0](torch.ones(4, WIDTH))
    mse_loss(copies[2](skip, copies[1](hidden)), torch.zeros(4, WIDTH)).backward()
    for copy, module in zip(copies, modules, strict=True):
        torch.testing.assert_close(module.layer.weight.grad, copy.layer.weight.grad)


def test_integers_that_several_stages_take_are_watched_without_a_declaration():
    """They have no gradient, so autograd would not object."""
    edges = [*chain(3), ps.Edge(0, (1, 2))]
    seen = []

    def entry(layer, x):
        return layer(x), torch.zeros(len(x), dtype=torch.int64)

    def later(layer, hidden, numbers):
        seen.append(1)
        if len(seen) > 4:  # not in the first step, nor its dry run
            numbers.add_(1)
        return layer(hidden)

    with pytest.raises(StepError, match=r"input from stage 0.* in place, which was not declared; pass Stage"):
        train([entry, later, lambda layer, number, x: layer(x)], edges, calls=2)


# Failures -------------------------------------------------------------------------------------------------------------


def slow_skip(rank, ranks, waits_for, *, group):
    """Train until a stage hangs: stage 2 waits for a value of stage 0, or of stage 1."""
    edges = [*chain(3), ps.Edge(0, (2,), gradient=False)]
    schedule = ps.build("GPipe", ranks=3, microbatches=2)
    calls = []

    def hangs(layer, *inputs):
        calls.append(1)
        if len(calls) == 3 and rank == waits_for:  # after the dry run and the first microbatch
            time.sleep(6)
        return (twice if rank == 0 else one)(layer, *inputs)

    transport = DistributedTransport(group, timeout=2.0)
    try:
        pipe = Pipeline({rank: Work(hangs)}, schedule, edges=edges, loss_fn=mse_loss, transport=transport)
        pipe.step(torch.ones(4, WIDTH), target=torch.zeros(4, WIDTH))
    except StepError as error:
        return str(error)
    finally:
        transport.close()
    return ""


@pytest.mark.parametrize(("waits_for", "awaited"), [(0, "2RECV_F1@0"), (1, "2RECV_F1")])
def test_a_wait_names_the_stage_that_is_waited_for(workers, waits_for, awaited):
    """Of several that a forward waits for, the one that has not sent."""
    found = workers.run(slow_skip, waits_for, ranks=3, fresh=True)
    # Whichever rank waits longest reports: stage 1 waits for stage 0, too, and stage 0 for the gradients of stage 1.
    others = {0: "1 waits in 1RECV_F1", 1: "0 waits in 0RECV_B0"}[waits_for]
    waiting = rf"rank (2 waits in {awaited}|{others}) for rank {waits_for}, which has been in {waits_for}F1 for"
    for text in found:
        assert re.search(waiting, text), text


@pytest.mark.parametrize(("slow", "awaited"), [(0, "2RECV_F1@0"), (1, "2RECV_F1")])
def test_of_several_messages_the_missing_one_is_shown(slow, awaited):
    """A slow stage looks at what stage 2, which takes from both others, waits for meanwhile."""
    edges = [*chain(3), ps.Edge(0, (2,), gradient=False)]
    schedule = ps.build("GPipe", ranks=3, microbatches=2)
    progress, calls, seen = {}, [], []

    def looks(layer, *inputs):
        calls.append(1)
        end = time.monotonic() + 20
        while len(calls) == 3 and time.monotonic() < end and seen[-1:] != [(awaited, slow)]:
            seen.append((label_of(progress[2]), peer_of(progress[2])))
            time.sleep(0.001)
        return (twice if slow == 0 else one)(layer, *inputs)

    def worker(transport):
        progress[transport.rank] = transport.progress
        function = looks if transport.rank == slow else (twice if transport.rank == 0 else one)
        stages = {transport.rank: Work(function)}
        with Pipeline(stages, schedule, edges=edges, loss_fn=mse_loss, transport=transport) as pipe:
            pipe.step(torch.ones(4, WIDTH), target=torch.zeros(4, WIDTH))

    run_in_threads(worker, 3, timeout=60)
    assert seen[-1] == (awaited, slow)
    assert all(each.awaited is None for each in progress.values())
