"""What errors of torch's backends and stores mean. Whatever depends on their texts is in this file.

A test provokes each of these errors, so that it fails when torch changes one.
"""

from __future__ import annotations

import re
from typing import Final

import torch.distributed as dist

#: A place in torch's sources, and keys of a store.
_HIDDEN: Final = (
    re.compile(r"\[[^]\s]*\.(?:cc|cpp|h|hpp):\d+\] "),
    re.compile(r", keys: .*"),
    re.compile(r" for key: \S+"),
)


def is_connection_error(error: BaseException) -> bool:
    """Whether a transfer failed because its connection did: closed by the peer, timed out, or ended by this rank."""
    if isinstance(error, dist.DistError):
        return True
    # gloo raises a bare RuntimeError that names its source file; or, in the waits that a timeout of another one ends,
    # "Application timeout caused pair closure".
    return isinstance(error, RuntimeError) and ("/gloo/" in str(error) or "pair closure" in str(error))


def is_store_timeout(error: BaseException) -> bool:
    """Whether waiting for a key of a store timed out, rather than the store being lost."""
    # "wait timeout after 50ms, keys: /x" or "Wait timeout"; a FileStore raises a bare RuntimeError.
    return isinstance(error, RuntimeError) and "timeout" in str(error).lower()


def reason_of(error: BaseException) -> str:
    """Get the first sentence of an error, without what says nothing to a user.

    >>> reason_of(RuntimeError("[/build/gloo/transport/tcp/pair.cc:537] Connection closed by peer. Check the logs."))
    'Connection closed by peer'
    >>> reason_of(RuntimeError("wait timeout after 20ms, keys: /penstock/1/round/0/1"))
    'wait timeout after 20ms'
    """
    text = str(error).partition("\n")[0]
    for hidden in _HIDDEN:
        text = hidden.sub("", text)
    return text.partition(". ")[0].removesuffix(".")
