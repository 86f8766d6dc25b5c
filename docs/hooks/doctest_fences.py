"""Highlights doctests in fences marked as Python: prompts and output are told apart, and prompts are not copied."""

from __future__ import annotations

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Mark the fences that begin with a prompt as a Python session."""
    return re.sub(r"^( *)```python\n(?= *>>> )", r"\1```pycon\n", markdown, flags=re.MULTILINE)
