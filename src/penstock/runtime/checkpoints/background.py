"""Saves in a thread of its own, behind training: it yields the processor to whatever else wants it."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger(__name__)
#: How nice the thread is to others, from 0 to 19.
_NICENESS: Final = 19


class Saving:
    """A checkpoint that is being saved.

    Attributes:
        path: where it is when it is complete.
        step: its step.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        self._error: BaseException | None = None
        self._is_reported = False
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the save has ended: the checkpoint is complete, or ``wait()`` raises why it is not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            CheckpointError: it could not be saved; every rank raises it.
        """
        self._ended.wait()
        self._is_reported = True
        if self._error is not None:
            raise self._error

    def run(self, write: Callable[[], None]) -> None:
        """Write it now."""
        self._write(write)
        self.wait()

    def start(self, write: Callable[[], None]) -> None:
        """Write it in a thread. The process does not end before the thread does."""
        threading.Thread(target=self._run_behind, args=(write,), name=f"penstock saves step {self.step}").start()

    def settle(self) -> None:
        """Wait until it has ended; raise its error unless that has been raised already."""
        self._ended.wait()
        if not self._is_reported:
            self.wait()

    def _run_behind(self, write: Callable[[], None]) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux, of this thread alone
        self._write(write)
        if self._error is not None:
            logger.error("%s could not be saved: %s", self.path, self._error)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CheckpointError as error:
            self._error = error
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ended.set()
