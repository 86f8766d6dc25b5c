"""Each kind of mistake about edges beyond the chain, as the broken grid and the finding."""

import pytest

import penstock as ps

RIGHT = """
    edges: 0>1,2 0>3/F 1>2 2>3
    rank 0: 0F0 0SEND_F0 0SEND_F0@2 0SEND_F0@3 0RECV_B0@2 0RECV_B0 0B0
    rank 1: 1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0
    rank 2: 2RECV_F0@0 3RECV_F0@0 2RECV_F0 2F0 3F0 3B0 2B0 2SEND_B0 2SEND_B0@0
"""


def found(text):
    schedule = ps.Schedule.from_text(text, placement=ps.Placement((0, 1, 2, 2), 3), microbatches=1)
    return ps.check(schedule)


def test_nothing_is_wrong_with_it():
    assert found(RIGHT) == []


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [
        (
            " 2RECV_F0@0",
            "",
            "rank 0, step 2: 0SEND_F0@2 has no 2RECV_F0@0 on rank 2; add 2RECV_F0@0 before 2F0 on rank 2",
        ),
        (
            " 0SEND_F0@2",
            "",
            "rank 2, step 0: 2RECV_F0@0 has no 0SEND_F0@2 on rank 0; add 0SEND_F0@2 after 0F0 on rank 0",
        ),
        (" 2SEND_B0@0", "", "0RECV_B0@2 has no 2SEND_B0@0 on rank 2; add 2SEND_B0@0 after 2B0 on rank 2"),
        ("0F0 0SEND_F0 0SEND_F0@2", "0SEND_F0@2 0F0 0SEND_F0", "0SEND_F0@2 comes before 0F0, which produces what it"),
        ("0RECV_B0@2 0RECV_B0 0B0", "0RECV_B0 0B0 0RECV_B0@2", "0RECV_B0@2 comes after 0B0, which uses it"),
        ("0SEND_F0@3 ", "0SEND_F0@3 0SEND_F0@3 ", "rank 0, step 4: 0SEND_F0@3 appears twice; drop it"),
        (
            "1F0 1SEND_F0",
            "1F0 1SEND_F0 1SEND_F0@3",
            "rank 1, step 3: 1SEND_F0@3 has no edge to go over: there is none from stage 1 to stage 3; drop it, or add "
            "the edge 1>3",
        ),
        ("1F0 1SEND_F0", "1F0 1SEND_F0 1SEND_F0@9", "there is none from stage 1 to stage 9; drop it"),
        ("3B0 ", "3B0 3SEND_B0@0 ", "3SEND_B0@0 is for an edge that has no gradient, from stage 0 to stage 3; drop it"),
        ("2F0 3F0", "2F0 2SEND_F0 3F0", "2SEND_F0 is between two stages on the same rank; drop it: they share memory"),
        ("0F0 ", "0F0 0RECV_F0 ", "0RECV_F0 has no neighbouring stage to exchange with; drop it"),
        ("2F0 3F0", "3F0 2F0", "rank 2, step 3: 3F0 needs 2F0, which comes later, at step 4; move 2F0 before it"),
        ("0>3/F", "0>3", "0B0 needs the output of stage 3 on rank 2, which is not sent; add 3SEND_B0@0 on rank 2"),
        ("edges: 0>1,2 0>3/F 1>2 2>3", "", "0SEND_F0@2 has no edge to go over: there is none from stage 0 to stage 2"),
    ],
)
def test_every_kind(old, new, reported):
    assert RIGHT.count(old) == 1
    findings = found(RIGHT.replace(old, new))
    assert any(reported in str(finding) for finding in findings), [str(finding) for finding in findings]


def test_without_its_sends_and_receives_a_link_is_named():
    text = RIGHT.replace(" 0SEND_F0@2", "").replace(" 2RECV_F0@0", "")
    (finding,) = found(text)
    assert finding.kind == "not_transferred"
    assert str(finding) == (
        "rank 2, step 2: 2F0 needs the output of stage 0 on rank 0, which is not sent; add 0SEND_F0@2 on rank 0 and "
        "2RECV_F0@0 on rank 2"
    )


def test_a_receive_of_a_skip_has_to_be_posted_in_the_order_of_the_sends():
    """One lane per pair of ranks: rank 0 sends the skip first, rank 1 receives it last."""
    schedule = ps.Schedule.from_text("""
        edges: 0>1,2 1>2
        rank 0: 0F0 0SEND_F0@2 0SEND_F0
        rank 1: 1RECV_F0 1F0 2RECV_F0@0 2F0
    """)
    (finding,) = ps.check(schedule)
    assert finding.kind == "deadlock"
    assert "0SEND_F0@2" in finding.message
    assert ps.check(schedule, model=ps.CommModel(lanes="message")) == []
    repaired = ps.repair(schedule)
    assert [str(cell) for cell in repaired.actions[1]] == ["1RECV_F0", "2RECV_F0@0", "1F0", "2F0"]
