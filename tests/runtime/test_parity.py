"""Losses, outputs and every gradient of a pipeline are those of the unsplit model."""

from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.runtime import run_in_threads
from penstock.schedules.registry import RECIPES
from runtime.models import KINDS, WIDTH, Case, compared, problems

NAMES = [recipe.name for recipe in RECIPES]
ZOO = sorted((Path(__file__).parent.parent / "fixtures" / "zoo").iterdir())
EXACT, COARSE = torch.float64, torch.float32


@pytest.fixture(autouse=True)
def _exact():
    """Threads share the default element type, so it is set around them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(EXACT)
    yield
    torch.set_default_dtype(COARSE)
    torch.set_num_threads(threads)


def in_threads(*cases: Case, model: ps.CommModel | None = None) -> list[str]:
    """What differs in any of the cases. Those of one number of ranks run in the same threads."""
    found = []
    for dtype in (EXACT, COARSE):
        torch.set_default_dtype(dtype)
        for ranks in range(1, 5):
            some = [case for case in cases if (case.schedule.ranks, case.dtype) == (ranks, dtype)]
            if some:
                differences = run_in_threads(
                    lambda transport, some=some: [one for case in some for one in problems(case, transport)],
                    ranks,
                    model=model,
                    timeout=120,
                )
                found += [one for rank in differences for one in rank]
    return found


def in_processes(workers, *cases: Case) -> list[str]:
    found = []
    for ranks in range(1, 5):
        some = [case for case in cases if case.schedule.ranks == ranks]
        if some:
            found += [
                one for rank in workers.run(compared, some, ranks=ranks, limit=60 + 4 * len(some)) for one in rank
            ]
    return found


# Schedules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_in_threads(name):
    """Over three steps of an optimizer, at many sizes."""
    cases = [
        Case(ps.build(name, ranks=ranks, microbatches=microbatches), steps=3)
        for ranks in (1, 2, 4)
        for microbatches in (1, 3, 4, 8)
    ]
    assert in_threads(*cases) == []


def test_every_schedule_in_processes(workers):
    cases = [
        Case(ps.build(name, ranks=ranks, microbatches=microbatches), "rich", steps=3)
        for name in NAMES
        for ranks, microbatches in ((1, 3), (2, 1), (2, 4), (4, 3), (4, 8))
    ]
    assert in_processes(workers, *cases) == []


def test_every_schedule_of_the_zoo(workers):
    cases = [Case(ps.read(path), kind, steps=3) for path in ZOO for kind in ("plain", "rich", "nested")]
    assert len(cases) == 12
    assert in_threads(*cases) == []
    assert in_processes(workers, *cases) == []


@pytest.mark.parametrize("name", NAMES)
def test_single_precision_in_threads(name):
    cases = [
        Case(ps.build(name, ranks=ranks, microbatches=4), kind, dtype=COARSE, steps=3)
        for ranks, kind in ((1, "plain"), (2, "rich"), (4, "two"))
    ]
    assert in_threads(*cases) == []


def test_single_precision_in_processes(workers):
    cases = [Case(ps.build(name, ranks=2, microbatches=3), "rich", dtype=COARSE, steps=3) for name in NAMES]
    assert in_processes(workers, *cases) == []


@pytest.mark.parametrize("name", [recipe.name for recipe in RECIPES if recipe.any_stages])
def test_several_stages_on_a_rank(name):
    cases = [
        Case(ps.build(name, ranks=ranks, microbatches=3, stages_per_rank=stages), steps=2)
        for ranks in (1, 2, 3)
        for stages in (1, 3, 4)
    ]
    assert in_threads(*cases) == []


PLACEMENTS = {
    "down and up, twice": (0, 1, 1, 0, 0, 1, 1, 0),
    "all on one": (1, 1, 1),
    "three, one, two": (0, 0, 0, 1, 2, 2),
    "here and there": (2, 0, 1, 0, 2, 2, 1),
}


def gpipe_on(placement: tuple[int, ...], microbatches: int, split: bool = False) -> ps.Schedule:
    """All forwards, then all backwards, wherever the stages are."""
    ranks, stages = max(placement) + 1, len(placement)
    rows: list[list[str]] = [[] for _ in range(ranks)]
    for microbatch in range(microbatches):
        for stage in range(stages):
            rows[placement[stage]].append(f"{stage}F{microbatch}")
    for microbatch in reversed(range(microbatches)):
        for stage in reversed(range(stages)):
            kinds = ("I", "W") if split else ("B",)
            rows[placement[stage]] += [f"{stage}{kind}{microbatch}" for kind in kinds]
    return ps.Schedule(rows, placement=ps.Placement(placement, ranks), microbatches=microbatches)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_any_placement(name):
    """Also one with a rank that has no stage."""
    cases = [
        Case(gpipe_on(PLACEMENTS[name], 3, split), kind, batches=2)
        for split in (False, True)
        for kind in ("plain", "two", "keywords")
    ]
    assert in_threads(*cases) == []


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_in_threads(kind):
    """Uneven microbatches, and gradients that add up over two batches."""
    cases = [
        Case(ps.build(name, ranks=ranks, microbatches=3), kind, batches=2, steps=2, options=(("shapes", shapes),))
        for name in ("1F1B", "ZBVZeroBubble", "DualPipeV")
        for ranks in (1, 2, 3)
        for shapes in ("inferred", "per_microbatch")
    ]
    assert in_threads(*cases) == []


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
def test_every_kind_of_model_in_processes(workers, shapes):
    cases = [
        Case(ps.build(name, ranks=ranks, microbatches=3), kind, batches=2, steps=2, options=(("shapes", shapes),))
        for kind in KINDS
        for name, ranks in (("1F1B", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 4))
    ]
    assert in_processes(workers, *cases) == []


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_every_schedule(workers, kind):
    cases = [
        Case(ps.build(name, ranks=ranks, microbatches=microbatches), kind, batches=2, steps=2)
        for name in NAMES
        for ranks in (1, 2, 3, 4)
        for microbatches in (2, 5)
    ]
    assert in_threads(*cases) == []
    assert in_processes(workers, *[case for case in cases if case.schedule.ranks in (2, 4)]) == []


@pytest.mark.parametrize(
    "model",
    [ps.CommModel(buffering, lanes) for buffering in ("rendezvous", "eager", "bounded(1)") for lanes in ps.LANES],
    ids=str,
)
def test_several_tensors_on_an_edge_under_every_model(model):
    """Under each, a message of several tensors is one message."""
    cases = [
        Case(ps.build(name, ranks=ranks, microbatches=4), kind, options=(("shapes", shapes),))
        for name, ranks in (("1F1B", 2), ("ZBVZeroBubble", 2), ("Interleaved1F1B", 3))
        for kind in ("two", "nested")
        for shapes in ("inferred", "per_microbatch")
    ]
    assert in_threads(*cases, model=model) == []


def test_given_shapes(workers):
    schedules = [ps.build(name, ranks=2, microbatches=4) for name in ("1F1B", "InterleavedZeroBubble")]
    cases = [
        Case(
            schedule,
            "plain",
            size=8,
            options=(("shapes", {stage: torch.empty(2, WIDTH, dtype=EXACT) for stage in range(schedule.stages - 1)}),),
        )
        for schedule in schedules
    ]
    assert in_threads(*cases) == []
    assert in_processes(workers, *cases) == []


# Ways to lower --------------------------------------------------------------------------------------------------------

LOWERINGS = {
    "plain": {},
    "merged": {"merge_backward": True},
    "bare": {"unshard": False, "reduce": False},
    "one stage at a time": {"max_active_stages": 1},
    "deferred": {"defer_receives": True},
    "deferred by one": {"defer_receives": True, "look_ahead": 1},
}
BY_TAG = ps.CommModel("rendezvous", "message")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ForwardOnly"])
def test_lowered_by_hand(name):
    cases = []
    for options in LOWERINGS.values():
        lowered = ps.lower(ps.build(name, ranks=2, microbatches=4), model=BY_TAG, **options)
        cases += [Case(lowered, "two", options=(("shapes", shapes),)) for shapes in ("inferred", "per_microbatch")]
    assert in_threads(*cases, model=BY_TAG) == []


def test_lowered_by_hand_in_processes(workers):
    cases = [
        Case(
            ps.lower(ps.build(name, ranks=2, microbatches=3), model=BY_TAG, **options),
            "two",
            options=(("shapes", shapes),),
        )
        for name in ("InterleavedZeroBubble", "DualPipeV")
        for options in LOWERINGS.values()
        for shapes in ("inferred", "per_microbatch")
    ]
    assert in_processes(workers, *cases) == []


def test_read_from_files(tmp_path, workers):
    cases = []
    for name in ("ZBVZeroBubble", "DualPipeV"):
        schedule = ps.build(name, ranks=2, microbatches=4)
        for number, one in enumerate((schedule, ps.lower(schedule))):
            for suffix in ("csv", "json"):
                path = tmp_path / f"{name}{number}.{suffix}"
                one.write(path)
                cases.append(Case(ps.read(path), "rich"))
    assert in_threads(*cases) == []
    assert in_processes(workers, *cases) == []


# Overlaps and functions of the user's own -----------------------------------------------------------------------------


@pytest.mark.parametrize("custom", [False, True])
def test_overlaps(workers, custom):
    """Parts in turn, or in another order by a function that runs them."""
    schedules = [ps.build("DualPipeV", ranks=ranks, microbatches=8) for ranks in (2, 4)]
    assert "OVERLAP_F_B" in schedules[0].grid()
    cases = [Case(schedule, "rich", batches=2, custom=custom) for schedule in schedules]
    assert in_threads(*cases) == []
    assert in_processes(workers, *cases) == []
