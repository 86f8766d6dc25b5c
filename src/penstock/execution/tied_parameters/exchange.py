"""Swaps values between the ranks that hold tied parameters, and sums them in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from penstock.errors import MetadataError
from penstock.execution.distributed_tensors import local_part
from penstock.execution.value_spec import flatten
from penstock.execution.wire_format import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.execution.channel import Pending, Progress
    from penstock.execution.tied_parameters.holders import LocalTie

#: Tags that no transfer of a schedule has.
_FIRST_TAG: Final = 2**30
_LABEL: Final = "the exchange of tied parameters"


class Exchange(Protocol):
    """Moves bytes and tensors between the ranks that hold tied parameters."""

    rank: int
    progress: Progress

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a send of a contiguous tensor, which must not change until it is done."""

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into a contiguous tensor."""

    def send_bytes(self, peer: int, data: bytes) -> None:
        """Send a few bytes to a peer. They arrive in order."""

    def receive_bytes(self, peer: int) -> bytes:
        """Wait for the next bytes from a peer."""


def swap_between_holders(ties: Sequence[LocalTie], values: Sequence[Any], exchange: Exchange) -> list[dict[int, Any]]:
    """Send a value for each tie to all other ranks that hold it; returns theirs, by rank. All of them call it."""
    found: list[dict[int, Any]] = [{} for _ in ties]
    shared: dict[int, list[int]] = {}
    for number, tie in enumerate(ties):
        for peer in tie.ranks:
            if peer != exchange.rank:
                shared.setdefault(peer, []).append(number)
    if not shared:
        return found
    device = local_part(ties[0].holders[0].parameter).device
    received = swap(exchange, {peer: [values[number] for number in shared[peer]] for peer in shared}, device)
    for peer, numbers in shared.items():
        if not isinstance(received[peer], list) or len(received[peer]) != len(numbers):
            raise MetadataError(f"what rank {peer} sent of tied parameters could not be decoded")
        for number, value in zip(numbers, received[peer], strict=True):
            found[number][peer] = value
    return found


def swap(exchange: Exchange, values: Mapping[int, Any], device: torch.device) -> dict[int, Any]:
    """Send each peer a value, and receive one from it; returns these by peer. All these ranks call it.

    What a value looks like goes ahead as bytes; a transport of the runtime sends these through the store, so that a
    failure ends the wait and no device is waited for. The tensors in it are posted in one order of all pairs of ranks,
    so that they pass any kind of lane.
    """
    flat = {peer: flatten(values[peer]) for peer in sorted(values)}
    for peer, (_, spec) in flat.items():
        exchange.send_bytes(peer, encode(spec))
    specs = {peer: decode(exchange.receive_bytes(peer)) for peer in flat}
    buffers = {peer: [one.empty(device) for one in spec.tensors] for peer, spec in specs.items()}
    pending: list[tuple[int, Pending]] = []
    for peer, (tensors, _) in flat.items():
        sends = (exchange.send(tensor, peer, tag) for tag, tensor in _tagged(tensors))
        receives = (exchange.receive(tensor, peer, tag) for tag, tensor in _tagged(buffers[peer]))
        # The lower rank sends first, and the higher one receives first.
        for posts in (sends, receives) if exchange.rank < peer else (receives, sends):
            pending += [(peer, post) for post in posts]
    _wait(exchange, pending)
    return {peer: specs[peer].unflatten(buffers[peer]) for peer in flat}


def _tagged(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Number what is to be transferred; empty tensors, as of a shard without rows, are not."""
    return ((_FIRST_TAG + number, tensor) for number, tensor in enumerate(tensors) if tensor.numel() > 0)


def _wait(exchange: Exchange, pending: Sequence[tuple[int, Pending]]) -> None:
    """Wait for transfers as an operation of a step does: a watchdog sees it."""
    progress = exchange.progress
    progress.labels = progress.waits = [_LABEL] * len(pending)
    progress.peers = [peer for peer, _ in pending]
    progress.waiting = True
    with progress.count_wait():
        for progress.index, (_, one) in enumerate(pending):
            one.wait()
    progress.index, progress.waiting = -1, False


# Gradients ----------------------------------------------------------------------------------------------------------


def pack(gradient: torch.Tensor | None) -> Any:
    """Make a gradient a value that can be sent, contiguous: a sparse one as its indices, values and shape."""
    if gradient is None:
        return None
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()
        return gradient.indices().contiguous(), gradient.values().contiguous(), tuple(gradient.shape)
    return gradient.resolve_conj().resolve_neg().contiguous()


def unpack(value: Any) -> torch.Tensor | None:
    """Get a gradient out of a value that was sent."""
    if not isinstance(value, tuple):
        gradient: torch.Tensor | None = value
        return gradient
    indices, values, shape = value
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def add_in_order(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Sum gradients from left to right, as autograd does: in their element type, and dense if any is dense.

    The result is the first of them, changed in place, if all are dense; None if there is none.

    >>> add_in_order([torch.ones(2), None, torch.ones(2)])
    tensor([2., 2.])
    """
    found = [gradient for gradient in gradients if gradient is not None]
    if not found:
        return None
    if all(gradient.layout is torch.sparse_coo for gradient in found):
        total = found[0].coalesce()
        for gradient in found[1:]:
            total = (total + gradient).coalesce()
        return total
    total = _dense(found[0])
    for gradient in found[1:]:
        total.add_(gradient)
    return total


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
