"""Announcements between all processes that stop together: those of one pipeline, or of several."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from penstock.errors import StageError, TransportError
from penstock.runtime.transport.connecting import open_mailbox
from penstock.runtime.transport.failure_messages import pipeline_failed_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.runtime.transport.mailbox import Round
    from penstock.runtime.transport.protocol import Announcement, Failure, Transport

    #: Announces a few bytes to all processes.
    Announce = Callable[[bytes], Announcement]

_TOPIC: Final = "stop"
#: How many seconds to wait for a process of another pipeline.
_PATIENCE: Final = 300.0
#: How often to look for what it announces, at first and later, and for a failure of this pipeline, in seconds.
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.1
_ASKED_EVERY: Final = 0.25


def announce_to(group: dist.ProcessGroup | None, transport: Transport) -> Announce | None:
    """Find how to announce bytes to all processes of a group, by default all there are. All of them call it.

    Returns:
        A function that does so; None if this process is the only one.
    """
    whole = _whole_group(group, transport)
    if whole is None and transport.ranks == 1:
        return None
    if whole is None:
        return lambda data: transport.announce(_TOPIC, data, range(transport.ranks))
    rank, ranks = whole.rank(), whole.size()
    mailbox = open_mailbox(whole, _PATIENCE)

    def announce(data: bytes) -> Announcement:
        messages = mailbox.announce(_TOPIC, data, range(ranks), lambda _: None)
        return _Announced(messages, partial(transport.failure, max_age=_ASKED_EVERY), rank)

    return announce


def _whole_group(group: dist.ProcessGroup | None, transport: Transport) -> dist.ProcessGroup | None:
    """Find the group of all processes; None if these are the ranks of the pipeline."""
    if transport.in_one_process or not (dist.is_available() and dist.is_initialized()):
        return None
    whole = dist.group.WORLD if group is None else group
    if not isinstance(whole, dist.ProcessGroup):
        raise StageError("this process is not a member of the given group; pass one that contains all its ranks")
    return None if whole.size() == transport.ranks else whole


class _Announced:
    """What the processes of several pipelines announce to each other."""

    def __init__(self, messages: Round, failure: Callable[[], Failure | None], rank: int) -> None:
        self._messages = messages
        self._failure = failure
        self._rank = rank

    def known(self) -> list[bytes | None]:
        """Get what has been announced so far."""
        return self._messages.known()

    def collect(self) -> list[bytes]:
        """Wait for what all announce, or for a failure of this pipeline."""
        end, pause = time.monotonic() + _PATIENCE, _FIRST_PAUSE
        while missing := [rank for rank, data in enumerate(self.known()) if data is None]:
            failure = self._failure()
            if failure is not None:
                raise pipeline_failed_error(failure)
            if time.monotonic() > end:
                raise TransportError(_describe(self._rank, missing), peer=missing[0])
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self._messages.collect()


def _describe(rank: int, missing: Sequence[int]) -> str:
    return (
        f"process {rank} waited {_PATIENCE:.0f} s in Stop.requested() for process "
        f"{', '.join(map(str, missing))}; all of them must call it equally often"
    )
