"""Writes timelines as a page: a self-contained HTML file to explore in any browser.

The files in ``assets/`` are combined into one, together with the data as JSON. The scripts put text into the page as
text only, and the content policy of the page allows no other scripts and no requests.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files as resources
from string import Template
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import WriteError
from penstock.ir.formats.files import atomic_file
from penstock.simulation.timeline import WRITERS, Timeline
from penstock.view.page_data import facts_of_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

#: The scripts in the order in which they depend on each other.
_SCRIPTS: Final = (
    "numbers.js",
    "timeline.js",
    "layout.js",
    "brushes.js",
    "columns.js",
    "labels.js",
    "blocks.js",
    "memory.js",
    "lines.js",
    "axis.js",
    "words.js",
    "focus.js",
    "header.js",
    "controls.js",
    "main.js",
)

#: The source of a content policy that allows nothing.
_NOTHING: Final = "'none'"

#: JSON escapes of the characters that could end the element that contains the JSON.
_ESCAPES: Final = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_page(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    *,
    titles: Sequence[str] | None = None,
    memory_limit: float | None = None,
) -> None:
    """Write a page with one timeline, or with several below each other on one time axis.

    Args:
        timelines: the timelines.
        path: the file; an existing one is replaced.
        titles: their titles; by default the names of their schedules.
        memory_limit: the memory of a rank, drawn as a line.

    Raises:
        WriteError: the file cannot be written, or there is nothing to draw.
    """
    shown = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    page = Page.of(shown, titles=titles, memory_limit=memory_limit)
    with atomic_file(path) as file:
        file.write(page.text.encode())


@dataclass(frozen=True)
class Page:
    """A page with its parts.

    Attributes:
        titles: the titles of its timelines.
        script: its only script.
        style: its only style.
        text: all of it, as HTML.
    """

    titles: tuple[str, ...]
    script: str
    style: str
    text: str

    @classmethod
    def of(
        cls, timelines: Sequence[Timeline], *, titles: Sequence[str] | None = None, memory_limit: float | None = None
    ) -> Page:
        """Make a page with timelines below each other; see ``write_page``."""
        if not timelines:
            raise WriteError("a page needs at least one timeline")
        if titles is not None and len(titles) != len(timelines):
            raise WriteError(f"there are {len(timelines)} timelines, but {len(titles)} titles; pass one for each")
        if memory_limit is not None and not (math.isfinite(memory_limit) and memory_limit >= 0):
            raise WriteError(f"memory_limit must be at least 0, got {memory_limit!r}")
        named = tuple(map(str, titles)) if titles is not None else tuple(map(_title, timelines))
        style = read_asset("page.css")
        script = "(() => {\n'use strict';\n" + "\n".join(map(read_asset, _SCRIPTS)) + "})();\n"
        text = Template(read_asset("page.html")).substitute(
            policy=policy_of(scripts=[script], styles=[style]),
            style=style,
            script=script,
            facts=_json(facts_of_page(timelines, named, memory_limit)),
        )
        return cls(named, script, style, text)


def policy_of(*, scripts: Iterable[str], styles: Iterable[str]) -> str:
    """Return a content policy that loads nothing, and allows only these scripts and styles, by their hashes."""
    allowed = {"script-src": scripts, "style-src": styles}
    sources = [f"{kind} {' '.join(sorted(set(map(_hash, texts)))) or _NOTHING}" for kind, texts in allowed.items()]
    return "; ".join([f"default-src {_NOTHING}", *sources, f"base-uri {_NOTHING}", f"form-action {_NOTHING}"])


def _title(timeline: Timeline) -> str:
    name = str(timeline.schedule.metadata.get("name") or "schedule")
    return name if timeline.measured is None else f"{name}, measured"


def read_asset(name: str) -> str:
    """Return the text of a file in ``assets/``."""
    return (resources("penstock.view") / "assets" / name).read_text(encoding="utf-8")


def _json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


WRITERS[".html"] = write_page
