"""The chart of a timeline, as matplotlib draws it."""

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from penstock import Costs, Schedule, WriteError, build, lower, simulate
from penstock.view import chart
from penstock.view.bars import bars_of
from penstock.view.palette import STYLES

SVG = "{http://www.w3.org/2000/svg}"


def texts(path):
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter(f"{SVG}text")]


def fills(path):
    styles = [element.get("style") or "" for element in ElementTree.parse(path).iter(f"{SVG}path")]
    return {style.split("fill: ")[1].split(";")[0] for style in styles if "fill: #" in style}


def test_a_number_in_every_block(tmp_path):
    simulate(build("1F1B", ranks=4, microbatches=8)).write(tmp_path / "chart.svg")
    words = texts(tmp_path / "chart.svg")

    assert {word for word in words if word.startswith("rank")} == {f"rank {rank}" for rank in range(4)}
    assert all(words.count(str(microbatch)) >= 8 for microbatch in range(8))
    assert {"forward", "backward", "idle", "time"} <= set(words)
    assert "1F1B: makespan 33, bubble 27.3 %" in words


def test_the_colours_are_those_of_the_palette(tmp_path):
    simulate(build("ZBVZeroBubble", ranks=2, microbatches=4)).write(tmp_path / "chart.svg")

    assert {STYLES[name].colour for name in ("F", "I", "W", "idle")} <= fills(tmp_path / "chart.svg")
    assert STYLES["B"].colour not in fills(tmp_path / "chart.svg")


def test_an_overlap_is_drawn_as_its_parts():
    timeline = simulate(build("DualPipeV", ranks=2, microbatches=4))
    blocks = bars_of(timeline)
    parts = chart._parts(timeline, blocks)
    halves = np.flatnonzero(parts.height == 0.5)

    assert len(halves) == 2 * np.count_nonzero(blocks.last - blocks.first == 2) > 0
    assert set(parts.top[halves].tolist()) == {0.0, 0.5}
    assert (parts.length * parts.height).sum() == pytest.approx(sum(timeline.busy))


def test_later_stages_of_a_rank_have_a_higher_foot():
    timeline = simulate(build("Interleaved1F1B", ranks=2, microbatches=4, stages_per_rank=3))
    parts = chart._parts(timeline, bars_of(timeline))

    assert len(set(parts.foot.tolist())) == 3
    assert parts.foot.min() == 0


def test_no_numbers_where_they_do_not_fit(tmp_path):
    simulate(build("1F1B", ranks=16, microbatches=200)).write(tmp_path / "chart.svg")

    assert len(texts(tmp_path / "chart.svg")) < 100


def test_a_png_is_a_png(tmp_path):
    costs = Costs(unshard=0.4, reduce=0.6, latency=0.1)
    simulate(lower(build("1F1B", ranks=2, microbatches=3)), costs).write(tmp_path / "chart.PNG")

    assert (tmp_path / "chart.PNG").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_same_timeline_gives_the_same_file(tmp_path, suffix):
    for name in ("a", "b"):
        simulate(build("1F1B", ranks=2, microbatches=3)).write(tmp_path / f"{name}.{suffix}")

    assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


@pytest.mark.parametrize("name", ["$\\frac{", "</text><script>", "a & b", "\x00\n"])
def test_a_hostile_name_stays_text(tmp_path, name):
    timeline = simulate(Schedule([["0F0", "0B0"]], metadata={"name": name}))
    timeline.write(tmp_path / "chart.svg")

    shown = f"{name}: " if name.isprintable() else ""
    assert f"{shown}makespan 3, bubble 0.0 %" in texts(tmp_path / "chart.svg")


def test_nothing_takes_time(tmp_path):
    free = Costs(forward=0, backward_input=0, backward_weight=0)
    simulate(build("1F1B", ranks=2, microbatches=3), free).write(tmp_path / "chart.svg")

    assert "rank 1" in texts(tmp_path / "chart.svg")


def test_too_many_actions(tmp_path, monkeypatch):
    monkeypatch.setattr(chart, "MOST_BARS", 10)
    with pytest.raises(WriteError, match=r"12 actions would be too dense to read \(at most 10\)"):
        simulate(build("1F1B", ranks=2, microbatches=3)).write(tmp_path / "chart.svg")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(chart, "find_spec", lambda name: None)
    with pytest.raises(WriteError, match=r"pip install 'penstock\[chart\]'"):
        simulate(build("1F1B", ranks=2, microbatches=3)).write(tmp_path / "chart.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_matplotlib_is_loaded_only_for_charts():
    assert importlib.util.find_spec("matplotlib")
    code = "import sys, penstock.view; sys.exit('matplotlib' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_leaves_no_settings_behind(tmp_path, monkeypatch):
    import matplotlib as mpl

    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # others may have loaded it
    before = mpl.rcParams.copy()
    simulate(build("1F1B", ranks=2, microbatches=3)).write(tmp_path / "chart.svg")

    assert all(mpl.rcParams[name] == before[name] for name in before if name != "backend")  # asking loads pyplot
    assert "matplotlib.pyplot" not in sys.modules
