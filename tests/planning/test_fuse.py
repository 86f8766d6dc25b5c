"""Checks that whole backwards replace I and W where they follow each other, and only where nothing gets worse."""

from itertools import pairwise

import numpy as np
import pytest

from penstock.ir.placement import Placement
from penstock.planning.evaluator import Evaluator
from penstock.planning.fuse import _join, fuse
from penstock.planning.orders import KINDS, B, F, I, Order, W
from penstock.planning.starts import list_starts
from penstock.simulation.costs import Costs
from penstock.simulation.problem import Problem
from planning.problems import random_problem


def row(text):
    """Read e.g. ``0F 0I 0W``."""
    kinds = {"F": F, "I": I, "W": W, "B": B}
    return np.array([KINDS * int(word[0]) + kinds[word[1]] for word in text.split()], np.int32)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0F 0I 0W", "0F 0B"),
        ("0F 0F 0I 0I 0W 0W", "0F 0F 0I 0I 0W 0W"),  # the first W is that of the first I
        ("0F 0F 0I 0W 0I 0W", "0F 0F 0B 0B"),
        ("0F 0F 0I 0F 0W 0I 0W", "0F 0F 0I 0F 0W 0B"),
        ("0F 1F 1I 0W 0I 1W", "0F 1F 1I 0W 0I 1W"),  # another stage
        ("1F 0F 1I 0I 0W 1W", "1F 0F 1I 0B 1W"),
        ("0F 0F 0B 0I 0W", "0F 0F 0B 0B"),
        ("", ""),
    ],
)
def test_an_i_is_joined_with_its_own_w_only(before, after):
    assert _join(row(before)).tolist() == row(after).tolist()


def join_slowly(tokens):
    """The same by counting one action at a time."""
    owed = dict.fromkeys((tokens // KINDS).tolist(), 0)
    joined, skip = [], False
    for token, following in pairwise([*tokens.tolist(), -1]):
        stage, kind = divmod(token, KINDS)
        if skip:
            skip = False
        elif kind == I and following == KINDS * stage + W and not owed[stage]:
            joined.append(KINDS * stage + B)
            skip = True
        else:
            owed[stage] += {I: 1, W: -1}.get(kind, 0)
            joined.append(token)
    return joined


@pytest.mark.parametrize("seed", range(50))
def test_joining_agrees_with_counting(seed):
    rng = np.random.default_rng(seed)
    waiting = [[KINDS * stage + kind for _ in range(4) for kind in (I, W)] for stage in range(3)]
    tokens = []
    while any(waiting):  # every stage in its own order, which allows W right after I often enough
        stage = int(rng.choice([stage for stage, left in enumerate(waiting) if left]))
        tokens.append(waiting[stage].pop(0))
    assert _join(np.array(tokens, np.int32)).tolist() == join_slowly(np.array(tokens, np.int32))


@pytest.mark.parametrize("seed", range(30))
def test_fusing_is_never_worse_and_runs_the_same_work(seed):
    problem = random_problem(np.random.default_rng(seed))
    evaluator = Evaluator(problem, ["makespan", "span"][seed % 2])
    starts = (evaluator.list(each.origin, each.urgency, each.offset, reserve=True) for each in list_starts(problem))
    trials = [trial for trial in starts if trial is not None]
    assert trials
    for trial in trials[:3]:
        fused = fuse(evaluator, trial)
        assert evaluator.quality(fused) <= evaluator.quality(trial)
        again = evaluator.replay("again", fused.order)
        assert again is not None
        assert evaluator.quality(again) == evaluator.quality(fused)
        assert work(fused.order) == work(trial.order)


def work(order):
    """How often each stage runs F, and a backward with its W, in whole or in halves."""
    counts = {}
    for token in order.tokens.tolist():
        stage, kind = divmod(token, KINDS)
        for part in (I, W) if kind == B else (kind,):
            counts[stage, part] = counts.get((stage, part), 0) + 1
    return counts


def test_fusing_joins_where_it_is_free():
    problem = Problem.of(Costs(), Placement.loop(1, 1), microbatches=3)
    evaluator = Evaluator(problem, "makespan")
    trial = evaluator.replay("halves", Order.from_rows([row("0F 0I 0W " * 3)]))
    assert fuse(evaluator, trial).order.tokens.tolist() == row("0F 0B " * 3).tolist()
