"""Draws a curve, such as the loss of a training run, as SVG for a page."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

from penstock.errors import WriteError
from penstock.view.ticks import ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH: Final = 720
_HEIGHT: Final = 260
_LEFT: Final = 56
_RIGHT: Final = _WIDTH - 24
_TOP: Final = 16
_BOTTOM: Final = _HEIGHT - 44
#: At most this many numbers on the vertical axis, besides 0.
_ROWS: Final = 5
#: About the width of a digit.
_DIGIT: Final = 9


def curve_of(points: Sequence[tuple[float, float]], *, x: str, y: str) -> str:
    """Return a curve through points, in their order; both axes start at 0.

    Args:
        points: pairs of numbers that are at least 0; a pair that is not finite leaves a gap.
        x: what the first numbers are.
        y: what the second numbers are.

    Raises:
        WriteError: no point is finite.
    """
    finite = [point for point in points if all(map(math.isfinite, point))]
    if not finite:
        raise WriteError(f"there is nothing to draw: no point of {y} by {x} is finite")
    across, up = (max(numbers) or 1.0 for numbers in zip(*finite, strict=True))
    lines = [f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_summary(finite, x, y)}">']
    for value, text in ticks(up, lambda _: _ROWS):
        at = _BOTTOM - value / up * (_BOTTOM - _TOP)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in ticks(across, lambda widest: int((_RIGHT - _LEFT) / _DIGIT / (widest + 3))):
        at = _LEFT + value / across * (_RIGHT - _LEFT)
        lines.append(f'<text x="{at:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{text}</text>')
    lines.append(f'<path class="trace" d="{_path(points, across, up)}"/>')
    lines.append(f'<text x="{_RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{escape(x)}</text>')
    lines.append(f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{escape(y)}</text>')
    return "\n".join([*lines, "</svg>"])


def _path(points: Sequence[tuple[float, float]], across: float, up: float) -> str:
    moves, joined = [], False
    for x, y in points:
        drawn = math.isfinite(x) and math.isfinite(y)
        if drawn:
            place = f"{_LEFT + x / across * (_RIGHT - _LEFT):.1f} {_BOTTOM - y / up * (_BOTTOM - _TOP):.1f}"
            moves.append(f"{'L' if joined else 'M'}{place}")
        joined = drawn
    return " ".join(moves)


def _summary(points: Sequence[tuple[float, float]], x: str, y: str) -> str:
    (first, begin), (last, end) = points[0], points[-1]
    return escape(f"{y} by {x}: {begin:.4g} at {first:g}, {end:.4g} at {last:g}")
