"""The table in docs/verification.md: under which models what is lowered with deferred receives is safe."""

import re
from pathlib import Path

import penstock as ps
from penstock.graph.comm_model import MODELS
from penstock.schedules.registry import RECIPES

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 5, 8) for microbatches in (1, 2, 3, 4, 5, 8, 13)]


def unsafe_models(recipe):
    """Those under which it deadlocks at some size."""
    found = set()
    for ranks, microbatches in SIZES:
        for stages in (1, 2, 3) if recipe.any_stages else [None]:
            schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages)
            lowered = ps.lower(schedule, defer_receives=True)
            found |= {model for model, free in ps.safe_models(lowered).items() if not free}
    return found


def rows_of_the_page():
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_the_table_is_what_the_verifier_says():
    drawn = rows_of_the_page()
    shown = [model for model in MODELS if model.buffering != "eager" and model.lanes != "message"]
    for recipe in RECIPES:
        unsafe = unsafe_models(recipe)
        assert drawn[recipe.name] == ["no" if model in unsafe else "yes" for model in shown], recipe.name
        assert not unsafe - set(shown), "eager, or a lane per message, is always safe"
