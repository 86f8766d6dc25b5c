"""Every schedule is complete and runs to its end for any size, whatever the pattern behind it would like."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import interpreter
import penstock as ps
from penstock.schedules.registry import RECIPES


def check(recipe, ranks, microbatches, stages_per_rank):
    schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    stages = ranks * stages_per_rank
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (ranks, stages, microbatches)
    assert schedule.compute_only
    assert all(len(schedule.placement.stages_of(rank)) == stages_per_rank for rank in range(ranks))
    rows = [[str(cell) for cell in row] for row in schedule.actions]
    done = Counter()
    for rank, row in enumerate(rows):
        for cell in row:
            for stage, kind, microbatch in interpreter.leaves(cell):
                assert schedule.placement.rank_of[stage] == rank
                done.update((part, stage, microbatch) for part in {"B": "IW"}.get(kind, kind))
    parts = "F" if recipe.name == "ForwardOnly" else "FIW"
    everything = {(part, s, m) for part in parts for s in range(stages) for m in range(microbatches)}
    assert done == Counter(everything)
    interpreter.run(rows, stages)


def stage_choices(recipe, most):
    return range(1, most + 1) if recipe.any_stages else [recipe.stages_per_rank]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_small_sizes(recipe):
    for ranks in range(1, 6):
        for stages_per_rank in stage_choices(recipe, 3):
            for microbatches in range(1, 13):
                check(recipe, ranks, microbatches, stages_per_rank)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_all_sizes_up_to_eight_ranks(recipe):
    for ranks in range(1, 9):
        for stages_per_rank in stage_choices(recipe, 4):
            for microbatches in range(1, 33):
                check(recipe, ranks, microbatches, stages_per_rank)


@given(st.sampled_from(RECIPES), st.integers(1, 20), st.integers(1, 50), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_larger_sizes(recipe, ranks, microbatches, stages):
    check(recipe, ranks, microbatches, stages if recipe.any_stages else recipe.stages_per_rank)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_equal_inputs_give_equal_schedules(recipe):
    first, second = (ps.build(recipe.name, ranks=3, microbatches=7) for _ in range(2))
    assert first == second
    assert first.metadata == {"name": recipe.name}
    assert not any(None in row for row in first.actions)
