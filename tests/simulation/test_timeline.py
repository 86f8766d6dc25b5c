"""What a timeline says, on cases that can be worked out by hand."""

from itertools import pairwise

import pytest

import penstock as ps


def waits_of(timeline):
    return [f"{w.rank}: {w.start:g}-{w.end:g} {w.cause}" for w in timeline.waits]


def test_two_ranks_by_hand():
    """Rank 0: F at 0, B when rank 1 is done; a transfer takes 1 in both directions.

    ::

        time   0 1 2 3 4 5 6 7 8
        rank 0 F . . . . . B B
        rank 1 . . F B B . . .
    """
    schedule = ps.Schedule([["0F0", "0B0"], ["1F0", "1B0"]])
    timeline = ps.simulate(schedule, ps.Costs(latency=1))
    assert [(str(s.action), s.start, s.end) for s in timeline.spans] == [
        ("0F0", 0, 1), ("0B0", 6, 8), ("1F0", 2, 3), ("1B0", 3, 5),
    ]  # fmt: skip
    assert (timeline.makespan, timeline.span, timeline.ideal, timeline.bubble) == (8, 8, 3, 5)
    assert (timeline.busy, timeline.idle, timeline.communication) == ((3, 3), (5, 5), (2, 2))
    assert waits_of(timeline) == [
        "0: 1-5 gradient", "0: 5-6 transfer", "1: 0-1 activation", "1: 1-2 transfer", "1: 5-8 drained",
    ]  # fmt: skip
    assert timeline.idle_by_cause == {"gradient": 4, "drained": 3, "transfer": 2, "activation": 1}
    assert [str(span.action) for span in timeline.critical_path] == ["0F0", "1F0", "1B0", "0B0"]
    assert [(t.source, t.target, str(t.action), t.start, t.end) for t in timeline.transfers] == [
        (0, 1, "0SEND_F0", 1, 2), (1, 0, "1SEND_B0", 5, 6),
    ]  # fmt: skip
    assert str(timeline.waits[0]) == "rank 0 is idle from 1 to 5: 0B0 waits for the gradient of 1B0 on rank 1"


def test_program_order():
    """Rank 1 could run 1W0 while it waits for 1F1, but has it later."""
    schedule = ps.Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1I0", "1F1", "1W0", "1B1"]])
    timeline = ps.simulate(schedule, ps.Costs(forward=(3, 1)))
    wait = next(wait for wait in timeline.waits if wait.cause == "order" and wait.rank == 1)
    assert (wait.start, wait.end, str(wait.before), str(wait.could_run)) == (5, 6, "1F1", "1W0")
    assert "program order: 1W0 could run, but 1F1 is next" in str(wait)


def test_steps_and_dispatch_come_before_data():
    schedule = ps.Schedule([["0F0", "0B0"], ["1F0", "1B0"]])
    assert waits_of(ps.simulate(schedule, steps=2))[-3:-1] == ["1: 4-6 step", "1: 6-7 activation"]
    own = ps.simulate(schedule, ps.Costs(optimizer=(0, 1)), steps=2, synchronise=False)
    assert waits_of(own)[-3:-1] == ["1: 4-5 step", "1: 5-7 activation"]
    assert waits_of(ps.simulate(schedule, ps.Costs(dispatch=1)))[:2] == ["0: 1-2 dispatch", "0: 2-5 gradient"]


def test_made_but_not_sent():
    schedule = ps.Schedule([["0F0", "0F1", "0SEND_F0", "0SEND_F1"], ["1RECV_F0", "1RECV_F1", "1F0", "1F1"]])
    timeline = ps.simulate(schedule)
    assert waits_of(timeline)[-2:] == ["1: 0-1 activation", "1: 1-2 unsent"]
    assert timeline.waits[-1].why == "1F0 waits for the output of 0F0 on rank 0, which has not been sent yet"


