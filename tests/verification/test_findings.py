"""Each kind of mistake, as the broken grid and the finding."""

from textwrap import dedent

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as upstream

import penstock as ps
from penstock.graph.action_table import ActionTable
from penstock.verification.findings import MOST_FINDINGS
from penstock.verification.memory import peaks

RIGHT = """
    rank 0: 0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD 0REDUCE_GRAD
    rank 1: 1UNSHARD 1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1I1 1SEND_B1 1W1 1RESHARD 1REDUCE_GRAD
"""


def found(text, **options):
    schedule = ps.Schedule.from_text(text, placement=ps.Placement.loop(2, 2), microbatches=2)
    return ps.check(schedule, **options)


def test_nothing_is_wrong_with_it():
    assert found(RIGHT) == []


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [
        ("0F1 ", "", "rank 0: 0F1 is missing; add it to rank 0"),
        ("1B0 ", "", "rank 1: 1B0 is missing; add it to rank 1"),
        ("1W1 ", "", "rank 1: 1W1 is missing; add it to rank 1"),
        ("1I1 ", "", "rank 1: 1I1 is missing; add it to rank 1"),
        ("0F1 ", "0F1 0F1 ", "rank 0, step 4: 0F1 appears twice; drop it"),
        ("0F1 ", "0F1 0F7 ", "rank 0, step 4: 0F7 refers to microbatch 7, but there are 2 microbatches (0 to 1)"),
        ("0F1 ", "0F1 2F1 ", "rank 0, step 4: 2F1 refers to stage 2, but there are 2 stages (0 to 1)"),
        ("0F1 ", "0F1 1F1 ", "rank 0, step 4: 1F1 is on the wrong rank: stage 1 is on rank 1; move it to rank 1"),
        ("1W1 ", "1W1 1B1 ", "rank 1, step 7: 1I1 is half of a backward that also appears as a full B"),
        ("1I1 1SEND_B1 1W1", "1W1 1I1 1SEND_B1", "rank 1, step 7: 1W1 needs 1I1, which comes later, at step 8"),
        ("1F0 1RECV_F1 1F1 1B0", "1B0 1RECV_F1 1F1 1F0", "rank 1, step 2: 1B0 needs 1F0, which comes later, at step 5"),
        ("1RECV_F1 1F1", "(1F1;1F1)OVERLAP_F_B 1RECV_F1", "1RECV_F1 comes after 1F1, which uses it"),
        ("1RECV_F0 ", "", "rank 0, step 2: 0SEND_F0 has no 1RECV_F0 on rank 1; add 1RECV_F0 before 1F0 on rank 1"),
        ("0SEND_F0 ", "", "rank 1, step 1: 1RECV_F0 has no 0SEND_F0 on rank 0; add 0SEND_F0 after 0F0 on rank 0"),
        ("0SEND_F0 ", "0SEND_F0 0SEND_F0 ", "rank 0, step 3: 0SEND_F0 appears twice"),
        (
            "0SEND_F0 ",
            "0SEND_F0 0RECV_F0 ",
            "rank 0, step 3: 0RECV_F0 has no neighbouring stage to exchange with; drop it",
        ),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0 comes before 0F0, which produces what it sends; move it after 0F0"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", "rank 1, step 2: 1RECV_F0 comes after 1F0, which uses it; move it before 1F0"),
        ("0UNSHARD ", "0UNSHARD 0UNSHARD ", "rank 0, step 1: 0UNSHARD, but the stage is already unsharded; drop it"),
        ("0UNSHARD ", "", "0F0 runs on a stage that is not unsharded (and 3 more until 0RESHARD at step 8); add"),
        (
            "0F1 ",
            "0RESHARD 0F1 ",
            "rank 0, step 4: 0F1 runs on a stage that was already resharded, by 0RESHARD at step 3",
        ),
        ("0RESHARD ", "0RESHARD 0RESHARD ", "rank 0, step 10: 0RESHARD, but the stage is not unsharded"),
        (
            "0B1 0RESHARD 0REDUCE_GRAD",
            "0REDUCE_GRAD 0B1 0RESHARD",
            "0REDUCE_GRAD comes before 0B1, which computes the last gradients of the",
        ),
        ("0REDUCE_GRAD", "0REDUCE_GRAD 0REDUCE_GRAD", "rank 0, step 11: 0REDUCE_GRAD appears twice"),
        ("0REDUCE_GRAD", "", "rank 0: 0REDUCE_GRAD is missing, although other stages have one; add it to rank 0"),
    ],
)
def test_every_kind(old, new, reported):
    assert RIGHT.count(old) == 1
    findings = found(RIGHT.replace(old, new))
    assert any(reported in str(finding) for finding in findings), [str(finding) for finding in findings]
    for finding in findings:
        assert finding.rank in (0, 1)
        assert finding.action is not None


