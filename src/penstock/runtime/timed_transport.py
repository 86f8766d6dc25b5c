"""A transport that records every message and every wait for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock.execution.channel import Pending
    from penstock.runtime.recording import Recording
    from penstock.runtime.transport.protocol import Transport


class TimedTransport:
    """A transport that records every message and every wait for one."""

    def __init__(self, transport: Transport, record: Recording) -> None:
        self._transport = transport
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send."""
        pending = self._transport.send(tensor, peer, tag)
        self._record.note_sent(tensor, tag)
        return _TimedTransfer(pending, self._record, None)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive."""
        return _TimedTransfer(self._transport.receive(tensor, peer, tag), self._record, tag)


class _TimedTransfer:
    """A transfer that records how long it was waited for; the tag is that of a receive."""

    __slots__ = ("_pending", "_record", "_tag")

    def __init__(self, pending: Pending, record: Recording, tag: int | None) -> None:
        self._pending = pending
        self._record = record
        self._tag = tag

    def wait(self) -> object:
        """Return when it is done."""
        return self._record.wait(self._pending, self._tag)