def test_a_receive_that_is_posted_late_is_no_busy_lane():
    schedule = ps.Schedule([["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1F0", "1RECV_F1", "1F1"]])
    costs = ps.Costs(forward=(1, 5), dispatch=1, latency=3)
    timeline = ps.simulate(schedule, costs, model=ps.CommModel("rendezvous", "message"))
    assert "lane" not in timeline.idle_by_cause


@pytest.mark.parametrize("unshard", [0, 2**-20, 1])
def test_what_comes_before_the_first_compute_is_done_just_in_time(unshard):
    """So the span does not jump when UNSHARD begins to cost something."""
    schedule = ps.lower(ps.build("ZBVZeroBubble", ranks=4, microbatches=8))
    timeline = ps.simulate(schedule, ps.Costs(unshard=unshard))
    assert timeline.span == 48 + 2 * unshard
    assert timeline.makespan == 51 + 2 * unshard


def test_sharding_without_transfers_has_them_implied_too():
    model, costs = ps.CommModel("eager", "pair"), ps.Costs(latency=5)
    plain = ps.Schedule([["0F0", "0F1"], ["1F0", "1F1"]])
    sharded = ps.Schedule([["0UNSHARD", "0F0", "0F1"], ["1UNSHARD", "1F0", "1F1"]])
    assert ps.simulate(plain, costs, model=model).makespan == ps.simulate(sharded, costs, model=model).makespan == 12


def test_what_is_kept_cannot_be_changed():
    timeline = ps.simulate(ps.build("1F1B", ranks=2, microbatches=2))
    with pytest.raises(ValueError, match="read-only"):
        timeline.step_graph.source[:] = 0


def test_bubbles_are_never_negative():
    costs = ps.Costs(forward=0.3, backward_input=0.1, backward_weight=0.4, latency=0.1)
    timeline = ps.simulate(ps.build("ZB-H2", ranks=2, microbatches=8), costs)
    assert timeline.span_bubble_rate >= 0
    assert min(timeline.idle) >= 0


def test_a_busy_lane():
    """Both activations are made at once, nearly; the second stands in the lane behind the first."""
    schedule = ps.lower(ps.build("ForwardOnly", ranks=2, microbatches=2), unshard=False)
    costs = ps.Costs(latency=5)
    free = ps.simulate(schedule, costs)
    assert free.makespan == 8
    busy = ps.simulate(schedule, costs, model=ps.CommModel("eager", "pair"))
    assert busy.makespan == 12
    assert [(t.start, t.end) for t in busy.transfers] == [(1, 6), (6, 11)]
    implied = ps.simulate(ps.build("ForwardOnly", ranks=2, microbatches=2), costs, model=busy.step_graph.model)
    assert implied.makespan == 12


def test_a_receive_behind_a_send():
    """With one lane per rank, the slow send of rank 1 is ahead of its next receive."""
    schedule = ps.lower(ps.build("ForwardOnly", ranks=3, microbatches=2), unshard=False)
    timeline = ps.simulate(schedule, ps.Costs(latency=(0, 5)), model=ps.CommModel("eager", "rank"))
    assert [line for line in waits_of(timeline) if line.startswith("1")] == [
        "1: 0-1 activation",
        "1: 2-7 lane",
        "1: 8-14 drained",
    ]
    assert "1F1 waits for the output of 0F1 on rank 0, whose lane is busy" in " ".join(map(str, timeline.waits))


def test_memory_over_time():
    schedule = ps.Schedule([["0F0", "0F1", "0I0", "0W0", "0B1"]])
    costs = ps.Costs(activation=4, input_release=0.25, static=10)
    timeline = ps.simulate(schedule, costs)
    assert timeline.peak_memory == (18,)
    (curve,) = timeline.memory
    at = dict(zip(curve.times.tolist(), curve.values.tolist(), strict=True))  # of equal times the last
    assert at == {0: 14, 1: 18, 2: 18, 3: 17, 4: 14, 6: 10}