@pytest.mark.parametrize(
    ("row", "reported", "marks"),
    [
        (
            "0F0 0F1 0B0 0B1 0RESHARD",
            "0F0 runs on a stage that is not unsharded (and 3 more until 0RESHARD at step 4); add 0UNSHARD before it",
            [(0, 0)],
        ),
        (
            "0F0 0UNSHARD 0F1 0B0 0B1 0RESHARD",
            "0F0 runs on a stage that is not unsharded; move 0UNSHARD before it",
            [(0, 0)],
        ),
        (
            "0UNSHARD 0F0 0RESHARD 0F1 0B0 0B1",
            "0F1 runs on a stage that was already resharded, by 0RESHARD at step 2 (and 2 more to the end); "
            "move 0RESHARD after 0B1",
            [(0, 2), (0, 3)],
        ),
        (
            "0UNSHARD 0F0 0F1 0RESHARD 0B0 0B1 0RESHARD",
            "0B0 runs on a stage that was already resharded, by 0RESHARD at step 3 (and 1 more until 0RESHARD at "
            "step 6); drop that 0RESHARD, or add 0UNSHARD before 0B0",
            [(0, 3), (0, 4)],
        ),
        (
            "0UNSHARD 0F0 0F1 0RESHARD 0B0 0UNSHARD 0B1 0RESHARD",
            "0B0 runs on a stage that was already resharded, by 0RESHARD at step 3; "
            "move 0RESHARD after 0B0, or 0UNSHARD before 0B0",
            [(0, 3), (0, 4)],
        ),
    ],
)
def test_sharding_is_reported_once_by_its_cause(row, reported, marks):
    (finding,) = ps.check(ps.Schedule([row.split()]))
    assert str(finding).endswith(f": {reported}")
    assert list(finding.marks) == marks


def test_both_ends_of_what_is_untimely_are_marked():
    (finding, *_) = found(RIGHT.replace("1RECV_F0 1F0", "1F0 1RECV_F0"))
    assert finding.marks == ((1, 2), (1, 1))


def test_a_transfer_that_is_nowhere():
    findings = found(RIGHT.replace("0SEND_F0 ", "").replace("1RECV_F0 ", ""))
    assert [str(finding) for finding in findings] == [
        "rank 1, step 1: 1F0 needs the output of stage 0 on rank 0, which is not sent; "
        "add 0SEND_F0 on rank 0 and 1RECV_F0 on rank 1"
    ]


def test_a_transfer_to_itself():
    schedule = ps.Schedule([["0F0", "0SEND_F0", "1RECV_F0", "1F0"]])
    assert [finding.kind for finding in ps.check(schedule)] == ["self_directed", "self_directed"]


def test_a_forward_before_its_input_on_the_same_rank():
    schedule = ps.Schedule([["1F0", "0F0"]])
    assert [str(finding) for finding in ps.check(schedule)] == [
        "rank 0, step 0: 1F0 needs 0F0, which comes later, at step 1; move 0F0 before it"
    ]


def test_memory():
    assert found(RIGHT, memory_limit=2) == []
    findings = found(RIGHT, memory_limit=1)
    assert [str(finding) for finding in findings] == [
        "rank 0, step 3: 0F1 brings the rank to 2 activations; the limit is 1; "
        "run 0B0 before it: an I releases nothing, only a B or W does",
        "rank 1, step 4: 1F1 brings the rank to 2 activations; the limit is 1; "
        "run 1B0 before it: an I releases nothing, only a B or W does",
    ]
    v_half = ps.build("V-Half", ranks=8, microbatches=24)
    assert ps.check(v_half, memory_limit=10) == []
    assert {finding.kind for finding in ps.check(v_half, memory_limit=9)} == {"memory"}


