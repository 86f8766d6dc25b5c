"""Imports what a user names on the command line as ``module:name`` or ``file.py:name``."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import SplitError


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
        raise SplitError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


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
        raise SplitError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