def test_without_a_backward_nothing_is_kept():
    assert ps.simulate(ps.build("ForwardOnly", ranks=2, microbatches=5)).peak_memory == (1, 1)


def test_steps_one_after_the_other():
    costs = ps.Costs(optimizer=2)
    schedule = ps.build("ZBVZeroBubble", ranks=4, microbatches=8)
    one = ps.simulate(schedule, costs)
    both = ps.simulate(schedule, costs, steps=3)
    rank_optimizer = 2 * 2
    assert one.step_time == both.step_time == one.makespan + rank_optimizer
    assert both.makespan == 3 * one.makespan + 2 * rank_optimizer
    apart = ps.simulate(schedule, costs, steps=3, synchronise=False)
    assert apart.step_time == one.span + rank_optimizer
    assert one.span < one.makespan
    assert {span.step for span in apart.spans} == {0, 1, 2}
    assert next(str(s.action) for s in apart.spans if s.rank == 0 and s.step == 2) == "0F0"
    assert any(wait.cause == "step" for wait in both.waits)


def test_an_expensive_last_stage():
    """Everything goes at its pace."""
    schedule = ps.build("1F1B", ranks=4, microbatches=20)
    timeline = ps.simulate(schedule, ps.Costs(forward=(1, 1, 1, 4), backward=(2, 2, 2, 8)))
    assert timeline.ideal == timeline.busy[3] == 20 * 12
    assert timeline.makespan == 3 * 1 + 20 * 12 + 3 * 2


def test_lowered_and_compute_only_take_the_same():
    costs = ps.Costs(forward=(1, 2, 1, 3, 1, 1, 2, 1), latency=0.25)
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        schedule = ps.build(name, ranks=4, microbatches=8)
        one, other = ps.simulate(schedule, costs), ps.simulate(ps.lower(schedule), costs)
        assert (one.makespan, one.span, one.peak_memory) == (other.makespan, other.span, other.peak_memory)
        assert one.idle_by_cause == pytest.approx(other.idle_by_cause)
        assert [(t.action, t.start, t.end) for t in sorted(one.transfers)] == [
            (t.action, t.start, t.end) for t in sorted(other.transfers)
        ]


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "V-Half", "DualPipeV"])
def test_rounding_is_no_reason_to_be_idle(name):
    costs = ps.Costs(forward=0.3, backward_input=0.7, backward_weight=0.1, latency=0.1)
    timeline = ps.simulate(ps.build(name, ranks=4, microbatches=12), costs)
    assert min(wait.end - wait.start for wait in timeline.waits) > 0.01
    assert sum(timeline.idle_by_cause.values()) == pytest.approx(sum(timeline.idle))


def test_idle_steps_take_no_time():
    drawn = ps.Schedule.from_text("rank 0: 0F0 . . 0B0\nrank 1: . 1F0 1B0 .")
    assert ps.simulate(drawn).makespan == 6


def test_the_critical_path_is_as_long_as_the_makespan():
    schedule = ps.lower(ps.build("Interleaved1F1B", ranks=4, microbatches=8))
    timeline = ps.simulate(schedule, ps.Costs(latency=0.5), model=ps.CommModel("rendezvous", "pair"))
    path = [span for span in timeline.critical_path if span.end > span.start or "RECV" not in str(span.action)]
    assert path[-1].end == timeline.makespan
    assert all(before.end <= after.start or before == after for before, after in pairwise(path))


def test_repr():
    assert repr(ps.simulate(ps.build("1F1B", ranks=2, microbatches=3))) == (
        "<Timeline: Schedule 1F1B: 2 ranks, 2 stages, 3 microbatches, 12 actions, makespan 12>"
    )


def test_pictures_in_a_notebook():
    schedule = ps.build("1F1B", ranks=2, microbatches=3)
    assert "<svg" in schedule._repr_html_()
    assert "makespan 12" in ps.simulate(schedule)._repr_html_()