@pytest.mark.parametrize(
    ("row", "limit", "reported"),
    [
        ("0F0 0B0", 0, "0F0 brings the rank to 1 activation; the limit is 0; raise the limit: no B or W"),
        ("0F0 0I0 0F1 0W0 0B1", 1, "run 0W0 before it: an I releases nothing, only a B or W does"),
        ("0F0 0F1 0B0 0F2 0B1 0B2", 1, "0F1 brings the rank to 2 activations; the limit is 1; run 0B0 before it"),
        ("0F0 1F0 1B0 0B0", 1, "1F0 brings the rank to 2 activations; the limit is 1; raise the limit"),
        ("0F0 0F1", 1, "0F1 brings the rank to 2 activations; the limit is 1; raise the limit"),
    ],
)
def test_what_would_release_memory(row, limit, reported):
    (finding,) = ps.check(ps.Schedule([row.split()]), memory_limit=limit)
    assert reported in str(finding)


def test_the_peak_of_each_rank():
    assert peaks(ActionTable(ps.build("1F1B", ranks=4, microbatches=8))) == [4, 3, 2, 1]
    idle = ps.Schedule([["0F0", "(0B0;0F1)OVERLAP_F_B", "0B1"], [None]], placement=ps.Placement((0,), 2))
    assert peaks(ActionTable(idle)) == [2, 0]


def test_a_deadlock_is_reported_as_a_cycle_and_marked():
    text = """
        rank 0: 0F0 0F1 0SEND_F0 0SEND_F1
        rank 1: 1RECV_F1 1RECV_F0 1F0 1F1
    """
    schedule = ps.Schedule.from_text(text)
    with pytest.raises(ps.VerificationError) as caught:
        ps.verify(schedule, model=ps.CommModel("rendezvous", "pair"))
    (finding,) = caught.value.findings
    assert finding.kind == "deadlock"
    assert finding.message == (
        "rank 0 waits in 0SEND_F0, ahead of 0SEND_F1, for rank 1, which waits in 1RECV_F1, ahead of 1RECV_F0, "
        "for rank 0 (under rendezvous, a lane per pair)"
    )
    assert str(caught.value).endswith(
        dedent("""\
        step   0        1        2        3
        rank 0 0F0      0F1      0SEND_F0 0SEND_F1
                                 ^^^^^^^^ ^^^^^^^^
        rank 1 1RECV_F1 1RECV_F0 1F0      1F1
               ^^^^^^^^ ^^^^^^^^""")
    )


