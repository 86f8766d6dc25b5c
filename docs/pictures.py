"""Draws the pictures of the README and the documentation. A test compares them with the files."""

from __future__ import annotations

from pathlib import Path

import penstock as ps

ASSETS = Path(__file__).parent / "assets"


def draw(folder: Path) -> None:
    """Draw every picture into a folder."""
    ps.simulate(ps.build("ZBVZeroBubble", ranks=4, microbatches=8)).write(folder / "timeline.png")


if __name__ == "__main__":
    draw(ASSETS)
