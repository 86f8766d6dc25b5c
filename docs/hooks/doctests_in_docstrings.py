"""Puts the doctests of docstrings into fences: they stand without a heading, and would be read as quotations."""

from __future__ import annotations

from griffe import Extension, Object


class DoctestsInDocstrings(Extension):
    """Rewrites every docstring as it is loaded."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Put the doctests of one docstring into fences."""
        if obj.docstring:
            obj.docstring.value = with_fences(obj.docstring.value)


def with_fences(text: str) -> str:
    r"""Return the text with each doctest, which ends with an empty line, in a fence.

    >>> with_fences("Add:\n\n>>> 1 + 1").splitlines()
    ['Add:', '', '```pycon', '>>> 1 + 1', '```']
    """
    lines: list[str] = []
    fence: str | None = None
    for line in text.splitlines():
        content = line.lstrip()
        if fence is None and content.startswith(">>> "):
            fence = line[: len(line) - len(content)]
            lines.append(f"{fence}```pycon")
        elif fence is not None and not content:
            lines.append(f"{fence}```")
            fence = None
        lines.append(line)
    if fence is not None:
        lines.append(f"{fence}```")
    return "\n".join(lines)
