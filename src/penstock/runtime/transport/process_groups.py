"""The transport's own process group: its tags, and its end, affect no other group."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, cast

import torch
import torch.distributed as dist

from penstock.errors import TransportError
from penstock.graph.comm_model import CommModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

    #: Posts a send or a receive: tensors, peer, tag.
    Post = Callable[[Sequence[torch.Tensor], int, int], "Work"]

#: Tags that no transfer of a schedule has.
WARM_UP_TAG: Final = 2**31 - 2
_CLOSING_TAG: Final = 2**31 - 1
#: The common element types that NCCL moves as they are. Backends that are not listed get bytes.
_NATIVE_DTYPES: Final = {
    "nccl": frozenset(
        {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8}
    )
}


class Work(Protocol):
    """What torch returns for a posted transfer."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return when it is done."""


class Connections(Protocol):
    """What a process group, or one of its backends, offers for transfers."""

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        """Post a send."""

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        """Post a receive."""

    def abort(self) -> None:
        """Cancel everything in flight, if the backend can."""


def backend_for(parent: dist.ProcessGroup, device: torch.device | None = None) -> tuple[str, torch.device]:
    """Find the backend of a group for tensors on a device, and the device: by default the one that the group is for.

    The name of the group's backend is not enough: it is "undefined" if none was given, and each device may have one.
    """
    config = dist.get_backend_config(parent)
    backends = dict(pair.split(":", 1) for pair in config.split(","))
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator if accelerator is not None and accelerator.type in backends else torch.device("cpu")
    if device.type not in backends:
        raise TransportError(
            f"the process group has no backend for tensors on {device}, only {config}; "
            f"call init_process_group with one, e.g. 'cpu:gloo,cuda:nccl'"
        )
    return backends[device.type], device


def as_bytes(post: Post, native: frozenset[torch.dtype] = frozenset()) -> Post:
    """Post tensors as bytes, except those of the native element types: a backend may support only a few."""

    def post_bytes(tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        if tensor.dtype not in native:
            tensor = tensor.detach().view(-1).view(torch.uint8)  # a tensor without dimensions has no bytes to view
        return post([tensor], peer, tag)

    return post_bytes


def refuse_with(error: Callable[[], Exception]) -> Post:
    """Make a post that raises: it replaces the real one, so that nothing needs to be checked before each post."""

    def refuse(*_: object) -> NoReturn:
        raise error()

    return refuse


class PrivateGroup:
    """Connections between the ranks of a group, separate from all others.

    With gloo it is the bare backend: each call costs less than with a process group, nothing else knows it, and its
    members may have created different numbers of other groups before. With any other backend it is a process group,
    and they may not: torch names it by that number.

    Attributes:
        model: how transfers behave.
    """

    def __init__(self, parent: dist.ProcessGroup, store: Store, timeout: timedelta, backend: str) -> None:
        self._rank, self._ranks = parent.rank(), parent.size()
        self._group: dist.ProcessGroup | None = None
        self._backend = backend
        self._is_gloo = backend == "gloo"
        if self._is_gloo:
            # gloo matches messages by tag, in any order of posting.
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
        """Get the functions that post a send and a receive; ranks are those in the group."""
        assert self._connections is not None
        send, receive = self._connections.send, self._connections.recv
        if self._is_gloo:  # it moves bytes of any element type
            return send, receive
        native = _NATIVE_DTYPES.get(self._backend, frozenset())
        return as_bytes(send, native), as_bytes(receive, native)

    def lost_peers(self) -> list[int]:
        """Find the ranks to which the connection is closed, as far as is known. Ask only after one was lost."""
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
        """Make every wait for a transfer raise, here and on the peers. Nothing can be sent afterwards."""
        connections = self._connections
        if connections is None:
            return
        if not self._is_gloo:
            with contextlib.suppress(Exception):
                connections.abort()
            return
        # Neither abort nor shutdown wakes a thread that waits. A wait that times out does: gloo then closes all pairs.
        # On a pair that is already closed the wait would raise instead of timing out, so every pair gets its turn.
        for peer in range(self._ranks):
            if peer != self._rank:
                with contextlib.suppress(Exception):
                    connections.recv([torch.zeros(1)], peer, _CLOSING_TAG).wait(timedelta(milliseconds=1))

    def destroy(self) -> None:
        """Release the connections."""
        self._connections = None
        if self._group is not None and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group(self._group)
        self._group = None
