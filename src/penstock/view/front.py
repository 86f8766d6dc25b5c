"""Draws what a sweep found: time per microbatch against what varies, as PNG or SVG with matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import WriteError
from penstock.ir.formats.files import atomic_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SETTINGS: Final[dict[Any, Any]] = {"svg.fonttype": "none", "svg.hashsalt": "penstock", "font.size": 8.0}
_KINDS: Final = ("png", "svg")


class Dot(NamedTuple):
    """A point of a front.

    Attributes:
        value: the value of what varies.
        time: the time per microbatch.
        name: the name of the schedule.
    """

    value: float
    time: float
    name: str


def write_front(path: Path, variable: str, dots: Sequence[Dot]) -> None:
    """Write a chart as PNG or SVG, depending on the suffix, completely or not at all.

    Raises:
        WriteError: matplotlib is not installed, or the file cannot be written.
    """
    kind = path.suffix.lower().lstrip(".")
    if kind not in _KINDS:
        raise WriteError(f"{path}: the chart of a sweep must be a *.png or *.svg file")
    if find_spec("matplotlib") is None:
        raise WriteError("charts need matplotlib, which is not installed: pip install 'penstock[chart]'")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    image = BytesIO()
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.plot([dot.value for dot in dots], [dot.time for dot in dots], marker="o", color="black", linewidth=1)
        for before, dot in zip((None, *dots), dots, strict=False):
            if before is None or before.name != dot.name:
                axes.annotate(dot.name, (dot.value, dot.time), xytext=(4, 6), textcoords="offset points", fontsize=6)
        axes.set_xlabel({"memory": "memory limit"}.get(variable, variable))
        axes.set_ylabel("time per microbatch")
        axes.grid(alpha=0.3)
        figure.savefig(image, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else {})
    with atomic_file(path) as file:
        file.write(image.getvalue())
