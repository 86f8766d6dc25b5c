"""Draws the pictures of the schedules, while the site is built."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

import penstock as ps
from penstock.schedules.registry import RECIPES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a picture of every schedule that trains."""
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            if recipe.name != "ForwardOnly":
                path = Path(folder) / f"{recipe.name}.svg"
                ps.simulate(ps.build(recipe.name, ranks=4, microbatches=8)).write(path)
                files.append(File.generated(config, f"assets/schedules/{path.name}", content=path.read_text()))
    return files
