"""Lowering proves what it makes, whatever its passes do; what was wrong before is reported where it is in the input."""

import random

import numpy as np
import pytest

import penstock as ps
from mutants import mutated, text_rows
from penstock.graph.action_table import ActionTable
from penstock.ir import packed
from penstock.lowering import pipeline
from penstock.lowering.defer_receives import defer_receives
from penstock.lowering.merge_backward import merge_backward
from penstock.lowering.reduce_gradients import reduce_gradients
from penstock.lowering.send_receive import send_receive, send_receive_with_turns
from penstock.lowering.unshard_reshard import unshard_reshard
from penstock.schedules.registry import RECIPES
from penstock.verification.deadlock import check_deadlock

SIZES = ((2, 3), (3, 2), (4, 4))
of_every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def mutant(schedule, chance):
    rows = mutated(text_rows(schedule), schedule, chance)
    return ps.Schedule(rows, placement=schedule.placement, microbatches=schedule.microbatches)


def findings_of(lower):
    try:
        lower()
    except ps.VerificationError as error:
        return list(error.findings)
    return []


def is_refused(action):
    try:
        action()
    except ps.ScheduleError:
        return True
    return False


@of_every_recipe
@pytest.mark.parametrize("options", [{}, {"merge_backward": True, "unshard": False}, {"defer_receives": True}])
def test_what_is_wrong_with_the_input_is_reported_on_the_input(recipe, options):
    chance = random.Random(recipe.name)
    caught = total = 0
    for ranks, microbatches in SIZES:
        for _ in range(20):
            broken = mutant(ps.build(recipe.name, ranks=ranks, microbatches=microbatches), chance)
            if not broken.lowered:
                wrong = ps.check(broken)
                assert findings_of(lambda broken=broken: ps.lower(broken, **options)) == wrong
                caught, total = caught + bool(wrong), total + 1
    assert total / 3 < caught < total


@of_every_recipe
@pytest.mark.parametrize("name", ["insert", "send_receive_with_turns", "defer_with_turns"])
def test_a_pass_that_breaks_something_is_caught(recipe, name, monkeypatch):
    """As strictly as by ``check``: a mutant of what a pass makes is refused if and only if it is wrong in the end."""
    chance, right = random.Random(recipe.name), getattr(pipeline, name)
    made = []

    def careless(*arguments, **options):
        result = right(*arguments, **options)
        made.append(mutant(result if name == "insert" else result[0], chance))
        return made[-1] if name == "insert" else (made[-1], None)

    monkeypatch.setattr(pipeline, name, careless)
    deferring = name == "defer_with_turns"
    model = ps.CommModel("rendezvous", "message" if deferring else "pair")
    caught = total = 0
    for ranks, microbatches in SIZES:
        schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches)
        for _ in range(12):
            refused = is_refused(lambda schedule=schedule: ps.lower(schedule, defer_receives=deferring))
            wrong = is_refused(lambda: ps.verify(send_receive(made[-1]) if name == "insert" else made[-1], model=model))
            assert refused is wrong, text_rows(made[-1])
            caught, total = caught + wrong, total + 1
    assert total / 3 < caught < total


@of_every_recipe
def test_passes_make_codes_of_actions(recipe):
    schedule = ps.build(recipe.name, ranks=3, microbatches=4)
    for run_pass in (merge_backward, unshard_reshard, reduce_gradients, send_receive, defer_receives):
        schedule = run_pass(schedule)
        assert packed.is_wellformed(schedule.codes, schedule.offsets)


def test_turns_that_prove_nothing_do_not_hide_a_deadlock():
    schedule = ps.Schedule([["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F1", "1RECV_F0", "1F0", "1F1"]])
    actions = ActionTable(schedule)
    model = ps.CommModel("rendezvous", "pair")
    for turns in (np.arange(8), np.zeros(8, np.int64), np.array([0, 1, 2, 3, 1, 3, 4, 5])):
        assert [problem.kind for problem in check_deadlock(actions, model, turns)] == ["deadlock"]


@of_every_recipe
def test_the_turns_of_send_receive_are_a_witness_under_every_model(recipe, monkeypatch):
    lowered, turns = send_receive_with_turns(ps.build(recipe.name, ranks=4, microbatches=6))
    monkeypatch.setattr("penstock.verification.deadlock._starts", None)  # a walk would fail
    for buffering in ("rendezvous", "bounded(1)", "eager"):
        for lanes in ps.LANES:
            assert not list(check_deadlock(ActionTable(lowered), ps.CommModel(buffering, lanes), turns))
