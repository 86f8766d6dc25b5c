from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from runtime.workers import Workers

# A machine that does something else beside must not fail a law.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# In the background of a script Ctrl-C is ignored, and would be by all processes that are started from here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four processes with gloo between them, for all tests."""
    from runtime.workers import Workers  # here, since most tests need no torch

    with Workers(4) as pool:
        yield pool
