"""A trace: its structure, that what is on one thread nests, arrows, counters."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from penstock import CommModel, Costs, Schedule, WriteError, build, lower, simulate
from penstock.view.trace import write_trace
from penstock.view.trace_threads import assign_lanes

SLOW = Costs(forward=1, latency=2.5, unshard=0.3, reduce=0.2)


def written(timeline, path, **options):
    write_trace(timeline, path / "trace.json", **options)
    return json.loads((path / "trace.json").read_text())["traceEvents"]


def of(events, *phases):
    return [event for event in events if event["ph"] in phases]


def thread_names(events):
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}


TIMELINES = {
    "compute only": simulate(build("1F1B", ranks=3, microbatches=4)),
    "implied and slow": simulate(build("ZBVZeroBubble", ranks=3, microbatches=6), SLOW),
    "lowered": simulate(lower(build("Interleaved1F1B", ranks=2, microbatches=4)), SLOW),
    "rendezvous": simulate(lower(build("1F1B", ranks=3, microbatches=4)), SLOW, model=CommModel(lanes="direction")),
    "overlaps": simulate(build("DualPipeV", ranks=2, microbatches=4), Costs(latency=1 / 3)),
    "two steps": simulate(build("1F1B", ranks=2, microbatches=2), Costs(latency=0.1, optimizer=1), steps=2),
    "thirds": simulate(build("1F1B", ranks=3, microbatches=5), Costs(forward=1 / 3, backward=1 / 7, latency=0.01)),
}


@pytest.fixture(params=TIMELINES)
def timeline(request):
    return TIMELINES[request.param]


def test_a_process_per_rank(timeline, tmp_path):
    events = written(timeline, tmp_path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}

    assert names == {rank: f"rank {rank}" for rank in range(timeline.step_graph.ranks)}
    assert order == {rank: rank for rank in range(timeline.step_graph.ranks)}


def test_every_event_is_on_a_named_thread(timeline, tmp_path):
    events = written(timeline, tmp_path)
    threads = thread_names(events)

    assert all((event["pid"], event["tid"]) in threads for event in of(events, "X", "s", "t", "f"))
    assert len({tid for _, tid in threads}) == len(threads)
    assert not {tid for _, tid in threads} & set(range(timeline.step_graph.ranks))


def test_what_is_on_one_thread_does_not_overlap(timeline, tmp_path):
    on_thread = defaultdict(list)
    for event in of(written(timeline, tmp_path), "X"):
        start = round(1000 * event["ts"])
        on_thread[event["pid"], event["tid"]].append((start, start + round(1000 * event["dur"])))

    for bars in on_thread.values():
        bars.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(bars))


def test_actions_have_their_times(timeline, tmp_path):
    events = written(timeline, tmp_path)
    threads = thread_names(events)
    drawn = Counter(
        (event["pid"], event["name"], event["ts"], event["args"]["step"])
        for event in of(events, "X")
        if threads[event["pid"], event["tid"]] == ("compute" if event["dur"] else "instants")
    )
    spans = [timeline.spans[cell] for cell in timeline.step_graph.blocking]

    assert drawn == Counter((s.rank, str(s.action), round(1e6 * s.start) / 1000, s.step) for s in spans)


def test_idle_has_its_causes(timeline, tmp_path):
    events = written(timeline, tmp_path)
    threads = thread_names(events)
    drawn = [event for event in of(events, "X") if threads[event["pid"], event["tid"]] == "idle"]

    assert [(event["pid"], event["name"]) for event in drawn] == [(wait.rank, wait.cause) for wait in timeline.waits]
    assert sum(event["dur"] for event in drawn) == pytest.approx(1000 * sum(timeline.idle), abs=0.1)


def test_each_transfer_is_sent_received_and_has_an_arrow(timeline, tmp_path):
    events = written(timeline, tmp_path)
    sent = [event for event in of(events, "X") if event["cat"] == "send"]
    received = [event for event in of(events, "X") if event["cat"] == "receive"]
    starts, ends = of(events, "s"), of(events, "f")

    assert len(sent) == len(received) == len(timeline.transfers) > 0
    assert [event["pid"] for event in received] == [transfer.target for transfer in timeline.transfers]
    assert {event["args"]["type"] for event in sent} == {"SEND_F", "SEND_B"}
    assert {event["args"]["type"] for event in received} == {"RECV_F", "RECV_B"}
    assert [event["id"] for event in starts] == [event["id"] for event in ends] == list(range(1, len(sent) + 1))
    assert {event["id"] for event in of(events, "t")} <= set(range(1, len(sent) + 1))
    assert all(event["bp"] == "e" for event in ends)
    assert all(start["ts"] <= end["ts"] for start, end in zip(starts, ends, strict=True))


def test_arrows_begin_and_end_in_something(timeline, tmp_path):
    events = written(timeline, tmp_path)
    on_thread = defaultdict(list)
    for event in of(events, "X"):
        on_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))

    for event in of(events, "s", "t", "f"):
        around = [1 for start, end in on_thread[event["pid"], event["tid"]] if start <= event["ts"] < end]
        assert len(around) == 1


def test_counters_are_the_memory(timeline, tmp_path):
    counters = of(written(timeline, tmp_path), "C")

    for rank, curve in enumerate(timeline.memory):
        mine = [event for event in counters if event["pid"] == rank]
        assert [event["args"]["held"] for event in mine] == curve.values.tolist()
        assert [event["ts"] for event in mine] == pytest.approx((1000 * curve.times).tolist(), abs=0.001)


def test_transfers_at_the_same_time_have_lanes_of_their_own(tmp_path):
    timeline = simulate(build("GPipe", ranks=2, microbatches=3), Costs(forward=1, latency=2.5))
    names = set(thread_names(written(timeline, tmp_path)).values())

    assert {"compute", "idle", "send (to rank 1)", "send (to rank 1, lane 2)", "receive (from rank 0, lane 3)"} <= names


def test_parallel_lanes():
    assert assign_lanes([]) == []
    assert assign_lanes([(0, 2), (2, 3), (1, 2)]) == [0, 0, 1]
    assert assign_lanes([(0, 2), (2, 3), (2, 2), (2, 2)]) == [0, 2, 0, 1]


def test_it_says_what_was_waited_for(tmp_path):
    events = written(simulate(build("1F1B", ranks=2, microbatches=3)), tmp_path)
    (first,) = [event for event in events if event["name"] == "1F0"]

    assert first["args"] == {
        "stage": 1,
        "type": "F",
        "microbatch": 0,
        "step": 0,
        "waited for": "1F0 waits for the activation of 0F0 on rank 0 (1)",
    }


def test_an_overlap_has_parts(tmp_path):
    events = written(TIMELINES["overlaps"], tmp_path)
    overlap = next(event for event in events if event.get("cat") == "OVERLAP_F_B")

    assert [part["type"] for part in overlap["args"]["parts"]] == ["F", "B"]


def test_the_unit(tmp_path):
    timeline = simulate(build("1F1B", ranks=2, microbatches=3))

    for unit, microseconds in ((1e-3, 12_000), (1, 12_000_000), (1e-6, 12)):
        drawn = of(written(timeline, tmp_path, unit=unit), "X")
        assert max(event["ts"] + event["dur"] for event in drawn) == microseconds


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (0, "must be a positive number"),
        (float("nan"), "must be a positive number"),
        (1e-12, "larger unit"),
        (1e9, "smaller unit"),
    ],
)
def test_a_wrong_unit(unit, message, tmp_path):
    with pytest.raises(WriteError, match=message):
        written(simulate(build("1F1B", ranks=2, microbatches=3)), tmp_path, unit=unit)
    assert list(tmp_path.iterdir()) == []


def test_nothing_takes_time(tmp_path):
    free = Costs(forward=0, backward_input=0, backward_weight=0)

    assert of(written(simulate(build("1F1B", ranks=2, microbatches=3), free), tmp_path), "X")


def test_a_hostile_name_stays_text(tmp_path):
    name = '"}],</script>\ud800\x00\n'
    timeline = simulate(Schedule([["0F0", "0B0"]], metadata={"name": name}))
    write_trace(timeline, tmp_path / "trace.json")

    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["schedule"] == timeline.schedule.summary


def test_all_or_nothing(tmp_path, monkeypatch):
    timeline = simulate(build("1F1B", ranks=2, microbatches=3))
    with pytest.raises(WriteError, match="No such file"):
        timeline.write(tmp_path / "missing" / "trace.json")
    with pytest.raises(WriteError, match="Is a directory"):
        write_trace(timeline, tmp_path)
    (tmp_path / "trace.json").write_text("old")

    def interrupted(_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.view.trace._json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        timeline.write(tmp_path / "trace.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("trace.json", "old")]


def test_the_suffix_chooses_it(tmp_path):
    simulate(build("1F1B", ranks=2, microbatches=3)).write(tmp_path / "a.JSON")

    assert "traceEvents" in json.loads((tmp_path / "a.JSON").read_text())
