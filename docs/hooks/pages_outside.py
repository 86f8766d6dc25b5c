"""Makes pages of texts outside docs/: the changelog, how to contribute, the examples.

Links between them and the pages are written as GitHub needs them, and are rewritten here as the site needs them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig

ROOT: Final = Path(__file__).parents[2]

#: The page of each text.
TEXTS: Final = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}

#: The languages of launch files.
KINDS: Final = {".sh": "bash", ".yaml": "yaml"}

#: The target of a link to another file of the repository.
LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for source, page in TEXTS.items():
        files.append(File.generated(config, page, content=links_of_the_site((ROOT / source).read_text(), ROOT)))
    files.append(File.generated(config, "examples.md", content=examples()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Rewrite the links of a page that lead out of docs/."""
    return links_of_the_site(markdown, ROOT / "docs")


def examples() -> str:
    """Return the page of the examples: what each says of itself, and its code."""
    parts = ["# Examples", "Each of these programs runs in the tests."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts += [f"## {path.name}", f"```python\n{path.read_text()}```"]
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        parts += [f"## {path.name}", *cells(path)]
    for path in sorted((ROOT / "examples" / "clusters").iterdir()):
        parts += [f"## clusters/{path.name}", f"```{KINDS[path.suffix]}\n{path.read_text()}```"]
    return "\n\n".join(parts) + "\n"


def cells(notebook: Path) -> Iterator[str]:
    """Yield the cells of a notebook, with what they print, as text of a page."""
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        # A title in a cell is below that of the notebook.
        yield (
            f"```python\n{source}\n```" if cell["cell_type"] == "code" else re.sub(r"^#+ ", "### ", source, flags=re.M)
        )
        for output in cell.get("outputs", []):
            printed = "".join(output.get("text") or output.get("data", {}).get("text/plain", []))
            if printed:
                yield f"```text\n{printed.rstrip()}\n```"


def links_of_the_site(markdown: str, folder: Path) -> str:
    """Rewrite links of a text in this folder to files that have a page elsewhere on the site."""

    def rewritten(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if not target.is_relative_to(ROOT):
            return found[0]
        name = target.relative_to(ROOT).as_posix()
        anchor = found[2] or ""
        if name in TEXTS:
            return TEXTS[name] + anchor
        if target.parent == ROOT / "examples" and target.suffix == ".py":
            return f"examples.md#{target.name.replace('.', '')}"
        if target == ROOT / "examples":
            return "examples.md"
        return name.removeprefix("docs/") + anchor if folder == ROOT else found[0]

    return LINK.sub(rewritten, markdown)
