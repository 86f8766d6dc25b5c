"""Ends a training loop on all ranks after the same step, e.g. when a cluster sends SIGTERM.

``stop.py`` is what a script holds; ``all_processes.py`` reaches the processes beyond one pipeline.
"""

from __future__ import annotations

from penstock.runtime.stopping.stop import Stop, stop_on_signal

__all__ = ["Stop", "stop_on_signal"]
