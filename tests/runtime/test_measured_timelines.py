"""The timeline of a recording is what happened: compared with logical time exactly, with sleeping stages by bounds."""

import time

import pytest
import torch

import penstock as ps
from penstock.errors import RunError
from penstock.runtime import Pipeline
from penstock.runtime.clocks import Alignment, ClockReading, read_clocks
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.simulation.step_graph import POST
from penstock.simulation.timeline_json import json_from_timeline, timeline_from_json
from runtime.logical_time import LogicalTime
from runtime.test_recording import CASES, HALVES, Sleeper

FORWARD, BACKWARD = 0.004, 0.008


def measure(schedule, stages, *, group=None, transport=None, steps=3):
    """Record steps of these stages."""
    with Pipeline(stages, schedule, loss_fn=torch.nn.functional.mse_loss, group=group, transport=transport) as pipe:
        batch = torch.ones(schedule.microbatches, 4)
        given = [batch] if pipe.has_first else []
        pipe.step(*given, target=batch)
        with pipe.recording() as record:
            for _ in range(steps):
                pipe.step(*given, target=batch)
    return record


@pytest.mark.parametrize(("name", "each"), CASES + HALVES)
def test_what_was_measured_is_what_is_predicted(monkeypatch, name, each):
    """Where only the stages take time, prediction and measurement are equal, idle causes included."""
    schedule = ps.build(name, ranks=2, microbatches=4, stages_per_rank=each)
    clocks = LogicalTime()
    takes = [1 + stage % 3 for stage in range(schedule.stages)]

    def worker(transport):
        mine = schedule.placement.stages_of(transport.rank)
        stages = {stage: Sleeper(clocks.take, takes[stage], 2 * takes[stage]) for stage in mine}
        return measure(schedule, stages, transport=transport)

    record, other = clocks.run(worker, 2, monkeypatch)
    measured, again = record.timeline(), other.timeline()
    predicted = ps.simulate(measured.schedule, record.costs())
    assert json_from_timeline(again) == json_from_timeline(measured)
    assert measured.makespan == pytest.approx(record.makespan) == pytest.approx(predicted.makespan)
    assert measured.busy == pytest.approx(record.busy)
    for mine, expected in zip(measured.spans, predicted.spans, strict=True):
        assert (mine.rank, mine.action) == (expected.rank, expected.action)
        if mine.action.is_compute:
            assert (mine.start, mine.end) == pytest.approx((expected.start, expected.end)), mine
    causes = {cause: pytest.approx(time) for cause, time in predicted.idle_by_cause.items()}
    assert measured.idle_by_cause == causes
    assert [wait.awaited for wait in measured.waits] == [wait.awaited for wait in predicted.waits]


def recorded_timeline(rank, ranks, names, *, group=None):
    """Record sleeping stages of several schedules on this rank; returns texts, since workers return plain values."""
    found = []
    for name, each in names:
        schedule = ps.build(name, ranks=ranks, microbatches=4, stages_per_rank=each)
        mine = schedule.placement.stages_of(rank)
        stages = {stage: Sleeper(time.sleep, FORWARD, BACKWARD) for stage in mine}
        record = measure(schedule, stages, group=group)
        found.append((json_from_timeline(record.timeline()), record.makespan))
    transport = DistributedTransport(group)
    reading = read_clocks(transport, time.perf_counter)
    transport.close()
    return found, (reading.ahead, reading.error)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_timeline_of_processes(workers, ranks):
    names = CASES if ranks == 2 else [("1F1B", 1)]
    results = workers.run(recorded_timeline, names, ranks=ranks)
    for found, (ahead, error) in results:
        assert found == results[0][0]  # every rank has the same timeline
        assert ahead == 0  # processes of one machine read one clock
        assert 0 <= error < 1
    for text, makespan in results[0][0]:
        timeline = timeline_from_json(text)
        check_possible(timeline)
        assert timeline.makespan <= makespan + timeline.measured.clock_error
        least = {"F": FORWARD, "B": BACKWARD}  # the first stage leaves all of B to W
        for span in timeline.spans:
            parts = [least.get(part.computation_type.value, 0) for part in span.action.parts]
            assert span.end - span.start >= sum(parts), span  # a sleep is never too short


def check_possible(timeline):
    """Check that actions follow the order of their rank and their inputs, and that busy and idle time are all time."""
    graph, error = timeline.step_graph, timeline.measured.clock_error
    order = [str(span.action) for span in timeline.spans]
    assert order == [str(action) for row in timeline.schedule.actions for action in row]
    # Receives may be posted ahead of their place.
    edges = [
        (source, target)
        for source, target, reason in zip(graph.source, graph.target, graph.reason, strict=True)
        if target < graph.cells and not (reason == POST and "RECV" in order[target])
    ]
    end = timeline.node_start + timeline.node_duration
    for source, target in edges:
        if graph.is_transfer[source] or graph.is_transfer[target]:
            # An overlap may begin before the second of its parts has its input.
            late = end[source] - (end if "OVERLAP" in order[target] else timeline.node_start)[target]
            assert late <= error + 1e-9, (order[source], order[target])
        else:
            assert end[source] <= timeline.node_start[target] + 1e-12, (order[source], order[target])
    for rank in range(graph.ranks):
        idle = sum(wait.end - wait.start for wait in timeline.waits if wait.rank == rank)
        assert idle == pytest.approx(timeline.idle[rank], abs=1e-6)
        assert timeline.busy[rank] + timeline.idle[rank] == pytest.approx(timeline.makespan)
    assert sum(timeline.idle_by_cause.values()) == pytest.approx(sum(timeline.idle), abs=1e-6)


def test_no_timeline_without_a_step():
    schedule = ps.build("GPipe", ranks=1, microbatches=1)
    with Pipeline({0: Sleeper()}, schedule, loss_fn=torch.nn.functional.mse_loss) as pipe, pipe.recording() as record:
        pass
    with pytest.raises(RunError, match=r"no step was recorded; .* read the timeline after it"):
        record.timeline()


def test_one_rank_and_the_views(tmp_path):
    schedule = ps.build("GPipe", ranks=1, microbatches=2)
    timeline = measure(schedule, {0: Sleeper(time.sleep, FORWARD, BACKWARD)}).timeline()
    check_possible(timeline)
    assert set(timeline.idle_by_cause) <= {"dispatch"}
    for suffix in ("html", "json", "svg"):
        timeline.write(tmp_path / f"timeline.{suffix}")
    assert "GPipe, measured" in (tmp_path / "timeline.html").read_text()
    assert '"seconds per unit of time": 1.0' in (tmp_path / "timeline.json").read_text()


def test_drift_is_interpolated():
    clocks = Alignment(ClockReading(10.0, 5.0, 1e-5), ClockReading(20.0, 5.5, 3e-5))
    assert [clocks.convert(time) for time in (0.0, 10.0, 15.0, 20.0, 30.0)] == [5.0, 15.0, 20.25, 25.5, 35.5]
    assert clocks.error == 3e-5
