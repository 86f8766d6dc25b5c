"""Valid schedules with one thing changed: the verifier and the literal machine agree on every one of them."""

import random
import re

import pytest

import literal
import penstock as ps
from penstock.ir.actions import SHARDING
from penstock.schedules.registry import RECIPES

BUFFERINGS = ("rendezvous", "bounded(1)", "bounded(2)", "eager")
MODELS = [(buffering, lanes) for buffering in BUFFERINGS for lanes in ps.LANES]
TYPES = [str(kind) for kind in ps.ComputationType if kind is not ps.ComputationType.OVERLAP_F_B]
SIZES = [(1, 2), (2, 1), (2, 3), (3, 2), (3, 4), (4, 5)]
LOWERINGS = [
    None,
    {},
    {"unshard": False},
    {"unshard": False, "reduce": False},
    {"max_active_stages": 1},
    {"defer_receives": True},
    {"defer_receives": True, "look_ahead": 2},
]


def text_rows(schedule):
    return [["" if cell is None else str(cell) for cell in row] for row in schedule.actions]


def retyped(cell, chance):
    action = ps.Action.from_str(cell)
    if action.sub_actions is not None:
        return str(chance.choice([*action.sub_actions, ps.Action.overlap(*reversed(action.sub_actions))]))
    kind = chance.choice(TYPES)
    microbatch = None if kind in SHARDING else (action.microbatch_index or 0)
    return str(ps.Action(action.stage_index, kind, microbatch))


def reindexed(cell, chance, schedule):
    action = ps.Action.from_str(cell)
    if action.sub_actions is not None:
        first, *rest = action.sub_actions
        return str(ps.Action.overlap(ps.Action.from_str(reindexed(str(first), chance, schedule)), *rest))
    if action.microbatch_index is not None and chance.random() < 0.5:
        return str(action._replace(microbatch_index=chance.randrange(schedule.microbatches + 1)))
    return str(action._replace(stage_index=chance.randrange(schedule.stages + 1)))


def mutated(rows, schedule, chance):
    rows = [list(row) for row in rows]
    rank = chance.choice([rank for rank, row in enumerate(rows) if row])
    row, place = rows[rank], chance.randrange(len(rows[rank]))
    change = chance.choice(["delete", "duplicate", "swap", "retype", "reindex", "move"])
    if change == "delete":
        del row[place]
    elif change == "duplicate":
        row.insert(chance.randrange(len(row) + 1), row[place])
    elif change == "swap":
        place = min(place, len(row) - 2) if len(row) > 1 else 0
        row[place : place + 2] = row[place : place + 2][::-1]
    elif change == "retype":
        row[place] = retyped(row[place], chance)
    elif change == "reindex":
        row[place] = reindexed(row[place], chance, schedule)
    else:
        row.insert(chance.randrange(len(row)), row.pop(place))
    return rows


def assert_stuck_where_it_says(finding, rows, schedule, buffering, lanes):
    """Every action that a rank is said to wait in is where its program stands, or at the head of a lane."""
    machine = literal.Machine(rows, list(schedule.placement.rank_of), schedule.microbatches, buffering, lanes)
    assert machine.verdict() is not None
    standing = {row[count] for row, count in zip(rows, machine.counters, strict=True) if count < len(row)}
    heads = {str(queue[0]) for queue in machine.queues.values() if queue}
    for rank, named in re.findall(r"rank (\d+)(?:, which)? waits in (\S+?),? ", finding.message):
        assert any(named in cell for cell in standing) or named in heads, (finding.message, standing, heads, rank)


def agree(rows, schedule, buffering, lanes):
    broken = ps.Schedule(rows, placement=schedule.placement, microbatches=schedule.microbatches)
    findings = ps.check(broken, model=ps.CommModel(buffering, lanes))
    wrong = literal.verdict(rows, list(schedule.placement.rank_of), schedule.microbatches, buffering, lanes)
    assert bool(findings) == (wrong is not None), (buffering, lanes, wrong, [str(f) for f in findings], rows)
    kinds = {finding.kind for finding in findings}
    if kinds == {"deadlock"}:
        assert "is stuck" in wrong or "never completes" in wrong
        assert_stuck_where_it_says(findings[0], rows, schedule, buffering, lanes)
    for finding in findings:
        assert finding.kind
        assert finding.message
        assert str(finding)
        for rank, step in finding.marks:
            assert broken.actions[rank][step] is not None
    return bool(findings)


def sweep(recipe, mutants, seed):
    chance = random.Random(f"{recipe.name} {seed}")
    caught = 0
    for number in range(mutants):
        ranks, microbatches = SIZES[number % len(SIZES)]
        schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches)
        options = chance.choice(LOWERINGS)
        if options is not None:
            schedule = ps.lower(schedule, **options)
        rows = mutated(text_rows(schedule), schedule, chance)
        for _ in range(chance.choice([0, 0, 0, 1, 2])):
            rows = mutated(rows, schedule, chance)
        caught += agree(rows, schedule, *chance.choice(MODELS))
    return caught


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_sample_of_mutants(recipe):
    mutants = 150
    caught = sweep(recipe, mutants, seed=1)
    assert mutants / 2 < caught < mutants, "most changes break a schedule, and some do not"


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_twenty_thousand_mutants(recipe):
    sweep(recipe, 20_000 // len(RECIPES) + 1, seed=2)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("options", LOWERINGS, ids=str)
def test_without_a_change_they_agree_too(recipe, options):
    for ranks, microbatches in SIZES:
        schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches)
        if options is not None:
            schedule = ps.lower(schedule, **options)
        for buffering, lanes in MODELS:
            agree(text_rows(schedule), schedule, buffering, lanes)
