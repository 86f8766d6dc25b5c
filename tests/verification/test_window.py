"""What is drawn of a schedule that is too large to draw."""

from textwrap import dedent

import penstock as ps
from penstock.verification.window import draw_findings


def forwards(ranks, microbatches):
    return [[f"{rank}F{number}" for number in range(microbatches)] for rank in range(ranks)]


def drawn(rows, **options):
    schedule = ps.Schedule(rows)
    return draw_findings(schedule, ps.check(schedule), **options)


def test_all_of_a_small_one_and_no_word_on_it():
    assert drawn([["0B0", "0F0"]]) == dedent("""\
        step   0   1
        rank 0 0B0 0F0
               ^^^ ^^^""")


def test_a_part_of_a_large_one_says_which():
    rows = forwards(16, 40)
    rows[7][1] = "7F0"
    assert drawn(rows).splitlines()[:2] == [
        "# steps 0 to 13 of 40, ranks 1 to 12 of 16",
        "step    0    1    2    3    4    5    6    7    8    9    10    11    12    13",
    ]


def test_findings_far_apart_have_a_window_each():
    rows = forwards(1, 200)
    for step in (50, 60, 100, 150, 190):
        rows[0][step] = "0F0"
    parts = drawn(rows).split("\n\n")
    assert [part.splitlines()[0] for part in parts] == [
        "# steps 43 to 56 of 200",
        "# steps 53 to 66 of 200",
        "# steps 93 to 106 of 200",
    ]
    assert [part.count("^^^") for part in parts] == [1, 1, 1]


def test_one_finding_whose_ends_are_far_apart_has_both():
    rows = [["0B0", *(f"0F{number}" for number in range(1, 50)), "0F0", *(f"0B{number}" for number in range(1, 50))]]
    parts = drawn(rows).split("\n\n")
    assert [part.splitlines()[0] for part in parts] == ["# steps 0 to 13 of 100", "# steps 43 to 56 of 100"]


def test_what_a_finding_marks_on_far_ranks_is_in_sight():
    stuck = ps.Schedule(
        [["0F0", "0B0", "0F1", "0B1"], *([f"{r}F0", f"{r}F1", f"{r}B0", f"{r}B1"] for r in range(1, 20))]
    )
    finding = ps.check(stuck)[0]
    assert draw_findings(stuck, [finding]).count("^^^") == len(finding.marks)


def test_a_window_is_folded():
    rows = forwards(1, 200)
    rows[0][100] = "0F0"
    lines = drawn(rows, width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert sum(line.startswith("step") for line in lines) == 3
