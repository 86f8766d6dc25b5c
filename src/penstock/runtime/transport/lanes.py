"""The lanes of a communication model: which transfers are posted, and which may complete.

It has no threads and no locks: its user makes one call at a time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import torch

from penstock.errors import MetadataError
from penstock.execution.value_spec import describe_tensor

if TYPE_CHECKING:
    from penstock.graph.comm_model import CommModel

    #: The rank that sends, the rank that receives, the tag.
    Message = tuple[int, int, int]


class PostedTransfer:
    """A send or a receive that has been posted.

    Attributes:
        label: the operation of its rank that posted it.
        is_done: whether it has completed, or failed.
        error: why it failed.
    """

    __slots__ = ("error", "is_done", "label", "peer", "rank", "sends", "tag", "tensor")

    def __init__(self, rank: int, peer: int, tag: int, tensor: torch.Tensor, label: str | None, *, sends: bool) -> None:
        self.rank = rank
        self.peer = peer
        self.tag = tag
        self.tensor: torch.Tensor | None = tensor
        self.label = label or f"a {'send to' if sends else 'receive from'} rank {peer} (tag {tag})"
        self.sends = sends
        self.is_done = False
        self.error: MetadataError | None = None

    @property
    def message(self) -> Message:
        """The message that it sends or receives."""
        return (self.rank, self.peer, self.tag) if self.sends else (self.peer, self.rank, self.tag)


class Lanes:
    """Queues of transfers. Only the head of a queue may complete, when the model allows it; the others wait."""

    def __init__(self, model: CommModel) -> None:
        self.model = model
        self._queues: dict[object, deque[PostedTransfer]] = defaultdict(deque)
        self._sent: dict[Message, deque[torch.Tensor]] = defaultdict(deque)
        self._in_flight: dict[tuple[int, int], list[Message]] = defaultdict(list)

    def post(self, transfer: PostedTransfer) -> list[PostedTransfer]:
        """Put a transfer into its lane; returns all transfers that complete because of it."""
        queue = self._queue(transfer.rank, transfer.peer, transfer.tag, sends=transfer.sends)
        queue.append(transfer)
        done: list[PostedTransfer] = []
        queues = [queue] if queue[0] is transfer else []
        while queues:
            queue = queues.pop()
            if queue:
                queues += self._move(queue, done)
        return done

    def head(self, transfer: PostedTransfer) -> PostedTransfer:
        """Find the first transfer in the lane of a transfer, which may be itself."""
        return self._queue(transfer.rank, transfer.peer, transfer.tag, sends=transfer.sends)[0]

    def awaited(self, head: PostedTransfer) -> PostedTransfer | None:
        """Find the transfer of the other rank that the head of a lane waits for; None if it has not been posted."""
        source, target, tag = self._in_flight[head.rank, head.peer][0] if self.is_full(head) else head.message
        receives = head.sends
        rank, peer = (target, source) if receives else (source, target)
        for other in self._queue(rank, peer, tag, sends=not receives):
            if other.message == (source, target, tag) and other.sends != receives:
                return other
        return None

    def is_full(self, head: PostedTransfer) -> bool:
        """Whether the head of a lane is a send that waits for room."""
        return head.sends and bool(self.model.capacity) and not self._has_room(head)

    def _queue(self, rank: int, peer: int, tag: int, *, sends: bool) -> deque[PostedTransfer]:
        lanes = self.model.lanes
        if lanes == "rank":
            return self._queues[rank]
        if lanes == "pair":
            return self._queues[rank, peer]
        if lanes == "direction":
            return self._queues[rank, peer, sends]
        return self._queues[rank, peer, sends, tag]

    def _move(self, queue: deque[PostedTransfer], done: list[PostedTransfer]) -> list[deque[PostedTransfer]]:
        """Complete the head of a lane if possible; returns the lanes whose heads may complete because of it."""
        if self.model.capacity == 0:
            return self._match(queue, done)
        return self._fill(queue, done) if queue[0].sends else self._drain(queue, done)

    def _match(self, queue: deque[PostedTransfer], done: list[PostedTransfer]) -> list[deque[PostedTransfer]]:
        """Rendezvous: a send and its receive complete together, when both are at the heads of their lanes."""
        head = queue[0]
        other_queue = self._queue(head.peer, head.rank, head.tag, sends=not head.sends)
        if not other_queue or other_queue[0].message != head.message or other_queue[0].sends == head.sends:
            return []
        send, receive = (head, other_queue[0]) if head.sends else (other_queue[0], head)
        assert send.tensor is not None
        send.error = _copy(send.tensor, receive)
        done += [_complete(queue), _complete(other_queue)]
        return [queue, other_queue]

    def _fill(self, queue: deque[PostedTransfer], done: list[PostedTransfer]) -> list[deque[PostedTransfer]]:
        """Complete a send into a buffer when there is room for it."""
        send = queue[0]
        if not self._has_room(send):
            return []
        assert send.tensor is not None
        self._sent[send.message].append(send.tensor.detach().clone())
        self._in_flight[send.rank, send.peer].append(send.message)
        done.append(_complete(queue))
        return [queue, self._queue(send.peer, send.rank, send.tag, sends=False)]

    def _drain(self, queue: deque[PostedTransfer], done: list[PostedTransfer]) -> list[deque[PostedTransfer]]:
        """Complete a receive from a buffer when its message is there."""
        receive = queue[0]
        if not self._sent.get(receive.message):
            return []
        _copy(self._sent[receive.message].popleft(), receive)
        self._in_flight[receive.peer, receive.rank].remove(receive.message)
        if not self._sent[receive.message]:
            del self._sent[receive.message]
        done.append(_complete(queue))
        # The room may admit a send of another tag. It is in this queue: lanes per message have unlimited room.
        return [queue, self._queue(receive.peer, receive.rank, receive.tag, sends=True)]

    def _has_room(self, send: PostedTransfer) -> bool:
        """Whether a send fits into the buffer. Several tensors with one tag, one after the other, are one message."""
        capacity = self.model.capacity
        if capacity is None or self.model.lanes == "message":
            return True
        in_flight = self._in_flight[send.rank, send.peer]
        return send.message in in_flight or len(set(in_flight)) < capacity


def _complete(queue: deque[PostedTransfer]) -> PostedTransfer:
    transfer = queue.popleft()
    transfer.is_done = True
    transfer.tensor = None
    return transfer


def _copy(sent: torch.Tensor, receive: PostedTransfer) -> MetadataError | None:
    """Copy what was sent into the tensor of a receive, or fail both; returns the error, if any."""
    target = receive.tensor
    assert target is not None
    if sent.shape != target.shape or sent.dtype != target.dtype:
        receive.error = MetadataError(
            f"rank {receive.peer} sent {describe_tensor(sent)}, but rank {receive.rank} expects "
            f"{describe_tensor(target)} in {receive.label} (tag {receive.tag})"
        )
        return receive.error
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(sent)
    return None
