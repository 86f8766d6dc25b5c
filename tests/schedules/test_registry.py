import re
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.schedules import registry
from penstock.schedules.registry import RECIPES


@pytest.mark.parametrize(
    "spelling",
    ["1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
)
def test_the_spellings_of_torch_in_any_case(spelling):
    for name in (spelling, spelling.lower(), spelling.upper()):
        assert registry.recipe(name).name == spelling


@pytest.mark.parametrize(
    ("name", "known"), [("ScheduleGPipe", "GPipe"), ("Schedule1F1B", "1F1B"), ("ZB-V", "ZBVZeroBubble")]
)
def test_the_names_of_classes_and_papers(name, known):
    assert registry.recipe(name).name == known


@pytest.mark.parametrize("name", ["ZB-H1", "zbh1", "zb_h1", "ZB H1"])
def test_punctuation_does_not_matter(name):
    assert ps.build(name, ranks=2, microbatches=2).metadata["name"] == "ZB-H1"


@pytest.mark.parametrize(
    ("name", "near"), [("1F2B", "1F1B"), ("GPip", "GPipe"), ("zbvzerobuble", "ZBVZeroBubble"), ("VHalv", "V-Half")]
)
def test_an_unknown_name_lists_near_ones(name, near):
    with pytest.raises(ps.UnknownScheduleError) as caught:
        ps.build(name, ranks=2, microbatches=2)
    assert caught.value.name == name
    assert caught.value.near[0] == near
    assert str(caught.value).startswith(f"unknown schedule {name!r}; did you mean {near}")


def test_a_name_like_none_lists_all():
    with pytest.raises(ps.UnknownScheduleError, match="the known schedules are ForwardOnly, GPipe, 1F1B"):
        ps.build("?", ranks=2, microbatches=2)


@pytest.mark.parametrize(
    ("sizes", "field", "message"),
    [
        ({"ranks": 0, "microbatches": 1}, "ranks", "ranks must be at least 1, got 0"),
        ({"ranks": 2, "microbatches": -3}, "microbatches", "microbatches must be at least 1, got -3"),
        ({"ranks": 2, "microbatches": 1.5}, "microbatches", "microbatches must be an integer, got 1.5"),
        ({"ranks": "2", "microbatches": 1}, "ranks", "ranks must be an integer, got '2'"),
        ({"ranks": 2, "microbatches": 10**9}, "microbatches", "reduce microbatches=1000000000"),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_sizes_that_cannot_be(recipe, sizes, field, message):
    with pytest.raises(ps.SizeError, match=message) as caught:
        ps.build(recipe.name, **sizes)
    assert caught.value.field == field


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_stages_per_rank(recipe):
    same = ps.build(recipe.name, ranks=2, microbatches=2)
    assert same == ps.build(recipe.name, ranks=2, microbatches=2, stages_per_rank=recipe.stages_per_rank)
    assert same.stages == 2 * recipe.stages_per_rank
    if recipe.any_stages:
        assert ps.build(recipe.name, ranks=2, microbatches=2, stages_per_rank=5).stages == 10
        wrong, message = 0, "stages_per_rank must be at least 1, got 0"
    else:
        wrong, message = 3, rf"{recipe.name} has {recipe.stages_per_rank} stages? per rank, not 3; omit"
    with pytest.raises(ps.SizeError, match=message):
        ps.build(recipe.name, ranks=2, microbatches=2, stages_per_rank=wrong)


def test_every_generator_is_in_the_registry_and_draws_its_picture():
    folder = Path(registry.__file__).parent
    drawn = {path.stem for path in folder.glob("*.py") if re.search(r">>> print\(.*\.grid\(", path.read_text())}
    assert drawn == {recipe.generate.__name__ for recipe in RECIPES}
    assert all(recipe.generate.__module__ == f"penstock.schedules.{recipe.generate.__name__}" for recipe in RECIPES)
    assert all(recipe.summary.endswith(".") for recipe in RECIPES)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint32, np.uint64, np.int64])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_sizes_of_any_integer_type(recipe, kind):
    plain = ps.build(recipe.name, ranks=5, microbatches=40)
    assert ps.build(recipe.name, ranks=kind(5), microbatches=kind(40)) == plain
    assert type(plain.microbatches) is int


@pytest.mark.parametrize("wrong", [2.0, True, np.array([2, 2]), "2"])
def test_stages_per_rank_of_a_wrong_type(wrong):
    with pytest.raises(ps.SizeError, match="stages_per_rank must be an integer"):
        ps.build("ZBVZeroBubble", ranks=2, microbatches=2, stages_per_rank=wrong)


def test_a_name_that_is_no_text():
    with pytest.raises(ps.UnknownScheduleError):
        ps.build(None, ranks=2, microbatches=2)
