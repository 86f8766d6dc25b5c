"""Prepares the code blocks of pages for readers."""

from __future__ import annotations

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Remove what only the tests of a page need, and highlight doctests as Python sessions, with prompts not copied."""
    markdown = re.sub(r"^<!-- .*?-->\n", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^( *)```python\n(?= *>>> )", r"\1```pycon\n", markdown, flags=re.MULTILINE)
