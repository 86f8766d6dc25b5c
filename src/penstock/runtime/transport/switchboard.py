"""Connects the ranks of a pipeline that are threads of one process."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from penstock.graph.wait_chain import WaitingRank, describe_wait_chain
from penstock.runtime.transport.failure_messages import pipeline_failed_error, step_error
from penstock.runtime.transport.lanes import Lanes, PostedTransfer
from penstock.runtime.transport.protocol import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.graph.comm_model import CommModel


class Wait(NamedTuple):
    """What a rank waits for.

    Attributes:
        label: the operation or the call that it waits in.
        transfer: the transfer that it waits for, if any.
        peer: the rank that it waits for a message from, if any.
        topic: the topic of that message, and its number, if it is an announcement.
        round: the number of the exchange that it waits for, if any.
    """

    label: str
    transfer: PostedTransfer | None = None
    peer: int | None = None
    topic: tuple[str, int] | None = None
    round: int | None = None


class Announced(NamedTuple):
    """The messages that the members of a topic leave for each other.

    Attributes:
        topic: the topic, and the number of these messages.
        messages: by rank, as far as they are there.
    """

    topic: tuple[str, int]
    messages: dict[int, bytes]


class Switchboard:
    """The state that all ranks share. A rank waits only in here, so that a deadlock is noticed: all ranks wait."""

    def __init__(self, ranks: int, model: CommModel) -> None:
        self.ranks = ranks
        self.model = model
        self.failure: Failure | None = None
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # torch does export it
        self._lanes = Lanes(model)
        self._lock = threading.Lock()
        self._changed = [threading.Condition(self._lock) for _ in range(ranks)]
        self._waits: list[Wait | None] = [None] * ranks
        self._finished = [False] * ranks
        self._messages: dict[tuple[int, int], deque[bytes]] = {}
        self._announced: dict[tuple[str, int], dict[int, bytes]] = {}
        self._topics_of: list[Counter[str]] = [Counter() for _ in range(ranks)]
        self._rounds: dict[int, dict[int, bytes]] = {}
        self._round_of = [0] * ranks

    def post(self, transfer: PostedTransfer) -> None:
        """Put a transfer into its lane, without waiting."""
        with self._lock:
            self._check_alive(transfer.rank)
            for done in self._lanes.post(transfer):
                waiting = self._waits[done.rank]
                if waiting is not None and waiting.transfer is done:
                    self._wake(done.rank)

    def wait_for(self, transfer: PostedTransfer, label: str | None) -> None:
        """Return when a transfer is done; raise its error if it has one."""
        if not transfer.is_done:
            with self._lock:
                if not transfer.is_done:
                    self._wait(transfer.rank, Wait(label or transfer.label, transfer=transfer))
                if not transfer.is_done:
                    raise self._step_error()
        if transfer.error is not None:
            raise transfer.error

    def exchange(self, rank: int, data: bytes, label: str) -> list[bytes]:
        """Share bytes with all ranks; returns those of every rank, in order."""
        with self._lock:
            self._check_alive(rank)
            number = self._round_of[rank]
            self._round_of[rank] += 1
            messages = self._rounds.setdefault(number, {})
            messages[rank] = data
            if len(messages) == self.ranks:
                del self._rounds[number]  # the round is complete, and every rank holds its messages
                for other, wait in enumerate(self._waits):
                    if wait is not None and wait.round == number:
                        self._wake(other)
            else:
                self._wait(rank, Wait(label, round=number))
            if len(messages) < self.ranks:
                raise self._step_error()
            return [messages[other] for other in range(self.ranks)]

    def send_bytes(self, rank: int, peer: int, data: bytes) -> None:
        """Leave a message for a peer."""
        with self._lock:
            self._check_alive(rank)
            self._messages.setdefault((rank, peer), deque()).append(data)
            wait = self._waits[peer]
            if wait is not None and wait.peer == rank and wait.topic is None:
                self._wake(peer)

    def receive_bytes(self, rank: int, peer: int, label: str) -> bytes:
        """Wait for the next message from a peer."""
        with self._lock:
            self._check_alive(rank)
            messages = self._messages.setdefault((peer, rank), deque())
            if not messages:
                self._wait(rank, Wait(label, peer=peer))
            if not messages:
                raise self._step_error()
            return messages.popleft()

    def announce(self, rank: int, topic: str, data: bytes, members: Sequence[int]) -> Announced:
        """Leave a message for all members of a topic."""
        with self._lock:
            self._check_alive(rank)
            place = topic, self._topics_of[rank][topic]
            self._topics_of[rank][topic] += 1
            messages = self._announced.setdefault(place, {})
            messages[rank] = data
            if len(messages) == len(members):
                del self._announced[place]  # every member holds the messages
            for other, wait in enumerate(self._waits):
                if wait is not None and wait.topic == place and wait.peer == rank:
                    self._wake(other)
            return Announced(place, messages)

    def await_announced(self, rank: int, peer: int, announced: Announced, label: str) -> bytes:
        """Wait for what a member announces."""
        with self._lock:
            self._check_alive(rank)
            if peer not in announced.messages:
                self._wait(rank, Wait(label, peer=peer, topic=announced.topic))
            if peer not in announced.messages:
                raise self._step_error()
            return announced.messages[peer]

    def fail(self, failure: Failure) -> Failure:
        """End all waits; returns the failure that was reported first."""
        with self._lock:
            return self._fail(failure)

    def close(self, rank: int) -> None:
        """Note that a rank has finished; ranks that wait for it fail."""
        with self._lock:
            self._finished[rank] = True
            self._find_deadlock()

    # With the lock held ---------------------------------------------------------------------------------------------

    def _check_alive(self, rank: int) -> None:
        if self.failure is not None:
            raise pipeline_failed_error(self.failure)
        if self._finished[rank]:
            raise pipeline_failed_error(Failure(rank, f"the transport of rank {rank} is closed"))

    def _step_error(self) -> Exception:
        assert self.failure is not None
        return step_error(self.failure)

    def _wait(self, rank: int, wait: Wait) -> None:
        """Return when another rank has woken this one: what it waits for is there, or there is a failure."""
        if self.failure is not None:
            return
        self._waits[rank] = wait
        self._find_deadlock()
        try:
            while self._waits[rank] is wait:
                self._changed[rank].wait()
        finally:
            self._waits[rank] = None

    def _wake(self, rank: int) -> None:
        # It counts as running from now on, not from when its thread is scheduled.
        self._waits[rank] = None
        self._changed[rank].notify()

    def _fail(self, failure: Failure) -> Failure:
        if self.failure is None:
            self.failure = failure
            for rank in range(self.ranks):
                self._wake(rank)
        return self.failure

    def _find_deadlock(self) -> None:
        """Fail if all ranks wait: every transfer that can complete has done so, so they would wait forever."""
        waiting = [rank for rank, wait in enumerate(self._waits) if wait is not None]
        if self.failure is None and waiting and len(waiting) + sum(self._finished) == self.ranks:
            self._fail(self._deadlock(waiting[0]))

    def _deadlock(self, rank: int) -> Failure:
        """Follow the waits from a rank to a cycle, or to a rank that has finished, and describe them."""
        links: list[WaitingRank] = []
        seen: dict[tuple[int, int], int] = {}
        wanted: PostedTransfer | None = None
        while not self._finished[rank]:
            link, stuck, following, wanted = self._link(rank, wanted)
            if (rank, stuck) in seen:
                links = links[seen[rank, stuck] :]
                first = min(range(len(links)), key=lambda number: links[number].rank)
                links = links[first:] + links[:first]
                return self._describe(links, f"rank {links[0].rank}")
            seen[rank, stuck] = len(links)
            links.append(link)
            rank = following
        return self._describe(links, f"rank {rank}, which has finished; all ranks must run the same steps")

    def _describe(self, links: list[WaitingRank], end: str) -> Failure:
        rank = links[0].rank
        wait = self._waits[rank]
        message = f"deadlock: {describe_wait_chain(links, end)} (under {self.model})"
        return Failure(rank, message, action=wait.label if wait is not None else None)

    def _link(self, rank: int, wanted: PostedTransfer | None) -> tuple[WaitingRank, int, int, PostedTransfer | None]:
        """Find where a rank is stuck (its link of the chain, and an id of the transfer), and what comes after it.

        Args:
            rank: the rank.
            wanted: what it has posted that the previous rank waits for; None if it has yet to post that.

        Returns:
            The link, the id, the rank that it waits for, and what that one has posted for it, if anything.
        """
        wait = self._waits[rank]
        assert wait is not None
        transfer = wanted or wait.transfer
        if transfer is None:
            return WaitingRank(rank, wait.label), 0, self._first_missing(wait), None
        head = self._lanes.head(transfer)
        label = transfer.label if wanted is not None else wait.label
        is_full = self._lanes.is_full(head)
        if head is transfer:
            link = WaitingRank(rank, label, is_lane_full=is_full)
        else:
            link = WaitingRank(rank, head.label, blocked=label, is_lane_full=is_full)
        return link, id(head), head.peer, self._lanes.awaited(head)

    def _first_missing(self, wait: Wait) -> int:
        if wait.peer is not None:
            return wait.peer
        assert wait.round is not None
        return next(other for other in range(self.ranks) if self._round_of[other] <= wait.round)
