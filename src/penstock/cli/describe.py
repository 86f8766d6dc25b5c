"""``penstock describe``: show how a model is split into stages."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.source import Json
from penstock.cli.user_code import load, user_code
from penstock.errors import RunError, SplitError


def describe(
    model: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="A model, or a function that builds one; also FILE.py:NAME.")
    ],
    stages: Annotated[int | None, typer.Option("--stages", min=1, help="Number of stages.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", metavar="STRING|FILE", help="A layout in Megatron's notation, or a YAML or JSON file."
        ),
    ] = None,
    example: Annotated[
        str | None,
        typer.Option("--example", metavar="MODULE:NAME", help="(args, kwargs) of a small call, or a function for it."),
    ] = None,
    machine: Json = False,
) -> None:
    """Show how a model is split into stages: modules, parameters, bytes and cost of each, edges and ties.

    The cost is estimated from the parameters. A model that is no nn.Sequential and no Hugging Face text model needs an
    example, on which it runs once. Its parameters are not kept in memory if a function builds it.

    Example: penstock describe penstock.runtime.demo:build --stages 4 --example penstock.runtime.demo:example

    Example: penstock describe my_models.py:build --layout "Et|tt|tL"
    """
    if find_spec("torch") is None:
        raise RunError("penstock describe needs torch: pip install 'penstock[torch]'")
    if (stages is None) == (layout is None):
        raise RunError("pass either --stages or --layout, e.g. --stages 4")
    split = import_module("penstock.models.split").split  # its layer imports torch
    built = load(model)
    given = None if example is None else example_from(example)
    try:
        with user_code(model):
            made = split(built, stages=stages, layout=None if layout is None else layout_from(layout), example=given)
    except SplitError as error:
        if example is None and "example=" in str(error):
            raise RunError(f"{error}; here, --example FILE.py:NAME names it") from error
        raise
    typer.echo(json.dumps(_facts(made), indent=2) if machine else made.describe().rstrip("\n"))


def example_from(text: str) -> Any:
    """Import an example, or what a function for it returns."""
    given = load(text)
    if not callable(given):
        return given
    with user_code(text):
        return given()


def layout_from(text: str) -> Any:
    """Return the layout in a file, or the text."""
    path = Path(text)
    if path.suffix not in (".yaml", ".yml", ".json"):
        return text
    if not path.is_file():
        raise SplitError(f"there is no file {path}")
    return import_module("penstock.models.layout").from_yaml(path.read_text())  # JSON is YAML, too


def _facts(made: Any) -> dict[str, Any]:
    facts: dict[str, Any] = import_module("penstock.models.describe").to_plain(made.model, made.description)
    return facts
