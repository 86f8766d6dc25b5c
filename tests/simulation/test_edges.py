"""What edges beyond the chain cost: time, bytes, and memory of values that wait."""

import json

import pytest

import penstock as ps
from penstock.ir.edges import Edge, chain


def u_net(stages):
    """Each stage of the first half passes its output also to its mirror image."""
    return [*chain(stages), *(Edge(stage, (stages - 1 - stage,), "skip") for stage in range(stages // 2 - 1))]


def costs_of(schedule, plain, skip, **others):
    sizes = [skip if edge.value == "skip" else plain for edge in schedule.edges]
    return ps.Costs(activation_bytes=sizes, bandwidth=100, **others)


def test_the_skips_of_a_u_net_stay_on_the_ranks_of_a_v():
    schedule = ps.build("ZBVZeroBubble", ranks=4, microbatches=8)
    wired = schedule.with_edges(u_net(8))
    skips = ps.simulate(ps.lower(wired), costs_of(wired, 10, 40))
    alone = ps.simulate(ps.lower(schedule), ps.Costs(activation_bytes=10, bandwidth=100))
    assert skips.bytes_sent == alone.bytes_sent
    assert skips.total_bytes_sent == sum(alone.bytes_sent) == 8 * 2 * 6 * 10  # the V turns within a rank
    # A chain carries the skip from 0 to 7 over all edges, that from 1 to 6 over all but the outermost, and so on.
    carried = [10 + 40 * (1 + min(edge, 6 - edge, 2)) for edge in range(7)]
    through = ps.simulate(ps.lower(schedule), ps.Costs(activation_bytes=carried, bandwidth=100))
    assert through.total_bytes_sent == 9 * skips.total_bytes_sent


def test_bytes_are_those_of_what_is_sent():
    schedule = ps.build("1F1B", ranks=4, microbatches=3)
    wired = schedule.with_edges([*chain(4), Edge(0, (2, 3), "skip"), Edge(1, (2,), "skip", gradient=False)])
    for each in (wired, ps.lower(wired)):
        timeline = ps.simulate(each, costs_of(wired, 10, 40, gradient_bytes=7))
        # Forward: 0>1, 1>2 with a value more, 2>3, 0>2, 0>3; back, not that value.
        assert timeline.bytes_sent == (3 * (10 + 40 + 40), 3 * (10 + 40 + 7), 3 * (10 + 7 + 7), 3 * (7 + 7))
        assert timeline.hops == 10
    assert ps.simulate(wired, costs_of(wired, 10, 40), steps=2).total_bytes_sent == 2 * 3 * (
        2 * (10 + 10 + 10 + 40 + 40) + 40
    )


def test_a_link_takes_the_largest_latency_and_all_bytes_of_its_edges():
    schedule = ps.Schedule([["0F0"], ["1F0"], ["2F0"]], edges=[Edge(0, (1,)), Edge(0, (1, 2)), Edge(1, (2,))])
    costs = ps.Costs(latency=[1, 2, 3], bandwidth=[10, 20, 10], activation_bytes=[10, 40, 20])
    timeline = ps.simulate(schedule, costs)
    assert [(str(each.action), each.start, each.end) for each in timeline.transfers] == [
        ("0SEND_F0", 1, 1 + 2 + 1 + 2),
        ("1SEND_F0", 7, 7 + 3 + 2),
        ("0SEND_F0@2", 1, 1 + 2 + 2),
    ]
    assert timeline.makespan == 13
    assert ps.simulate(ps.lower(schedule, unshard=False, reduce=False), costs).makespan == 13


def test_a_stage_waits_for_the_slowest_of_its_links():
    schedule = ps.Schedule([["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]], edges=[(0, [1]), (0, [2]), (1, [2])])
    timeline = ps.simulate(schedule, ps.Costs(latency=[0, 5, 0]))
    (wait,) = (wait for wait in timeline.waits if wait.rank == 2 and wait.cause == "transfer")
    assert str(wait) == "rank 2 is idle from 1 to 6: 2F0 waits for the output of 0F0 on rank 0, which is in flight"
    assert timeline.makespan == 16, "the gradient takes as long back"


@pytest.mark.parametrize("lowered", [False, True])
def test_values_that_wait_take_memory(lowered):
    """The skip arrives on rank 2 at 1 and is used at 2."""
    schedule = ps.Schedule([["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]], edges=[(0, [1]), (0, [2]), (1, [2])])
    schedule = ps.lower(schedule, unshard=False, reduce=False) if lowered else schedule
    timeline = ps.simulate(schedule, ps.Costs(edge_memory=[7, 5, 7], activation=1))
    curve = timeline.memory[2]
    held = [(time, value) for time, value in zip(curve.times.tolist(), curve.values.tolist(), strict=True)]
    assert held == [(0, 0), (1, 5), (2, 1), (3, 1), (3, 1), (5, 0)]
    assert timeline.peak_memory == (1, 1, 5)


def test_values_wait_between_stages_of_a_rank_too():
    schedule = ps.Schedule([["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]], edges=[(0, [1, 2]), (1, [2])])
    timeline = ps.simulate(schedule, ps.Costs(edge_memory=[5, 5], activation=1))
    assert timeline.peak_memory == (1 + 1 + 5,), "during 1F0"
    assert ps.simulate(schedule, ps.Costs(activation=1)).peak_memory == (3,)


def test_costs_for_another_number_of_edges():
    schedule = ps.build("1F1B", ranks=3, microbatches=2).with_edges([*chain(3), Edge(0, (2,))])
    for field in ("latency", "edge_memory"):
        with pytest.raises(ps.CostsError, match=f"{field} has 2 numbers, but there are 3 edges; pass one for each"):
            ps.simulate(schedule, ps.Costs(**{field: [1, 1]}))
        with pytest.raises(ps.CostsError, match=f"{field} has 2 numbers, but there are 3 edges"):
            ps.simulate_many(schedule, [ps.Costs(), ps.Costs(**{field: [1, 1]})])


def test_many_simulations_are_those_of_one():
    schedule = ps.lower(ps.build("Interleaved1F1B", ranks=2, microbatches=4).with_edges(u_net(4)))
    several = [ps.Costs(latency=latency) for latency in ([0, 1, 2, 3], 0.5, [3, 0, 0, 0])]
    expected = [ps.simulate(schedule, each).makespan for each in several]
    assert ps.simulate_many(schedule, several).makespan.tolist() == expected


def test_a_trace_names_the_other_stage(tmp_path):
    schedule = ps.build("1F1B", ranks=3, microbatches=1).with_edges([*chain(3), Edge(0, (2,))])
    ps.simulate(schedule, ps.Costs(latency=1)).write(tmp_path / "it.json")
    events = json.loads((tmp_path / "it.json").read_text())["traceEvents"]
    transfers = {event["name"]: event["args"] for event in events if event.get("cat") in ("send", "receive")}
    assert {name for name in transfers if "@" in name} == {"0SEND_F0@2", "2RECV_F0@0", "2SEND_B0@0", "0RECV_B0@2"}
    assert transfers["2SEND_B0@0"] == {
        "stage": 2, "type": "SEND_B", "microbatch": 0, "peer stage": 0, "step": 0, "from": 2, "to": 0
    }  # fmt: skip
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(arrows) == 6, "three links, forward and back"
