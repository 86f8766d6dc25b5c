import json

import numpy as np
import pytest

import penstock as ps
from penstock.errors import FormatError, ReadError
from penstock.simulation.timeline_json import (
    is_timeline,
    json_from_timeline,
    read_timeline,
    timeline_from_json,
    write_timeline,
)

COSTS = ps.Costs(forward=[1, 2, 3, 4], backward_input=1.5, latency=0.1, dispatch=0.01, optimizer=0.5)


def predicted(**options):
    schedule = ps.build("Interleaved1F1B", ranks=2, microbatches=4, stages_per_rank=2)
    return ps.simulate(options.pop("change", lambda same: same)(schedule), COSTS, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"change": ps.lower},
        {"steps": 3},
        {"steps": 2, "synchronise": False},
        {"model": ps.CommModel("rendezvous", "pair")},
        {"model": ps.CommModel("bounded(2)", "rank")},
    ],
)
def test_what_is_written_reads_back_equal(tmp_path, options):
    timeline, path = predicted(**options), tmp_path / "predicted.json"
    write_timeline(timeline, path)
    assert is_timeline(path)
    again = read_timeline(path)
    assert again.schedule == timeline.schedule
    assert again.costs == timeline.costs
    assert again.spans == timeline.spans
    assert again.waits == timeline.waits
    assert again.critical_path == timeline.critical_path
    assert (again.makespan, again.span, again.step_time) == (timeline.makespan, timeline.span, timeline.step_time)
    assert np.array_equal(again.critical, timeline.critical)
    assert again.measured is None
    assert json_from_timeline(again) == json_from_timeline(timeline)


def test_a_schedule_is_no_timeline(tmp_path):
    path = tmp_path / "schedule.json"
    ps.build("GPipe", ranks=2, microbatches=2).write(path)
    assert not is_timeline(path)
    assert not is_timeline(tmp_path / "missing.json")
    with pytest.raises(ReadError, match=r'schedule.json: is JSON, but not a timeline: "format": "penstock.timeline"'):
        read_timeline(path)
    ps.simulate(ps.build("GPipe", ranks=2, microbatches=2)).write(tmp_path / "trace.json")
    with pytest.raises(ReadError, match=r"trace.json: is a trace for Perfetto, .* with --timeline FILE"):
        read_timeline(tmp_path / "trace.json")
    with pytest.raises(ReadError, match=r"missing.json: cannot be read: No such file"):
        read_timeline(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.update(version=2), "has format version 2; this penstock reads up to version 1"),
        (lambda file: file.update(version="1"), '"version" is "1"; it must be a positive integer'),
        (lambda file: file.pop("schedule"), '"schedule" is missing; it must be an object'),
        (
            lambda file: file.update(model={"lanes": "rank"}),
            '"model" is .*; it must be an object with buffering, lanes',
        ),
        (lambda file: file.update(measured=3), '"measured" is 3; it must be null or have a "clock_error"'),
        (lambda file: file["ranks"].pop(), '"ranks" has 1 entries, but the schedule has 2 ranks'),
        (lambda file: file["ranks"].reverse(), 'entry 0 of "ranks" must be an object with "rank": 0'),
        (
            lambda file: file["ranks"][1]["start"].pop(),
            '"start" of rank 1 is 15 numbers; expected a list of 16 numbers',
        ),
        (lambda file: file["ranks"][1].pop("start"), '"start" of rank 1 is missing; expected a list of 16 numbers'),
        (lambda file: file["ranks"][0]["start"].__setitem__(3, "x"), '"start" of rank 0 contains "x"; expected finite'),
        (lambda file: file["ranks"][0]["start"].__setitem__(3, None), '"start" of rank 0 contains missing'),
        (lambda file: file["ranks"][0]["duration"].__setitem__(3, -1), '"duration" of rank 0 contains -1; expected'),
        (lambda file: file["costs"].update(forward=-1), "forward must be at least 0"),
        (lambda file: file.update(steps=0), "steps must be"),
    ],
)
def test_damage_is_described(change, message):
    document = json.loads(json_from_timeline(predicted()))
    change(document)
    with pytest.raises(ps.PenstockError, match=message):
        timeline_from_json(json.dumps(document))


def test_text_that_is_not_json():
    with pytest.raises(FormatError, match="is not JSON: Expecting value at column 1"):
        timeline_from_json("timeline")
    with pytest.raises(FormatError, match='duplicate key "version"'):
        timeline_from_json('{"version": 1, "version": 1}')
