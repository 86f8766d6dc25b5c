"""Writes events for the command that has started the ranks, one JSON per line."""

from __future__ import annotations

import json
import sys
from typing import Any


def report(event: str, **facts: Any) -> None:
    """Write an event."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()
