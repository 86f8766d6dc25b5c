"""Turns that ascend along every row prove what the edges of the event graph prove, under every model."""

import random

import numpy as np
import pytest

import penstock as ps
from penstock.graph.action_table import ActionTable
from penstock.graph.comm_model import MODELS
from penstock.graph.events import rank_ranges
from penstock.lowering.send_receive import send_receive_with_turns
from penstock.schedules.registry import RECIPES
from penstock.verification.turns import _all_wait_for_earlier, _are_shared, _ascend, prove_deadlock_free

EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def by_edges(actions, model, turns):
    return all(_all_wait_for_earlier(part, model, turns) for part in rank_ranges(actions))


@EVERY_RECIPE
def test_turns_of_a_lowering_ascend(recipe):
    lowered, turns = send_receive_with_turns(ps.build(recipe.name, ranks=3, microbatches=6))
    actions = ActionTable(lowered)
    assert _ascend(actions, turns)
    assert _are_shared(actions, turns)
    assert all(by_edges(actions, model, turns) for model in MODELS)


@EVERY_RECIPE
def test_changed_turns_prove_no_more_than_their_edges_do(recipe):
    lowered, turns = send_receive_with_turns(ps.build(recipe.name, ranks=3, microbatches=4))
    actions, chance, proofs = ActionTable(lowered), random.Random(recipe.name), 0
    for _ in range(60):
        changed = turns.copy()
        for place in chance.choices(range(len(turns)), k=chance.choice((1, 1, 2, 3))):
            changed[place] += chance.choice((-2, -1, 1, 2))
        if _ascend(actions, changed) and _are_shared(actions, changed):
            proofs += 1
            assert all(by_edges(actions, model, changed) for model in MODELS)
    assert 0 < proofs < 60


ROWS = [["0F0", "(0F1;3B0)OVERLAP_F_B", "0B0"], ["1F0"]]


@pytest.mark.parametrize(
    ("turns", "ascend"),
    [
        ([0, 1, 1, 2, 0], True),
        ([0, 1, 1, 2, 9], True),  # another rank
        ([0, 2, 1, 2, 0], False),  # an overlap has one turn
        ([0, 1, 2, 3, 0], False),
        ([0, 0, 0, 2, 0], False),
        ([0, 1, 1, 1, 0], False),
        ([3, 1, 1, 2, 0], False),
    ],
)
def test_which_turns_ascend(turns, ascend):
    schedule = ps.Schedule(ROWS, placement=ps.Placement.v(2, 4), microbatches=2)
    assert _ascend(ActionTable(schedule), np.array(turns)) is ascend


def test_without_transfers_the_edges_decide():
    actions = ActionTable(ps.Schedule([["0F0", "0B0"], ["1F0", "1B0"]]))
    model = MODELS[0]
    assert prove_deadlock_free(actions, model, np.array([0, 4, 1, 3]))
    assert not prove_deadlock_free(actions, model, np.array([0, 2, 0, 1]))  # 1F0 waits for 0F0
