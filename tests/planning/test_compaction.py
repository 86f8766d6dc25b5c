"""Compiled and plain compaction of building blocks agree in every action."""

import numpy as np
import pytest

from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planning.compaction import compact
from penstock.planning.orders import Order
from penstock.schedules import v_min
from penstock.schedules.building_blocks import repeat_and_compact
from penstock.schedules.v_half import v_half_block
from penstock.simulation.costs import Costs
from penstock.simulation.problem import Problem
from penstock.simulation.simulate import simulate


def plain(blocks, microbatches):
    placement = Placement.v(len(blocks), 2 * len(blocks))
    rows = repeat_and_compact([tuple(map(int, block)) for block in blocks], microbatches)
    return Schedule.from_codes(rows, placement=placement, microbatches=microbatches, metadata={"name": "plain"})


def is_same(order, schedule):
    expected = Order.from_schedule(schedule)
    return np.array_equal(order.first, expected.first) and np.array_equal(order.tokens, expected.tokens)


def random_block(random, ranks):
    """Passes in an order that runs, each some ticks after the one before; None if two meet on a rank, modulo 6."""
    steps = 1 + random.integers(0, 3, (4, ranks)) * (random.random((4, ranks)) < 0.3)
    ends = np.cumsum(steps.ravel()).reshape(4, ranks) - 1 + 6 * random.integers(0, 2) * np.arange(4)[:, np.newaxis]
    block = np.stack([ends[0], ends[1, ::-1], ends[2], ends[3, ::-1]], axis=1)
    return block if all(len(set(row)) == 4 for row in (block % 6).tolist()) else None


@pytest.mark.parametrize("of_rank", [v_half_block, v_min._block])
@pytest.mark.parametrize("p", range(1, 17))
def test_the_blocks_of_v_half_and_v_min(of_rank, p):
    blocks = [of_rank(rank, p) for rank in range(p)]
    for m in (1, 2, 5, 24, 37):
        assert is_same(compact(np.array(blocks), m).order, plain(blocks, m))


def test_random_blocks():
    random = np.random.default_rng(1)
    compared = 0
    while compared < 300:
        p = int(random.integers(1, 10))
        block = random_block(random, p)
        if block is None:
            continue
        m = int(random.integers(1, 20))
        compacted = compact(block, m)
        assert is_same(compacted.order, plain(block, m))
        assert held(compacted.passes) <= compacted.limit
        more = compact(block, m, compacted.limit + int(random.integers(1, 5)))
        assert held(more.passes) <= more.limit
        compared += 1


def held(passes):
    """The most activations of a rank: F takes one, W releases it."""
    return np.cumsum(np.array([1, 1, 0, 0, -1, -1])[passes], axis=1).max()


def simulated(compacted, p, m):
    problem = Problem.of(Costs(), Placement.v(p, 2 * p), microbatches=m)
    return simulate(compacted.order.to_schedule(problem, "compacted"), problem.costs)


@pytest.mark.parametrize("p", [1, 2, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_ticks_are_those_of_the_simulator_and_the_limit_holds(p, more):
    blocks, m = np.array([v_half_block(rank, p) for rank in range(p)]), 9
    peak = compact(blocks, m).limit
    compacted = compact(blocks, m, peak + more)
    timeline = simulated(compacted, p, m)
    assert (compacted.makespan, compacted.span) == (timeline.makespan, timeline.span)
    assert max(timeline.peak_memory) <= compacted.limit == peak + more
    assert compacted.span <= compact(blocks, m).span


def test_a_limit_below_the_plain_repetition_is_that_of_the_plain_repetition():
    blocks = np.array([v_half_block(rank, 4) for rank in range(4)])
    assert np.array_equal(compact(blocks, 8, 1).passes, compact(blocks, 8).passes)


@pytest.mark.parametrize(
    "blocks",
    [
        [[0, 3, 4, 9], [1, 2, 5, 6]],  # 0F1 and 0I0 on one tick
        [[9, 8, 0, 1]],  # the plain repetition holds nothing, and nor can this
        [[0, 10, 11, 14], [12, 1, 2, 13]],  # 2F0 before 1F0
    ],
)
def test_blocks_that_cannot_run(blocks):
    assert compact(np.array(blocks), 3) is None
