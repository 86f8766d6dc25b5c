"""Pictures for notebooks: well-formed, small, and text stays text."""

import xml.etree.ElementTree as ElementTree

import pytest

from penstock import Costs, Schedule, build, lower, simulate
from penstock.view.notebook import schedule_html, timeline_html
from penstock.view.palette import STYLES

SVG = "{http://www.w3.org/2000/svg}"


def rectangles(html, name):
    return [
        found for found in ElementTree.fromstring(html).iter(f"{SVG}rect") if found.get("fill") == STYLES[name].colour
    ]


def words(html):
    return list(ElementTree.fromstring(html).itertext())


def test_a_block_per_action():
    html = schedule_html(build("1F1B", ranks=2, microbatches=3))

    assert len(rectangles(html, "F")) == len(rectangles(html, "B")) == 6
    assert {"rank 0", "rank 1", "step", "1B2, 6 to 7"} <= set(words(html))
    assert "Schedule 1F1B: 2 ranks, 2 stages, 3 microbatches, 12 actions" in words(html)


def test_a_timeline_is_to_scale():
    html = timeline_html(simulate(build("1F1B", ranks=2, microbatches=3)))
    forward, backward = rectangles(html, "F")[0], rectangles(html, "B")[0]

    assert float(backward.get("width")) == pytest.approx(2 * float(forward.get("width")), rel=0.02)
    assert "makespan 12, bubble 25.0 %, peak memory 2" in words(html)
    assert "75 % busy, peak 2" in words(html)


def test_an_overlap_is_drawn_as_its_parts():
    html = timeline_html(simulate(build("DualPipeV", ranks=2, microbatches=4)))

    assert {found.get("height") for found in rectangles(html, "F")} == {"20", "10"}
    assert not rectangles(html, "overlap")


@pytest.mark.parametrize(
    "schedule",
    [
        lower(build("ZBVZeroBubble", ranks=2, microbatches=3)),
        Schedule.from_text("0F0 . 0F1 0B0 . 0B1"),
        Schedule([["0F0", None], [None, "1B0"]]),
        Schedule([["0B0", "0F0"]]),
        Schedule([[], ["0F0"]], placement=build("1F1B", ranks=2, microbatches=1).placement),
        Schedule([["(0F1;0B0)OVERLAP_F_B", None, "0UNSHARD"]]),
    ],
    ids=str,
)
def test_any_schedule_has_a_picture(schedule):
    assert ElementTree.fromstring(schedule_html(schedule)).tag == "div"
    drawn = [found for name in STYLES if name != "idle" for found in rectangles(schedule_html(schedule), name)]

    assert len(drawn) == sum(len(cell.parts) for row in schedule.actions for cell in row if cell)


@pytest.mark.parametrize("sizes", [(4, 200), (64, 512), (300, 80)], ids=str)
def test_large_ones_are_coarse(sizes):
    schedule = build("1F1B", ranks=sizes[0], microbatches=sizes[1])
    for html in (schedule_html(schedule), timeline_html(simulate(schedule))):
        assert len(html) < 300_000
        assert rectangles(html, "B")
        assert (f"and {sizes[0] - 32} more ranks" in words(html)) == (sizes[0] > 32)


def test_steps_are_not_divided():
    html = schedule_html(Schedule([["0F0", "0B0"]]))

    assert [word for word in words(html) if word.replace(".", "").isdigit()] == ["0", "0", "0", "1"]


def test_nothing_takes_time():
    free = Costs(forward=0, backward_input=0, backward_weight=0)

    assert "rank 1" in words(timeline_html(simulate(build("1F1B", ranks=2, microbatches=3), free)))


@pytest.mark.parametrize("name", ["</svg><script>alert(1)</script>", '"&amp;<b>', "\x00\ud800\n", "]]>"])
def test_a_hostile_name_stays_text(name):
    schedule = Schedule([["0F0", "0B0"]], metadata={"name": name})
    for html in (schedule_html(schedule), timeline_html(simulate(schedule))):
        assert schedule.summary in words(html)
        assert "<script" not in html
        html.encode()
