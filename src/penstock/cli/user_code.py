"""Imports what a user names on the command line as ``module:name`` or ``file.py:name``."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import PenstockError, RunError, SplitError


def load(text: str) -> Any:
    """Import a name from a module or a file; modules are also found in the current folder.

    >>> load("math:tau") > 6
    True
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise SplitError(f"{text!r} names no Python object; write e.g. my_package.models:build or model.py:build")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            near = get_close_matches(part, dir(value))
            raise SplitError(f"{place} has no {part!r}{f'; did you mean {near[0]}?' if near else ''}")
        value = getattr(value, part)
    return value


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Report what a user's code raises in here in one line that names the place in that code.

    Args:
        what: what runs, as the user calls it.
    """
    try:
        yield
    except PenstockError as error:
        cause = error.__cause__
        while cause is not None and cause.__cause__ is not None:
            cause = cause.__cause__
        place = None if cause is None else _place(cause)
        if place is None:
            raise
        raise RunError(f"{error}; raised in {place}") from error
    except Exception as error:
        place = _place(error)
        if place is None:
            raise
        raise RunError(f"{what} failed in {place}: {type(error).__name__}: {error}") from error


def _place(error: BaseException) -> str | None:
    """Return the innermost place in a user's file that an error came through; None if there is none."""
    ours = str(Path(__file__).parents[1])
    libraries = (ours, sys.base_prefix, sys.prefix, "<")
    frames = traceback.extract_tb(error.__traceback__)
    mine = [
        frame for frame in frames if not frame.filename.startswith(libraries) and "site-packages" not in frame.filename
    ]
    if not mine:
        return None
    return f"{_shown(mine[-1].filename)}, line {mine[-1].lineno}, in {mine[-1].name}"


def _described(error: BaseException) -> str:
    place = _place(error)
    return f"{type(error).__name__}: {error}{f' ({place})' if place else ''}"


def _shown(filename: str) -> str:
    path, here = Path(filename), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _from_module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise SplitError(f"there is no module {name!r} in {folder} or installed") from None
        raise SplitError(f"{name} cannot be imported: {error}") from error
    except Exception as error:
        raise SplitError(f"{name} cannot be imported: {_described(error)}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SplitError(f"there is no file {path}")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SplitError(f"{path} cannot be imported: {_described(error)}") from error
    return module
