"""Looks up, when it is needed, what programs may have replaced in ``penstock.pipelining.schedules``."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

_NAMES: Final = "penstock.pipelining.schedules"


def upstream_names() -> Any:
    """Get the module with the path of upstream's: where programs put functions of their own in place of those there."""
    return sys.modules.get(_NAMES) or import_module(_NAMES)
