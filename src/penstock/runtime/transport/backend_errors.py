"""What errors of torch's backends and stores mean. Whatever depends on their texts is in this file.

A test provokes each of these errors, so that it fails when torch changes one.
"""

from __future__ import annotations

import re

import torch.distributed as dist


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
    """The first sentence of an error, without the place in torch's sources: "Connection closed by peer [...]:4711"."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[[^]]*\] ", "", line).partition(". ")[0]
