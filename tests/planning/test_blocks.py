"""Blocks for every amount of memory: what they hold, and how near they come to the closed form of the V family."""

import numpy as np
import pytest

from penstock.ir.placement import Placement
from penstock.planning.blocks import _family, best_blocks, best_orders
from penstock.schedules.v_half import v_half_block
from penstock.schedules.v_min import v_min
from penstock.simulation.costs import Costs
from penstock.simulation.problem import Problem
from penstock.simulation.simulate import simulate
from penstock.verification.check import check

#: By p, where the best block is not at the closed form (memory: ticks more). At 2p activations there is ZB-V.
EXCESS = {
    4: {5: 1, 7: 1, 8: 1},
    5: {8: 1, 9: 1, 10: 1},
    6: {7: 1, 11: 1, 12: 1},
    7: {7: 1, 9: 1, 11: 1, 12: 1, 13: 1, 14: 1},
    8: {13: 1, 14: 2, 15: 1, 16: 1},
    9: {9: 1, 11: 1, 13: 1, 15: 1, 16: 2, 17: 1},
    10: {9: 1, 11: 1, 14: 1, 15: 1, 17: 1, 18: 2, 19: 1},
    11: {11: 1, 13: 1, 15: 1, 16: 1, 17: 1, 18: 2, 19: 1, 20: 2, 21: 1},
    12: {11: 1, 16: 1, 17: 1, 19: 1, 20: 2, 21: 1, 22: 2, 23: 3},
}


def held_in_a_long_repetition(block):
    """Count: the four passes at their ticks, and W in the first free ones."""
    most, repetitions = 0, 40
    for f0, f1, i1, i0 in block.tolist():
        taken = {each + 6 * n for each in (f0, f1, i1, i0) for n in range(repetitions)}
        changes = [(each + 6 * n, 1) for each in (f0, f1) for n in range(repetitions)]
        for tick in sorted(each + 6 * n for each in (i1, i0) for n in range(repetitions)):
            free = next(each for each in range(tick + 1, tick + 7 * repetitions) if each not in taken)
            taken.add(free)
            changes.append((free, -1))
        most = max(most, *np.cumsum([change for _, change in sorted(changes)]))
    return most


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 20])
def test_blocks_hold_what_is_said(p):
    blocks, held = _family(p)
    assert len(blocks) == len(held) == len(np.unique(blocks.reshape(len(blocks), -1), axis=0)) > 0
    for index in np.random.default_rng(p).integers(0, len(blocks), 20):
        block = blocks[index]
        assert all(len(set(row)) == 4 for row in (block % 6).tolist())
        assert (np.diff(block, axis=1) > 0).all()
        for passes, way in zip(block.T, (1, -1, 1, -1), strict=True):
            assert (np.diff(passes[::way]) > 0).all()
        assert held[index] == held_in_a_long_repetition(block)


@pytest.mark.parametrize("p", [4, 6, 8, 10])
def test_v_half_is_in_the_family(p):
    expected = np.array([v_half_block(rank, p) for rank in range(p)])
    assert (_family(p)[0] == expected).all(axis=(1, 2)).sum() == 1


@pytest.mark.parametrize("p", EXCESS)
def test_the_best_blocks_are_at_the_closed_form_or_this_far_above(p):
    assert EXCESS[p].keys() <= set(range(2 * ((p + 4) // 3) - 1, 2 * p + 1))
    for m in (2 * p, 3 * p + 1):
        for memory in range(2 * ((p + 4) // 3), 2 * p + 1):
            best = best_orders(p, m, memory, most=1)[0]
            assert best.span - 6 * m - max(0, 6 * p - 1 - 3 * memory) == EXCESS[p].get(memory, 0)


@pytest.mark.parametrize("p", [1, 2, 3, 6])
@pytest.mark.parametrize("m", [1, 4, 11])
def test_orders_run_within_their_memory(p, m):
    for memory in range(2, 2 * p + 2):
        for compacted in best_orders(p, m, memory):
            problem = Problem.of(Costs(), Placement.v(p, 2 * p), microbatches=m)
            schedule = compacted.order.to_schedule(problem, "block")
            assert check(schedule) == []
            timeline = simulate(schedule, problem.costs)
            assert (timeline.span, timeline.makespan) == (compacted.span, compacted.makespan)
            assert max(timeline.peak_memory) <= memory


def test_no_block_for_less_memory_than_v_min():
    least = max(simulate(v_min(8, 24), Costs()).peak_memory)
    assert best_blocks(8, int(least) - 1) == ()
    assert best_orders(8, 24, int(least) - 1) == []
    assert best_orders(8, 24, int(least))
