"""The environment in which a Python process, and those that it starts, install the drop-in before anything else.

Python imports ``sitecustomize`` from its path when it starts; the folder ``startup`` has one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Says whether a process reports the replacement: the first one does, those that it starts do not.
VARIABLE: Final = "PENSTOCK_DROP_IN"
REPORTS: Final = "report"
QUIET: Final = "quiet"

_STARTUP: Final = str(Path(__file__).parent / "startup")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with what processes need to install the drop-in when they start."""
    rest = [place for place in given.get("PYTHONPATH", "").split(os.pathsep) if place and place != _STARTUP]
    return {**given, "PYTHONPATH": os.pathsep.join([_STARTUP, *rest]), VARIABLE: REPORTS}


def take_report() -> bool:
    """Return whether this process is to report the replacement; the processes that it starts are not."""
    found = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = QUIET
    return found == REPORTS and os.environ.get("RANK", "0") == "0"
