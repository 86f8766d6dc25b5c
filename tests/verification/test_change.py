"""Proving what a pass has made from something proved is as strict as proving all of it."""

import random

import numpy as np
import pytest

import penstock as ps
from mutants import mutated, text_rows
from penstock.graph.action_table import ActionTable
from penstock.ir.actions import RECV_B, RECV_F, REDUCE_GRAD, RESHARD, UNSHARD
from penstock.ir.dependencies import TRANSFER_TYPES
from penstock.lowering import pipeline
from penstock.lowering.defer_receives import defer_receives
from penstock.lowering.reduce_gradients import reduce_gradients
from penstock.lowering.send_receive import send_receive, send_receive_with_turns
from penstock.lowering.unshard_reshard import unshard_reshard
from penstock.schedules.registry import RECIPES
from penstock.verification.check import verify_change
from penstock.verification.deadlock import check_deadlock

PASSES = (
    (unshard_reshard, {UNSHARD, RESHARD}),
    (reduce_gradients, {REDUCE_GRAD}),
    (send_receive, set(TRANSFER_TYPES)),
    (defer_receives, {RECV_F, RECV_B}),
)
WITHOUT_LANES = ps.CommModel("rendezvous", "message")


def is_proved(before, after, touched, model):
    try:
        verify_change(ActionTable(before), after, frozenset(touched), model=model)
    except ps.VerificationError:
        return False
    return True


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_as_strict_as_verify(recipe):
    chance = random.Random(recipe.name)
    caught = total = 0
    for ranks, microbatches in ((2, 3), (3, 2), (4, 4)):
        before = ps.build(recipe.name, ranks=ranks, microbatches=microbatches)
        for lowering, touched in PASSES:
            after = lowering(before)
            assert is_proved(before, after, touched, WITHOUT_LANES)
            for _ in range(12):
                rows = mutated(text_rows(after), after, chance)
                mutant = ps.Schedule(rows, placement=after.placement, microbatches=microbatches)
                wrong = bool(ps.check(mutant, model=WITHOUT_LANES))
                assert is_proved(before, mutant, touched, WITHOUT_LANES) is not wrong, rows
                caught, total = caught + wrong, total + 1
            before = after
    assert total / 2 < caught < total


def test_turns_that_prove_nothing_do_not_hide_a_deadlock():
    schedule = ps.Schedule([["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F1", "1RECV_F0", "1F0", "1F1"]])
    actions = ActionTable(schedule)
    model = ps.CommModel("rendezvous", "pair")
    for turns in (np.arange(8), np.zeros(8, np.int64), np.array([0, 1, 2, 3, 1, 3, 4, 5])):
        assert [problem.kind for problem in check_deadlock(actions, model, turns)] == ["deadlock"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_turns_of_send_receive_are_a_witness_under_every_model(recipe, monkeypatch):
    lowered, turns = send_receive_with_turns(ps.build(recipe.name, ranks=4, microbatches=6))
    monkeypatch.setattr("penstock.verification.deadlock._starts", None)  # a walk would fail
    for buffering in ("rendezvous", "bounded(1)", "eager"):
        for lanes in ps.LANES:
            assert not list(check_deadlock(ActionTable(lowered), ps.CommModel(buffering, lanes), turns))


def test_a_pass_that_breaks_something_is_caught(monkeypatch):
    schedule = ps.build("1F1B", ranks=2, microbatches=2)

    def careless(before):
        reduced = reduce_gradients(before)
        rows = [[cell for cell in row if str(cell) != "0B1"] for row in reduced.actions]
        return ps.Schedule(rows, placement=reduced.placement, microbatches=reduced.microbatches)

    monkeypatch.setattr(pipeline, "reduce_gradients", careless)
    with pytest.raises(ps.VerificationError, match="0B1 is missing"):
        ps.lower(schedule)
