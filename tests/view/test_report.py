"""Reports in a real browser: everything is there, nothing is loaded, and no script but ours runs."""

import math
import re

import pytest

from penstock.errors import WriteError
from penstock.schedules.registry import build
from penstock.simulation.simulate import simulate
from penstock.view.curve import curve_of
from penstock.view.report import Curve, Paragraph, Rows, Section, Timelines, report_of, write_report

HOSTILE = "</section><script>alert(1)</script><img src=x onerror=alert(2)> & \" ' ü"


def sections():
    timelines = [simulate(build(name, ranks=2, microbatches=4)) for name in ("1F1B", "GPipe")]
    return [
        Section("Training", [Paragraph(HOSTILE), Curve([(1, 5.5), (2, math.nan), (3, 4.5), (4, 2.5)], "step", "loss")]),
        Section("Plan", [Rows(["schedule", "step"], [["1F1B", "12.5 ms"], ["GPipe", "-3%"]], marked=0)]),
        Section("Timelines", [Timelines.of(timelines, ["predicted", "measured"], memory_limit=3)]),
    ]


@pytest.fixture(params=["light", "dark"])
def page(browser, tmp_path, request):
    write_report(tmp_path / "report.html", HOSTILE, sections())
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1000, "height": 900})
    page = context.new_page()
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "report.html").as_uri())
    page.frame_locator("iframe").locator("#figures tr").first.wait_for()
    yield page
    assert errors == []
    assert {url.partition(":")[0] for url in requests} <= {"file", "about"}
    assert len([url for url in requests if url.startswith("file:")]) == 1
    context.close()


def test_all_parts_are_shown(page):
    assert page.title() == HOSTILE
    assert page.locator("h2").all_inner_texts() == ["Training", "Plan", "Timelines"]
    assert page.locator("section p").inner_text() == HOSTILE
    assert page.locator("tbody tr").all_inner_texts() == ["1F1B\t12.5 ms", "GPipe\t-3%"]
    assert page.locator("tr.marked td").first.inner_text() == "1F1B"
    assert page.locator("svg[role=img]").get_attribute("aria-label") == "loss by step: 5.5 at 1, 2.5 at 4"
    frame = page.frame_locator("iframe")
    assert "predicted" in frame.locator("#figures").inner_text()
    assert "measured" in frame.locator("#figures").inner_text()


def test_styles_apply_under_the_policy(page):
    color, fill = page.evaluate(
        "() => [getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('.trace')).stroke]"
    )
    assert color in ("rgb(255, 255, 255)", "rgb(18, 21, 26)")
    assert fill in ("rgb(0, 114, 178)", "rgb(86, 180, 233)")
    assert page.evaluate("() => getComputedStyle(document.querySelectorAll('td')[1]).textAlign") == "right"


def test_a_curve_is_drawn_to_scale():
    drawing = curve_of([(0, 4), (5, 2), (10, 0)], x="step", y="loss")
    path = re.search(r'class="trace" d="([^"]+)"', drawing)[1]
    (left, top), (_, middle), (right, bottom) = (
        tuple(map(float, place.split())) for place in re.findall(r"[ML]([\d.]+ [\d.]+)", path)
    )
    assert (left, right) == (56, 696)
    assert middle == (top + bottom) / 2
    assert re.findall(r">([\d.]+)</text>", drawing)[:5] == ["0", "1", "2", "3", "4"]


def test_a_number_that_is_not_finite_leaves_a_gap():
    drawing = curve_of([(0, 1), (1, math.inf), (2, 1), (3, 1)], x="step", y="loss")
    assert re.search(r'class="trace" d="M[\d. ]+M[\d. ]+L[\d. ]+"', drawing)
    with pytest.raises(WriteError, match="no point of loss by step is finite"):
        curve_of([(0, math.nan)], x="step", y="loss")


def test_a_report_without_timelines_allows_no_script():
    assert "script-src &#x27;none&#x27;" in report_of("t", [Section("s", [])]).replace("'", "&#x27;")
