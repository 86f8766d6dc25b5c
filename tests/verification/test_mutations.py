"""Valid schedules with one thing changed: the verifier and the literal machine agree on every one of them."""

import random
import re

import pytest

import literal
import penstock as ps
from mutants import mutated, some_edges, text_rows
from penstock.schedules.registry import RECIPES

BUFFERINGS = ("rendezvous", "bounded(1)", "bounded(2)", "eager")
MODELS = [(buffering, lanes) for buffering in BUFFERINGS for lanes in ps.LANES]
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


def assert_stuck_where_it_says(finding, rows, schedule, buffering, lanes):
    """Every action that a rank is said to wait in is where its program stands, or at the head of a lane."""
    rank_of = list(schedule.placement.rank_of)
    machine = literal.Machine(rows, rank_of, schedule.microbatches, buffering, lanes, literal_links(schedule))
    assert machine.verdict() is not None
    standing = {row[count] for row, count in zip(rows, machine.counters, strict=True) if count < len(row)}
    heads = {str(queue[0]) for queue in machine.queues.values() if queue}
    for rank, named in re.findall(r"rank (\d+)(?:, which)? waits in (\S+?),? ", finding.message):
        assert any(named in cell for cell in standing) or named in heads, (finding.message, standing, heads, rank)


def literal_links(schedule):
    return [
        (edge.source, target, any(target in other.targets and other.gradient for other in schedule.edges
                                  if other.source == edge.source))
        for edge in schedule.edges for target in edge.targets
    ]  # fmt: skip


def agree(rows, schedule, buffering, lanes):
    size = {"placement": schedule.placement, "microbatches": schedule.microbatches}
    broken = ps.Schedule(rows, **size, edges=None if schedule.is_chain else schedule.edges)
    findings = ps.check(broken, model=ps.CommModel(buffering, lanes))
    rank_of, links = list(schedule.placement.rank_of), literal_links(schedule)
    wrong = literal.verdict(rows, rank_of, schedule.microbatches, buffering, lanes, links)
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


def sweep(recipe, mutants, seed, *, with_edges=False):
    chance = random.Random(f"{recipe.name} {seed}")
    caught = 0
    for number in range(mutants):
        ranks, microbatches = SIZES[number % len(SIZES)]
        schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches)
        if with_edges:
            schedule = schedule.with_edges(some_edges(schedule.stages, chance))
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


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_sample_of_mutants_with_edges_beyond_the_chain(recipe):
    mutants = 150
    caught = sweep(recipe, mutants, seed=3, with_edges=True)
    assert mutants / 2 < caught < mutants


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("with_edges", [False, True])
def test_twenty_thousand_mutants(recipe, with_edges):
    sweep(recipe, 20_000 // len(RECIPES) + 1, seed=2, with_edges=with_edges)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("options", LOWERINGS, ids=str)
def test_without_a_change_they_agree_too(recipe, options):
    for ranks, microbatches in SIZES:
        schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches)
        if options is not None:
            schedule = ps.lower(schedule, **options)
        for buffering, lanes in MODELS:
            agree(text_rows(schedule), schedule, buffering, lanes)
