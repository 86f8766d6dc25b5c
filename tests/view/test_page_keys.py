"""Keys and screen readers reach what a mouse does; labels and causes stand where they are drawn."""

import pytest

import penstock as ps
from penstock.simulation.costs import Costs
from penstock.simulation.idle import CAUSES
from view.test_page import cell_of, one_f_one_b, settle, show  # noqa: F401  # a fixture

LANES = ["time", "transfers", "memory"]


def focused(page):
    """The focused item, and what a screen reader says of it."""
    found = page.evaluate("penstock.focused")
    element = "document.activeElement"
    return (
        found,
        page.evaluate(f"{element}.getAttribute('aria-label')"),
        page.evaluate(f"{element}.parentElement.ariaLabel"),
    )


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def test_keys_go_through_every_item_of_a_rank(show):  # noqa: F811
    timeline = one_f_one_b(ranks=2, microbatches=3, latency=0.1)
    page = show(timeline)
    page.focus("#stage")
    press(page, "Enter")
    item, said, row = focused(page)
    assert (item["kind"], item["cell"], row) == ("action", cell_of(timeline, "0F0"), "rank 0, time")
    assert said.startswith("0F0, forward; rank 0; start 0; end 1; duration 1; memory then")
    seen = [said]
    while (press(page, "ArrowRight") or focused(page)[1]) != seen[-1]:
        seen.append(focused(page)[1])
    runs = sum(span.rank == 0 and span.end > span.start for span in timeline.spans)
    waits = [wait for wait in timeline.waits if wait.rank == 0]
    assert len(seen) == runs + len(waits)
    for wait in waits:
        assert sum(f"why {wait.why}" in said and said.startswith(f"idle, {wait.cause}") for said in seen) >= 1
    press(page, "Home")
    assert focused(page)[1] == seen[0]
    press(page, "End", "ArrowLeft")
    assert focused(page)[1] == seen[-2]


def test_keys_reach_transfers_memory_and_other_ranks(show):  # noqa: F811
    page = show([one_f_one_b(ranks=2), one_f_one_b(ranks=3)], titles=["predicted", "measured"])
    page.focus("#stage")
    press(page, "Enter")
    rows = [focused(page)[2]]
    while (press(page, "ArrowDown") or focused(page)[2]) != rows[-1]:
        rows.append(focused(page)[2])
    expected = [("predicted", rank) for rank in range(2)] + [("measured", rank) for rank in range(3)]
    assert rows == [f"{title}, rank {rank}, {lane}" for title, rank in expected for lane in LANES]
    press(page, "t", "m")
    settle(page)
    press(page, "ArrowUp")
    assert focused(page)[2] == "measured, rank 2, time"
    press(page, "ArrowUp")
    assert focused(page)[2] == "measured, rank 1, time"


def test_the_focus_shows_a_tooltip_zooms_and_clicks(show):  # noqa: F811
    timeline = one_f_one_b()
    page = show(timeline)
    page.focus("#stage")
    press(page, "Enter", "ArrowRight", "ArrowRight")
    assert page.locator("#tooltip").is_visible()
    assert page.locator("#tooltip strong").inner_text().strip() == "0F2"
    before = page.evaluate("penstock.range")
    press(page, "+", "+", "+", "+", "+", "+")
    after = page.evaluate("penstock.range")
    assert after[1] - after[0] < (before[1] - before[0]) / 10
    assert after[0] <= 2.5 <= after[1]  # the middle of the item stays in view
    settle(page)
    cell, stage = (page.locator(name).bounding_box() for name in ("[role=gridcell]", "#stage"))
    assert stage["x"] <= cell["x"] <= cell["x"] + cell["width"] <= stage["x"] + stage["width"]
    press(page, "Enter")
    assert page.evaluate("penstock.selected") == [0, cell_of(timeline, "0F2")]
    press(page, "End")
    low, high = page.evaluate("penstock.range")
    assert low <= page.evaluate("penstock.focused.start") <= high
    press(page, "Escape")
    assert page.evaluate("document.activeElement.id") == "stage"
    assert page.evaluate("penstock.focused") is None
    assert page.locator("#tooltip").is_hidden()
    press(page, "Enter")  # it goes on from the selected action
    assert focused(page)[0]["cell"] == cell_of(timeline, "0F2")


def test_a_row_below_the_window_is_scrolled_to(show):  # noqa: F811
    page = show(one_f_one_b(ranks=24, microbatches=24), height=500)
    page.focus("#stage")
    press(page, "Enter", *["ArrowDown"] * 3 * 20)
    settle(page)
    cell, stage = (page.locator(name).bounding_box() for name in ("[role=gridcell]", "#stage"))
    assert stage["y"] <= cell["y"] <= cell["y"] + cell["height"] <= stage["y"] + stage["height"] + 1


def test_tab_leaves_the_items(show):  # noqa: F811
    page = show(one_f_one_b())
    page.focus("#stage")
    press(page, "Enter", "ArrowRight")
    page.focus("#help")
    settle(page)
    assert page.evaluate("penstock.focused") is None
    assert page.locator("[role=gridcell]").count() == 0
    press(page, "Enter")
    assert page.locator("#keys").is_visible()


@pytest.mark.parametrize("width", [560, 700, 1200])
def test_forwards_and_weight_gradients_have_labels_where_input_gradients_have(show, width):  # noqa: F811
    """The number of the microbatch remains where the name of the action is too long."""
    costs = Costs(forward=1, backward_input=1.3, backward_weight=0.9)
    timeline = ps.simulate(ps.build("ZBVZeroBubble", ranks=2, microbatches=6), costs)
    page = show(timeline, width=width)
    blocks = sum(span.end > span.start for span in timeline.spans)
    assert page.evaluate("penstock.drawn.labels") == blocks


def test_a_hatch_says_its_cause_where_there_is_room(show):  # noqa: F811
    timeline = one_f_one_b(ranks=4, microbatches=2)
    page = show(timeline, width=1600)
    wide = [wait for wait in timeline.waits if wait.end - wait.start >= 2]
    assert page.evaluate("penstock.drawn.causes") >= len(wide) > 0


def test_the_help_explains_every_figure_and_hatch(show):  # noqa: F811
    page = show(one_f_one_b())
    page.keyboard.press("?")
    hatches = page.locator("#hatches dt").all_inner_texts()
    assert [text.strip() for text in hatches] == list(CAUSES)
    assert len(set(page.locator("#hatches canvas").evaluate_all("(all) => all.map((one) => one.toDataURL())"))) == len(
        CAUSES
    )
    assert {"makespan", "span", "bubble", "peak memory", "idle"} <= set(page.locator("#meanings dt").all_inner_texts())
