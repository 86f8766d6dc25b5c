import pytest

import penstock as ps
from penstock.errors import ScheduleError
from penstock.simulation.difference import Difference


def timeline(schedule, **costs):
    return ps.simulate(schedule, ps.Costs(**costs))


def test_what_a_slow_stage_changes():
    schedule = ps.build("1F1B", ranks=2, microbatches=3)
    found = Difference(timeline(schedule), timeline(ps.lower(schedule), forward=[1, 3]))
    makespan, bubble, busy, idle = found.totals
    assert (makespan.predicted, makespan.measured) == (12, 18)
    assert makespan.difference == 0.5
    assert (bubble.name, busy.predicted, busy.measured) == ("bubble", 18, 24)
    assert idle.measured == 2 * 18 - 24
    assert [row.name for row in found.ranks[1]][:2] == ["busy", "idle"]
    assert found.ranks[0][0].difference == 0
    assert {str(row.action) for row in found.actions if row.longer} == {"1F0", "1F1", "1F2"}
    assert found.actions[0].longer == 2
    assert next(row for row in found.actions if str(row.action) == "1F0").late == 2
    assert {row.name: row.difference for row in found.ranks[1]}["drained"] == 0


def test_nothing_differs_from_itself():
    one = timeline(ps.build("ZBVZeroBubble", ranks=2, microbatches=4))
    found = Difference(one, one)
    assert all(row.difference in (0, None) for row in (*found.totals, *(row for rows in found.ranks for row in rows)))
    assert all(row.longer == row.late == 0 for row in found.actions)
    assert len(found.actions) == 48  # F, I and W of 4 microbatches on 4 stages


def test_other_ranks_are_refused():
    one, other = (timeline(ps.build("GPipe", ranks=ranks, microbatches=2)) for ranks in (2, 3))
    with pytest.raises(ScheduleError, match="timelines of 2 and 3 ranks cannot be compared rank by rank"):
        Difference(one, other)
