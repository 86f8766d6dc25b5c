"""The kernels of the bounds agree with slow, plain versions of themselves, interpreted and compiled."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.graph.jit import jit
from penstock.ir.placement import Placement
from penstock.simulation.bounds import forced_work, heads, lower_bounds, one_machine, relaxation
from penstock.simulation.bounds.memory_order import held_at_once
from penstock.simulation.bounds.relaxation import relax
from penstock.simulation.costs import Costs
from penstock.simulation.problem import Problem
from random_schedules import random_costs, random_placement

BOTH = pytest.mark.parametrize("compiled", [False, True])


def some_relaxation(chance):
    """Return a small feasible relaxation with little memory, forwards or backwards."""
    placement = random_placement(chance, chance.randint(1, 3))
    costs = random_costs(chance, placement.stages, placement.stages - 1)
    free = Problem.of(costs, placement, microbatches=chance.randint(1, 5))
    room = np.array([chance.choice([1.0, 1.4, 2.0]) for _ in range(free.ranks)])
    problem = replace(free, memory_limit=free.static + held_at_once(free) * room)
    relaxed = relax(problem)
    return relaxed.reversed if chance.random() < 0.5 else relaxed


def done_before(relaxed, target, microbatch):
    """Return for each operation how many must have run before this one."""
    return np.clip(microbatch + relaxed.before[target] + 1, 0, relaxed.microbatches)


@BOTH
def test_the_closure_is_that_of_floyd_and_warshall(compiled):
    for seed in range(40):
        relaxed = some_relaxation(random.Random(seed))
        count = len(relaxed.rank)
        slow = np.full((count, count), relaxation.UNRELATED)
        for target in range(count):
            for entry in range(*relaxed.waits.first[target : target + 2]):
                source = relaxed.waits.source[entry]
                slow[target, source] = max(slow[target, source], relaxed.waits.shift[entry])
        for via in range(count):
            slow = np.maximum(slow, slow[:, [via]] + slow[[via], :])
        close = jit(relaxation._close) if compiled else relaxation._close
        found = close(relaxed.order, relaxed.waits.first, relaxed.waits.source, relaxed.waits.shift)
        related = slow > relaxation.UNRELATED // 2
        assert np.array_equal(found[related], slow[related])
        assert (found[~related] < relaxation.UNRELATED // 2).all()


def run_plainly(taken, heads_of, tails_of, members):
    """Return when the rank has run all and the tails have passed, by running it in steps of one."""
    jobs = [
        [head, -tail, length]
        for operation in members
        for head, tail, length in zip(heads_of[operation], tails_of[operation], itertools.repeat(taken[operation]))
        if head > -np.inf and tail > -np.inf
    ]
    end, now = -np.inf, min((job[0] for job in jobs), default=0)
    for job in jobs:
        if not job[2]:
            end = max(end, job[0] - job[1])
    while any(job[2] for job in jobs):
        ready = [job for job in jobs if job[2] and job[0] <= now]
        now += 1
        if ready:
            job = min(ready, key=lambda job: job[1])
            job[2] -= 1
            end = max(end, now - job[1])
    return end


@BOTH
def test_a_machine_ends_as_if_run_step_by_step(compiled):
    run = jit(one_machine._run) if compiled else one_machine._run
    for seed in range(100):
        draw = np.random.default_rng(seed)
        count, microbatches = int(draw.integers(1, 5)), int(draw.integers(1, 5))
        taken = draw.integers(0, 4, count).astype(float)
        early = np.sort(draw.integers(0, 20, (count, microbatches)), axis=1) + np.arange(microbatches) * taken[:, None]
        late = -np.sort(-draw.integers(-1, 20, (count, microbatches)), axis=1) * 1.0
        if seed % 3 == 0:
            early[0, 0], late[-1, -1] = -np.inf, -np.inf
        members = np.arange(count)
        ends = run(taken, early, late, members, np.array([0, count]))
        if (taken > 0).all():
            assert ends[0] == run_plainly(taken, early, late, members)
        else:
            assert ends[0] >= run_plainly(taken[taken > 0], early[taken > 0], late[taken > 0], range((taken > 0).sum()))


def raised_plainly(relaxed, known):
    """Return the heads by trying every set of operations that starts at a head."""
    raised = known.copy()
    for target, microbatch in np.ndindex(known.shape):
        here = np.flatnonzero(relaxed.rank == relaxed.rank[target])
        done = done_before(relaxed, target, microbatch)
        joined = [
            (known[other, each], relaxed.taken[other])
            for other in here
            for each in range(done[other])
            if relaxed.taken[other] and known[other, each] > -np.inf
        ]
        extra = relaxed.forced[target, microbatch]
        next_ones = [
            known[other, done[other]]
            for other in here
            if relaxed.takes[other] == 0 and done[other] < relaxed.microbatches
        ]
        first = min(next_ones, default=-np.inf)
        for start, _ in joined:
            total = sum(length for head, length in joined if head >= start)
            if extra and next_ones and start <= first:
                total += extra
            raised[target, microbatch] = max(raised[target, microbatch], start + total)
        if extra and next_ones:
            total = extra + sum(length for head, length in joined if head >= first)
            raised[target, microbatch] = max(raised[target, microbatch], first + total)
    return raised


@BOTH
def test_heads_rise_by_the_best_set_of_operations(compiled):
    raise_heads = jit(heads._raise_heads) if compiled else heads._raise_heads
    is_forced = is_risen = 0
    for seed in range(60):
        chance = random.Random(seed)
        relaxed = some_relaxation(chance)
        release = np.zeros((len(relaxed.rank), relaxed.microbatches))
        if chance.random() < 0.5:
            release[relaxed.rank != 0] = -np.inf
        known = heads.path_heads(relaxed, release)
        fast = known.copy()
        by_head = heads._order_by_head(known, *relaxed.members)
        rest = (by_head, relaxed.before, relaxed.forced, relaxed.takes > 0)
        raise_heads(fast, known, relaxed.taken, *relaxed.members, *rest)
        slow = raised_plainly(relaxed, known)
        finite = slow > -np.inf
        assert np.array_equal(finite, fast > -np.inf)
        assert fast[finite] == pytest.approx(slow[finite], rel=1e-8, abs=1e-8)
        is_forced += relaxed.forced.any()
        is_risen += (fast[finite] > known[finite] + 1e-6).any()
    assert is_forced > 10
    assert is_risen > 20


@BOTH
def test_forced_work_is_the_least_that_releases_enough(compiled):
    find = jit(forced_work._find) if compiled else forced_work._find
    forced = 0
    for seed in range(150):
        chance = random.Random(seed)
        relaxed = some_relaxation(chance)
        work = np.zeros((len(relaxed.rank), relaxed.microbatches))
        room = relaxed.budget * (1 + 1e-9)
        find(work, relaxed.taken, relaxed.takes, relaxed.releases, room, *relaxed.members, relaxed.before)
        for target, microbatch in zip(*np.nonzero(work), strict=True):
            least = least_forced(relaxed, target, microbatch, room[relaxed.rank[target]])
            assert work[target, microbatch] <= least * (1 + 1e-9)
            here = np.flatnonzero((relaxed.rank == relaxed.rank[target]) & (relaxed.releases > 0))
            if len(here) <= 2:
                assert work[target, microbatch] == pytest.approx(least)
            forced += 1
    assert forced > 50


def least_forced(relaxed, target, microbatch, room):
    """Try all numbers of further releasing operations; count what must precede each, except what takes memory."""
    here = np.flatnonzero(relaxed.rank == relaxed.rank[target])
    done = done_before(relaxed, target, microbatch)
    free = [other for other in here if relaxed.takes[other] == 0]
    releasing = [other for other in here if relaxed.releases[other] > 0]
    held = relaxed.takes[target] + sum((relaxed.takes[other] - relaxed.releases[other]) * done[other] for other in here)
    least = math.inf
    for more in itertools.product(*(range(relaxed.microbatches - done[other] + 1) for other in releasing)):
        if held - np.dot(more, relaxed.releases[releasing]) > room + 1e-12:
            continue
        upto = done.copy()
        for other, count in zip(releasing, more, strict=True):
            if count:
                needed = done_before(relaxed, other, done[other] + count - 1)
                needed[other] = done[other] + count
                upto = np.maximum(upto, needed)
        least = min(least, float((upto - done)[free] @ relaxed.taken[free]))
    return least


def test_a_problem_that_is_compiled_and_one_that_is_not_have_the_same_bounds(monkeypatch):
    problem = Problem.of(
        Costs(forward=[1, 2, 1, 3], backward_weight=2, latency=0.5),
        Placement.v(2, 4),
        microbatches=6,
        memory_limit=3,
    )
    for module in (heads, one_machine, forced_work, relaxation):
        monkeypatch.setattr(module, "should_compile", lambda _work: False)
    plain = {objective: lower_bounds(problem, objective) for objective in ("makespan", "span", "period")}
    for module in (heads, one_machine, forced_work, relaxation):
        monkeypatch.setattr(module, "should_compile", lambda _work: True)
    assert plain == {objective: lower_bounds(problem, objective) for objective in plain}
