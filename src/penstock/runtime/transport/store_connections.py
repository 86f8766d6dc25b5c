"""The store of a process group, as the transport uses it."""

from __future__ import annotations

from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

_PREFIX: Final = "penstock"


def new_prefix(store: Store, rank: int) -> str:
    """A prefix that all ranks of a group agree on, new for each transport that they make over it.

    Every rank counts its own transports in the store; they make them together.
    """
    return f"{_PREFIX}/{store.add(f'{_PREFIX}/made by {rank}', 1)}"


def clone_connection(store: Store) -> Store:
    """The same store through a connection of its own, where there are connections: a wait keeps others from using one.

    It takes a moment: seconds, where a name server does not answer.
    """
    underlying = store
    while isinstance(underlying, PrefixStore):
        underlying = underlying.underlying_store
    # A FileStore has none; it counts its users, and a copy that goes away would take the file with it.
    if isinstance(underlying, dist.TCPStore):  # type: ignore[attr-defined]  # torch does export it
        return store.clone()  # type: ignore[attr-defined,no-any-return]  # the stubs do not know it
    return store
