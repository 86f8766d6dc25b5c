"""Traces take the times of every step; on threads and processes, with switches, custom functions and recordings."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import RunError, StageError
from penstock.ir.actions import ComputationType
from penstock.runtime import Pipeline, run_in_threads
from penstock.runtime.trace import VARIABLE
from penstock.simulation.timeline_json import json_from_timeline, timeline_from_json
from penstock.simulation.traces import read_traces, timeline_of, unfinished_timeline
from runtime.test_measured_timelines import BACKWARD, FORWARD, check_possible
from runtime.test_recording import Sleeper


def traced(schedule, transport=None, *, group=None, **options):
    """Make a pipeline of sleeping stages on this rank, and a function that runs a step of it."""
    rank = transport.rank if transport is not None else torch.distributed.get_rank(group) if group is not None else 0
    stages = {stage: Sleeper(time.sleep, FORWARD, BACKWARD) for stage in schedule.placement.stages_of(rank)}
    options = {"trace": True, "loss_fn": torch.nn.functional.mse_loss, **options}
    pipe = Pipeline(stages, schedule, transport=transport, group=group, **options)
    batch = torch.ones(schedule.microbatches, 4)
    return pipe, lambda: pipe.step(*([batch] if pipe.has_first else []), target=batch)


def check_sleeps(timeline):
    """Check that the picture is one of stages that sleep: a sleep is never too short."""
    check_possible(timeline)
    for span in timeline.spans:
        least = sum({"F": FORWARD, "B": BACKWARD}.get(part.computation_type.value, 0) for part in span.action.parts)
        assert span.end - span.start >= least, span
    assert min(timeline.costs.per_stage("forward", timeline.schedule.stages)) >= FORWARD


@pytest.mark.parametrize(("name", "each"), [("1F1B", 1), ("DualPipeV", 2), ("InterleavedZeroBubble", 2)])
def test_a_trace_of_threads(name, each):
    schedule = ps.build(name, ranks=2, microbatches=4, stages_per_rank=each)

    def worker(transport):
        pipe, step = traced(schedule, transport)
        with pipe:
            for _ in range(3):
                step()
            return json_from_timeline(pipe.trace.timeline())

    first, second = run_in_threads(worker, 2)
    assert first == second
    check_sleeps(timeline_from_json(first))


def trace_in_processes(rank, ranks, *, group=None):
    """Trace two schedules, with a recording between the two, on this rank; returns the timelines as text."""
    schedule = ps.build("1F1B", ranks=ranks, microbatches=ranks)
    pipe, step = traced(schedule, group=group)
    with pipe:
        for _ in range(2):
            step()
        before = json_from_timeline(pipe.trace.timeline())
        with pipe.recording() as record:
            step()
        pipe.use(ps.build("GPipe", ranks=ranks, microbatches=ranks))
        step()
        return before, len(record.steps), json_from_timeline(pipe.trace.timeline())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_trace_of_processes(workers, ranks):
    results = workers.run(trace_in_processes, ranks=ranks)
    assert all(result == results[0] for result in results)
    before, recorded, after = results[0]
    assert recorded == 1
    for text, name in ((before, "1F1B"), (after, "GPipe")):
        timeline = timeline_from_json(text)
        assert timeline.schedule.metadata["name"] == name
        check_sleeps(timeline)


def test_files_hold_what_was_traced(tmp_path, monkeypatch):
    """Also the step that a rank did not finish; and a pipeline can be left out."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    schedule = ps.build("1F1B", ranks=2, microbatches=4)

    def worker(transport):
        pipe, step = traced(schedule, transport, trace=None)
        with pipe:
            for _ in range(2):
                step()
            if transport.rank == 1:  # compiles its program again, and goes on in the same file
                pipe.register_custom_function(ComputationType.FORWARD, lambda action, _: 1 / 0)
            with pytest.raises(ps.StepError, match="division by zero"):
                step()

    run_in_threads(worker, 2)
    (traces,) = read_traces(tmp_path)[:1]
    assert [sorted(trace.complete) for trace in traces] == [[1, 2], [1, 2]]
    check_sleeps(timeline_of(traces))
    check_every_end(traces)
    before = [*tmp_path.iterdir()]
    pipe, step = traced(ps.build("GPipe", ranks=1, microbatches=1), trace=False)
    step()
    assert pipe.trace is None
    assert [*tmp_path.iterdir()] == before


def check_every_end(traces):
    """Check that there is a picture wherever a step may have ended early, each action taking as long as before."""
    whole, last = timeline_of(traces), max(traces[0].complete)
    moments = sorted(time.end for trace in traces for time in trace.times(last))
    first = min(time.end for trace in traces for time in trace.times(last) if time.action.is_compute)
    for moment in moments:
        cut = []
        for trace in traces:
            times = np.where((trace.steps[last][:, 2] <= moment)[:, None], trace.steps[last], 0.0)
            cut.append(replace(trace, steps={**trace.steps, last + 1: times}))
        found = unfinished_timeline(cut)
        assert (found is None) == (moment < first)
        if found is not None:
            assert found[0].makespan <= moment - first + whole.makespan
            assert found[0].waits is not None


def test_a_step_that_was_not_finished(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    failing = [False]

    def loss_fn(output, target):
        if failing[0]:
            raise ValueError("no loss")
        return torch.nn.functional.mse_loss(output, target)

    pipe, step = traced(ps.build("GPipe", ranks=1, microbatches=2), trace=None, loss_fn=loss_fn)
    step()
    failing[0] = True
    with pytest.raises(ps.StepError):
        step()
    (traces,) = read_traces(tmp_path)
    assert unfinished_timeline(traces) is None  # nothing of it ran
    failing[0] = False
    pipe, step = traced(ps.build("GPipe", ranks=1, microbatches=2), trace=None)
    pipe.register_custom_function(ComputationType.FULL_BACKWARD, lambda action, context: context.run(action) or 1 / 0)
    with pytest.raises(ps.StepError, match="division by zero"):
        step()
    timeline, title = unfinished_timeline(read_traces(tmp_path)[-1])
    assert title == "step 1, not finished: 2 of 4 actions ran"
    assert [str(span.action) for span in timeline.spans if span.end - span.start >= FORWARD] == ["0F0", "0F1"]
    with pytest.raises(RunError, match="no step was traced to its end on all ranks"):
        timeline_of(read_traces(tmp_path)[-1])


def test_the_oldest_steps_make_room():
    pipe, step = traced(ps.build("GPipe", ranks=1, microbatches=1))
    with pytest.raises(RunError, match=r"no step was traced; call pipe.step\(\)"):
        pipe.trace.timeline()
    for stage in pipe.stages.values():
        stage.module.times = (lambda _: None), 0, 0
    for _ in range(70):
        step()
    (buffer,) = pipe.trace._buffers.values()
    numbers = sorted(int(buffer._times[slot * buffer._stride]) for slot in range(buffer._slots))
    assert numbers == [*range(7, 71)]
    pipe.trace.timeline()


def test_all_ranks_trace_or_none():
    schedule = ps.build("GPipe", ranks=2, microbatches=1)

    def worker(transport):
        with pytest.raises(StageError, match="trace"):
            traced(schedule, transport, trace=transport.rank == 0)

    run_in_threads(worker, 2)
