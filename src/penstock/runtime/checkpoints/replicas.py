"""Connects all ranks that save together: the ranks of a pipeline, and of its replicas under FSDP or DDP."""

from __future__ import annotations

import json
import math
import secrets
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import CheckpointError
from penstock.execution.stage import device_of
from penstock.runtime.checkpoints.channel import StoreChannel
from penstock.runtime.transport.connecting import clone_connection

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from penstock.runtime.engine import Engine

_NAME: Final = "checkpoints"
#: How many seconds a replica waits for the others, and how often it asks.
_PATIENCE: Final = 300.0
_POLL_INTERVAL: Final = 0.01
#: How old the last answer may be when a wait asks whether the pipeline has failed, in seconds.
_ASKED_EVERY: Final = 0.5


class _Place(NamedTuple):
    """Where a pipeline is among its replicas.

    Attributes:
        identity: the same number for all of them.
        replicas: how many there are.
        coordinate: which one this is, in each of the groups that hold shards or replicas.
    """

    identity: int
    replicas: int
    coordinate: list[int]


class Company(NamedTuple):
    """The ranks that save together.

    Attributes:
        channel: connects them; its ranks are in the order of the default group.
        replica: which replica of the pipeline this is, in each of the groups that hold shards or replicas.
        is_complete: whether all replicas are among them; some wrappers know theirs only after the first step.
    """

    channel: StoreChannel
    replica: list[int]
    is_complete: bool = True


def connect_replicas(engine: Engine) -> Company:
    """Connect the ranks of a pipeline, and of all its replicas. All of them call it."""
    transport = engine.transport

    def channel_over(store: Store, rank: int, ranks: int) -> StoreChannel:
        return StoreChannel(store, rank, ranks, lambda: transport.failure(max_age=_ASKED_EVERY))

    if not engine.state_names().has_replicas:
        return Company(channel_over(transport.open_store(_NAME), transport.rank, transport.ranks), [])
    place = _find_place(engine)
    if place is None:
        return Company(channel_over(transport.open_store(_NAME), transport.rank, transport.ranks), [], False)
    assert dist.group.WORLD is not None
    store = PrefixStore(f"penstock/{_NAME}/{place.identity}", clone_connection(dist.group.WORLD.get_group_store()))
    members = _find_members(store, place.replicas * transport.ranks)
    return Company(channel_over(store, members.index(dist.get_rank()), len(members)), place.coordinate)


def _find_place(engine: Engine) -> _Place | None:
    """Agree with the replicas on a number that is theirs alone; None if they are not known yet."""
    groups = list(
        dict.fromkeys(group for stage in engine.stages.values() if stage.parallel for group in stage.parallel.groups)
    )
    transport = engine.transport
    lowest = min(map(int, transport.exchange(str(secrets.randbits(60)).encode())))
    number = torch.tensor(lowest, device=device_of(engine.stages) if engine.stages else None)
    for group in groups:
        dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    first = next((stage.parallel for stage in engine.stages.values() if stage.parallel is not None), None)
    of_first = () if first is None else first.groups
    mine = _Place(int(number), math.prod(map(dist.get_world_size, of_first)), [*map(dist.get_rank, of_first)])
    ranks = [_Place(*json.loads(data)) for data in transport.exchange(json.dumps(mine).encode())]
    placed = next((one for one in ranks if one.coordinate), None)  # a rank without stages has no groups
    return None if placed is None else placed._replace(identity=min(one.identity for one in ranks))


def _find_members(store: Store, count: int) -> list[int]:
    """Find the ranks of the default group that save together, in order."""
    store.set(f"member/{store.add('members', 1) - 1}", str(dist.get_rank()))
    keys = [f"member/{number}" for number in range(count)]
    deadline = time.monotonic() + _PATIENCE
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"only {store.add('members', 0)} of {count} ranks take part in saving or loading; call it on every "
                "rank of every replica of the pipeline"
            )
        time.sleep(_POLL_INTERVAL)
    return sorted(int(store.get(key)) for key in keys)