def test_a_deadlock_of_compute_alone():
    stuck = ps.Schedule([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    (finding,) = ps.check(stuck)
    assert finding.message == (
        "rank 0 waits in 0B0, ahead of 0F1, for rank 1, which waits in 1F1, ahead of 1B0, "
        "for rank 0 (under rendezvous, a lane per pair)"
    )


HOPELESS = """
    rank 0: 0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1
    rank 1: 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1
"""


def test_no_order_of_transfers_can_help_if_compute_waits_in_a_circle():
    (finding,) = found(HOPELESS)
    assert finding.kind == "deadlock"
    assert finding.fix == ("reorder the compute actions (0B0 on rank 0, 1F1 on rank 1): no order of transfers can help")


def test_what_else_is_wrong_is_to_be_mended_before_a_deadlock():
    *_, deadlock = found(HOPELESS.replace("1SEND_B1", "1SEND_B1 1SEND_B1"))
    assert (deadlock.kind, deadlock.fix) == ("deadlock", "fix the other findings first, then check again")


def test_repair_is_proposed_where_it_helps():
    swapped = ps.Schedule([["0F0", "0F1", "0SEND_F0", "0SEND_F1"], ["1RECV_F1", "1RECV_F0", "1F0", "1F1"]])
    (finding,) = ps.check(swapped)
    assert finding.fix == (
        "reorder the transfers, e.g. with penstock.repair(schedule, model) or penstock convert --repair"
    )
    assert ps.check(ps.repair(swapped)) == []


@pytest.mark.parametrize(
    ("rows", "microbatches", "kind"),
    [
        ([["0F0", "0F0", "0B0"]], 1, "repeated"),
        ([["0F7", "0B7"]], 1, "microbatch"),
        ([["0F0", "0F1", "0B0", "0I0", "0W0"]], 2, "backward_twice"),
        ([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], 2, "deadlock"),
    ],
)
def test_what_the_validator_of_torch_lets_through(rows, microbatches, kind):
    theirs = {rank: [upstream._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    upstream._validate_schedule(theirs, len(rows), len(rows), microbatches)  # does not raise
    placement = ps.Placement.loop(len(rows), len(rows))
    findings = ps.check(ps.Schedule(rows, placement=placement, microbatches=microbatches))
    assert kind in {finding.kind for finding in findings}


@pytest.mark.parametrize("change", [lambda row: row.remove("1RECV_F1"), lambda row: row.sort(key="1RECV_F1".__ne__)])
def test_a_lowered_schedule_with_a_receive_dropped_or_swapped(change):
    lowered = ps.lower(ps.build("1F1B", ranks=2, microbatches=2))
    rows = [[str(cell) for cell in row] for row in lowered.actions]
    change(rows[1])
    assert ps.check(ps.Schedule(rows)) != []


def test_all_of_them_are_collected():
    kinds = [
        finding.kind for finding in found(RIGHT.replace("0F1 ", "").replace("1RECV_F0 ", "").replace("0UNSHARD", ""))
    ]
    assert {"missing", "unmatched", "not_unsharded"} <= set(kinds)


def test_thousands_of_findings_are_counted_and_a_window_is_shown():
    ranks, microbatches = 16, 2000
    rows = [[f"{rank}F{number}" for number in range(microbatches)] for rank in range(ranks)]
    rows[7] = rows[7][:1] * microbatches
    schedule = ps.Schedule(rows)
    with pytest.raises(ps.VerificationError) as caught:
        ps.verify(schedule)
    assert len(caught.value.findings) <= MOST_FINDINGS + 1
    assert caught.value.findings[-1].kind == "more"
    assert "and 3950 more (in all: 1999 repeated, 1999 missing)" in str(caught.value)
    assert len(str(caught.value)) < 8000


def test_the_rest_is_counted_by_kind():
    lowered = ps.lower(ps.build("GPipe", ranks=2, microbatches=64), unshard=False, reduce=False)
    rows = [[str(cell) for cell in row if "RECV" not in str(cell)] for row in lowered.actions]
    assert ps.check(ps.Schedule(rows))[-1].message == "and 80 more (in all: 128 unmatched)"


def test_far_too_few_actions_for_the_microbatches():
    (finding,) = ps.check(ps.Schedule([["0F0"]], microbatches=2**28))
    assert "rank 0: 0F1 is missing, as are most others: 1 stages x 268435456 microbatches need 268435456" in str(
        finding
    )


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("never",), "use 'rendezvous', 'bounded(1)'"),
        (("bounded(0)",), "unknown buffering"),
        (("bounded(x)",), "unknown buffering"),
        (("rendezvous", "lane"), "unknown lanes 'lane'; use 'rank', 'pair', 'direction' or 'message'"),
        ((3,), "unknown buffering"),
    ],
)
def test_unknown_models(arguments, reported):
    with pytest.raises(ps.ModelError) as caught:
        ps.CommModel(*arguments)
    assert reported in str(caught.value)


def test_two_defects_at_once():
    """An unmatched send, and an unknown stage last."""
    broken = ps.Schedule([["0F0", "0SEND_F0"], ["9F0"]], placement=ps.Placement.loop(2, 2))
    assert {"unmatched", "misplaced", "missing"} <= {finding.kind for finding in ps.check(broken)}


def test_nothing_but_transfers():
    schedule = ps.Schedule([["0SEND_F0"], ["1RECV_F0"]])
    assert {finding.kind for finding in ps.check(schedule)} == {"missing"}


def test_the_way_round_is_short_however_long_the_rows_are():
    count = 2000
    first = ["2F1999", *(f"{stage}F{number}" for number in range(count - 1) for stage in (0, 2)), "0F1999"]
    second = [f"{stage}F{number}" for number in range(count) for stage in (1, 3)]
    (finding,) = ps.check(ps.Schedule([first, second]))
    assert finding.message == (
        "rank 0 waits in 2F1999, ahead of 0F0, for rank 1, which waits in 1F0, ahead of 1F1999, for rank 0 "
        "(under rendezvous, a lane per pair)"
    )
    assert finding.fix == "reorder these actions: no order of transfers can help"


def test_what_runs_together_is_held_together():
    for overlap in ("(0B0;0F1)OVERLAP_F_B", "(0F1;0B0)OVERLAP_F_B"):
        schedule = ps.Schedule([["0F0", overlap, "0B1"]])
        assert [finding.kind for finding in ps.check(schedule, memory_limit=1)] == ["memory"]
        assert ps.check(schedule, memory_limit=2) == []


def test_a_reduction_without_a_backward():
    assert [finding.kind for finding in ps.check(ps.Schedule([["0F0", "0REDUCE_GRAD"]]))] == ["reduced_early"]


def test_safe_models_does_not_speak_of_broken_schedules():
    with pytest.raises(ps.VerificationError, match="1RECV_F0 has no 0SEND_F0 on rank 0"):
        ps.safe_models(ps.Schedule([["0F0"], ["1RECV_F0", "1F0"]]))


HUGE = ps.Schedule([["0F268435455"]])
SMALL = ps.build("1F1B", ranks=2, microbatches=2)


@pytest.mark.parametrize(
    ("call", "error", "reported"),
    [
        (lambda: ps.lower(HUGE), ps.VerificationError, "0F0 is missing, as are most others"),
        (lambda: ps.safe_models(HUGE), ps.ScheduleError, "need far more actions than the schedule has"),
        (lambda: ps.check("x"), ps.ScheduleError, "expected a Schedule, got 'x'"),
        (lambda: ps.lower(None), ps.ScheduleError, "expected a Schedule, got None"),
        (lambda: ps.check(SMALL, model="rendezvous"), ps.ModelError, "model must be a CommModel"),
        (
            lambda: ps.check(SMALL, memory_limit=float("nan")),
            ps.SizeError,
            "memory_limit must be a non-negative number, got nan",
        ),
        (
            lambda: ps.check(SMALL, memory_limit="3"),
            ps.SizeError,
            "memory_limit must be a non-negative number, got '3'",
        ),
        (lambda: ps.check(SMALL, memory_limit=-1), ps.SizeError, "memory_limit must be a non-negative number, got -1"),
        (lambda: ps.lower(SMALL, max_active_stages="3"), ps.SizeError, "max_active_stages must be an integer"),
        (lambda: ps.lower(SMALL, max_active_stages=1.5), ps.SizeError, "max_active_stages must be an integer"),
        (lambda: ps.lower(SMALL, defer_receives=True, look_ahead=-1), ps.SizeError, "look_ahead must be at least 0"),
        (lambda: ps.lower(SMALL, defer_receives=True, look_ahead=10**30), ps.SizeError, "look_ahead must be at most"),
        (lambda: ps.CommModel(np.array([1, 2])), ps.ModelError, "unknown buffering"),
        (lambda: ps.CommModel("eager", np.array([1, 2])), ps.ModelError, "unknown lanes"),
    ],
)
def test_odd_arguments(call, error, reported):
    with pytest.raises(error, match=reported):
        call()


def test_no_microbatches_and_idle_ranks():
    assert ps.check(ps.Schedule([[None]], placement=ps.Placement((), 1), microbatches=0)) == []
    idle = ps.Schedule([["0F0"], []], placement=ps.Placement((0,), 2))
    assert ps.check(idle) == []
    assert ps.lower(idle).ranks == 2
