"""The store of a process group, as the transport uses it."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

_PREFIX: Final = "penstock"


def own_prefix(store: Store, rank: int) -> str:
    """A prefix that all ranks of a group agree on, new for each transport that they make over it.

    Every rank counts its own transports in the store; they make them together.
    """
    return f"{_PREFIX}/{store.add(f'{_PREFIX}/made by {rank}', 1)}"


def connection(store: Store, prefix: str, timeout: float) -> Store:
    """The store under a prefix, through a connection of its own where there are connections.

    Whoever waits on a connection keeps all others from using it.
    """
    mine: Store = PrefixStore(prefix, store)
    if _has_connection(store):
        mine = mine.clone()  # type: ignore[attr-defined]  # the stubs do not know it
        mine.set_timeout(timedelta(seconds=timeout))
    return mine


def _has_connection(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    # A FileStore counts its users: a copy that goes away would take the file with it.
    return isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]  # torch does export it
