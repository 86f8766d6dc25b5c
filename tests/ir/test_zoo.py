"""Four schedules that users of PyTorch write by hand, kept as grids."""

from pathlib import Path

import pytest

import penstock as ps

ZOO = Path(__file__).parent.parent / "fixtures" / "zoo"


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "microbatches", "placement", "compute_only"),
    [
        ("v_shaped", 2, 4, 1, [[0, 3], [1, 2]], True),
        ("unbalanced", 2, 5, 1, [[0, 1, 4], [2, 3]], True),
        ("with_w", 2, 4, 2, [[0, 2], [1, 3]], True),
        ("reordered_b", 2, 2, 2, [[0], [1]], False),
    ],
)
def test_the_zoo(name, ranks, stages, microbatches, placement, compute_only):
    schedule = ps.read(ZOO / f"{name}.txt")
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (ranks, stages, microbatches)
    assert schedule.placement == ps.Placement.from_rows(placement)
    assert schedule.compute_only is compute_only
    drawn = [line.replace(":", "").split() for line in (ZOO / f"{name}.txt").read_text().splitlines()[1:]]
    assert [line.split() for line in schedule.grid(aligned=False).splitlines()[1:]] == drawn


@pytest.mark.parametrize("name", ["v_shaped", "unbalanced", "with_w"])
def test_their_idle_steps_are_where_alignment_puts_them(name):
    schedule = ps.read(ZOO / f"{name}.txt")
    written = [line.rstrip(" .") for line in schedule.grid(aligned=False).splitlines()[1:]]
    assert schedule.grid(aligned=True).splitlines()[1:] == written
