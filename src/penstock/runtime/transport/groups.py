"""A process group of the transport's own: its tags and its end touch nobody else."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch
import torch.distributed as dist

from penstock.graph.models import CommModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

    #: Posts a send or a receive: tensors, peer, tag.
    Post = Callable[[Sequence[torch.Tensor], int, int], "Work"]

#: Tags that no transfer of a schedule has.
WARM_UP_TAG: Final = 2**31 - 2
_CLOSING_TAG: Final = 2**31 - 1


class Work(Protocol):
    """What torch gives for a transfer that has been posted."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return when it is done."""


class Connections(Protocol):
    """What a process group or one of its backends has for transfers."""

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        """Post a send."""

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        """Post a receive."""

    def abort(self) -> None:
        """End everything that is under way, if the backend can."""


class OwnGroup:
    """Connections between the ranks of a group, apart from all others.

    For gloo it is the bare backend: it costs less for each call than a process group, it is known to nobody else, and
    its members need not have made the same number of other groups before. For any other backend it is a process group,
    for which they must have: torch names it by that number.

    Attributes:
        model: how they behave.
        device: where a tensor may be that they carry.
    """

    def __init__(self, parent: dist.ProcessGroup, store: Store, timeout: timedelta) -> None:
        backend = str(dist.get_backend(parent))
        self._rank, self._ranks = parent.rank(), parent.size()
        self._group: dist.ProcessGroup | None = None
        self._is_gloo = backend == "gloo"
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = torch.device("cpu") if self._is_gloo or accelerator is None else accelerator
        if self._is_gloo:
            # gloo matches messages by tag, in whichever order they were posted.
            self.model = CommModel("rendezvous", lanes="message")
            gloo = dist.ProcessGroupGloo(store, self._rank, self._ranks, timeout)
            self._connections: Connections | None = cast("Connections", gloo)
            return
        self.model = CommModel("rendezvous", lanes="pair")
        members = dist.get_process_group_ranks(parent)
        group = dist.new_group(
            members, timeout=timeout, backend=backend, use_local_synchronization=True, sort_ranks=False
        )
        self._group = group
        self._connections = cast("Connections", group)

    def posts(self) -> tuple[Post, Post]:
        """The functions that post a send and a receive; ranks are those in the group."""
        assert self._connections is not None
        return self._connections.send, self._connections.recv

    def lost(self) -> list[int]:
        """The ranks to which the connection is closed, as far as that can be known. Only to be asked when one is."""
        found: list[int] = []
        if self._connections is None or not self._is_gloo:
            return found
        for peer in range(self._ranks):
            if peer != self._rank:
                try:
                    self._connections.recv([torch.zeros(1)], peer, _CLOSING_TAG)
                except RuntimeError:
                    found.append(peer)
        return found

    def end_waits(self) -> None:
        """Make every wait for a transfer raise, here and at the peers. Nothing can be sent afterwards."""
        connections = self._connections
        if connections is None:
            return
        if not self._is_gloo:
            with contextlib.suppress(Exception):
                connections.abort()
            return
        # Neither abort nor shutdown wakes a thread that waits. A wait that times out does: gloo then closes all pairs.
        # A pair that is closed already would not let it wait: so each gets its turn.
        for peer in range(self._ranks):
            if peer != self._rank:
                with contextlib.suppress(Exception):
                    connections.recv([torch.zeros(1)], peer, _CLOSING_TAG).wait(timedelta(milliseconds=1))

    def destroy(self) -> None:
        """Give it back."""
        self._connections = None
        if self._group is not None and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group(self._group)
        self._group = None
