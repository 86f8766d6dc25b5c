"""Checks sweeps: sorted, no slower with more memory, with the front marked, and drawn."""

import pytest

import penstock as ps
from penstock.errors import PlanError, WriteError
from penstock.planning.sweep import MEMORY_LIMITS, sweep
from penstock.view.front import Dot, write_front

SIZES = {"ranks": 3, "microbatches": 7, "stages_per_rank": 1, "effort": 0.02}


@pytest.mark.parametrize("seed", range(3))
def test_more_memory_is_never_slower_and_the_front_is_marked(seed):
    points = list(sweep("memory", **SIZES, seed=seed))
    assert len(points) == MEMORY_LIMITS
    values = [point.plan.value for point in points]
    assert values == sorted(values, reverse=True)
    limits = [point.value for point in points]
    assert limits == sorted(limits)
    assert all(point.peak_memory <= point.value * (1 + 1e-9) for point in points)
    assert all(point.time_per_microbatch == point.plan.value / 7 for point in points)
    assert points[0].is_better
    for number, point in enumerate(points[1:], 1):
        assert point.is_better == (values[number] < min(values[:number]) * (1 - 1e-9))
    assert ps.plan(**SIZES, seed=seed).value >= values[-1] * (1 - 1e-9)


def test_the_first_limit_is_the_smallest_that_anything_fits():
    first = next(sweep("memory", **SIZES))
    assert first.value == 1
    with pytest.raises(PlanError):
        ps.plan(**SIZES, memory_limit=0.99)


def test_other_variables_are_planned_as_given():
    ranks = list(sweep("ranks", [4, 2], **{**SIZES, "microbatches": 6}))
    assert [(point.value, point.plan.schedule.ranks) for point in ranks] == [(2, 2), (4, 4)]
    microbatches = list(sweep("microbatches", **{**SIZES, "microbatches": 4}))
    assert [point.plan.schedule.microbatches for point in microbatches] == [1, 2, 4, 8, 16]
    times = [point.time_per_microbatch for point in microbatches]
    assert [point.is_better for point in microbatches] == [
        all(time < before for before in times[:number]) for number, time in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("variable", "arguments", "words"),
    [("time", SIZES, "cannot sweep 'time'"), ("ranks", {"microbatches": 4}, "around which number of ranks")],
)
def test_bad_arguments_are_named(variable, arguments, words):
    with pytest.raises(PlanError, match=words):
        next(sweep(variable, **arguments))


def test_a_front_is_drawn_with_its_names(tmp_path):
    dots = [Dot(1, 5.0, "1F1B"), Dot(2, 4.0, "ZB-H1"), Dot(3, 4.0, "ZB-H1")]
    write_front(tmp_path / "front.svg", "memory", dots)
    svg = (tmp_path / "front.svg").read_text()
    assert (svg.count(">1F1B<"), svg.count(">ZB-H1<")) == (1, 1)
    assert ">memory limit<" in svg
    write_front(tmp_path / "again.svg", "memory", dots)
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "front.svg").read_bytes()
    write_front(tmp_path / "front.png", "ranks", dots)
    assert (tmp_path / "front.png").read_bytes()[1:4] == b"PNG"
    with pytest.raises(WriteError, match=r"a \*\.png or \*\.svg file"):
        write_front(tmp_path / "front.pdf", "memory", dots)


def test_an_interruption_ends_a_sweep_with_the_best_so_far():
    def interrupt(progress):
        if progress.doing.startswith("searching"):
            raise KeyboardInterrupt

    points = list(sweep("memory", [2, 3, 4], ranks=4, microbatches=9, progress=interrupt))
    assert [point.value for point in points] == [2]
    assert points[0].plan.interrupted
