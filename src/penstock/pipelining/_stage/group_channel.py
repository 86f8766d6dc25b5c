"""Posts transfers over the user's own group, as ``dist.isend`` and ``dist.irecv`` do."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from penstock.execution.channel import Progress
from penstock.graph.comm_model import CommModel

_GLOO: Final = getattr(dist, "ProcessGroupGloo", None)  # torch may be built without


class GroupChannel:
    """Moves tensors over the group of a stage. It is open during a step; the group may end before the next one.

    Peers are ranks in the group.
    """

    model = CommModel("rendezvous", lanes="message")

    def __init__(self) -> None:
        self.progress = Progress()
        self._group: Any = None
        self._send: Any = None
        self._receive: Any = None

    @property
    def is_open(self) -> bool:
        """Whether it holds the group."""
        return self._group is not None

    def open(self, stage: Any) -> None:
        """Look up the group of a stage, and what carries its tensors: a call of the group takes twice as long."""
        self._group = stage.group or dist.distributed_c10d._get_default_group()
        carrier = gloo_of(self._group, torch.device(stage.device)) or self._group
        self._send, self._receive = carrier.send, carrier.recv

    def close(self) -> None:
        """Let go of the group."""
        self._group = self._send = self._receive = None

    def send(self, tensor: torch.Tensor, peer: int, _tag: int = 0) -> Any:
        """Post a send."""
        if type(tensor) is not torch.Tensor or tensor.is_complex():
            return dist.isend(tensor, group=self._group, group_dst=peer)
        return self._send([tensor], peer, 0)

    def receive(self, tensor: torch.Tensor, peer: int, _tag: int = 0) -> Any:
        """Post a receive."""
        if tensor.is_complex():
            return dist.irecv(tensor, group=self._group, group_src=peer)
        return self._receive([tensor], peer, 0)


def is_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether a group carries tensors on a device by gloo."""
    if group is None:
        group = dist.group.WORLD
    return type(group) is dist.ProcessGroup and f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


def gloo_of(group: Any, device: torch.device) -> Any:
    """Get what carries a group's tensors on a device, if that is gloo, with nothing around it; None if it is not."""
    if type(group) is not dist.ProcessGroup:
        return None
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # there is none for the device
        return None
    return backend if type(backend) is _GLOO else None
