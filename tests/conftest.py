"""What all tests share, and which of them start processes.

A test that starts processes has the marker ``processes``: through a fixture that starts them, or by itself. `make
test-fast` leaves these out.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# The server of a process group's store looks up the name of whoever connects, in the thread that serves all: where no
# name server answers, that stalls every rank for as long as a lookup may take, five seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from runtime.workers import Workers

# A machine that does something else beside must not fail a law.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Tests run beside each other: several threads for one tensor would mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In the background of a script Ctrl-C is ignored, and would be by all processes that are started from here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _imports_frozen() -> None:
    """Have collections of garbage pass over what has been imported, which is far more than what a test makes."""
    gc.freeze()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four processes with gloo between them, for all tests."""
    from runtime.workers import Workers  # here, since most tests need no torch

    with Workers(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real browser, to look at pages."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("pages are tested in Chromium, which is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


#: Fixtures that start processes.
STARTING = {"workers", "browser"}
FAULTS = pytest.StashKey[int]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have matplotlib list the machine's fonts before any test: the first time, it starts a process for that."""
    if not hasattr(session.config, "workerinput"):
        importlib.import_module("matplotlib.font_manager")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start processes; with pytest-xdist, their files come first.

    They take longest and wait most: whatever is left to do while the last of them ends is short.
    """
    for item in items:
        if STARTING.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
    if hasattr(config, "workerinput"):
        first = {item.path for item in items if item.get_closest_marker("processes")}
        items.sort(key=lambda item: item.path not in first)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[FAULTS] = _faults_of_ended_processes()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """No test starts a process unless it is marked."""
    started = _faults_of_ended_processes() != item.stash[FAULTS]
    yield
    if started and not item.get_closest_marker("processes"):
        pytest.fail("the test has started a process: mark it with @pytest.mark.processes")


def _faults_of_ended_processes() -> int:
    """Page faults of all processes that this one has waited for: each of them adds some."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
