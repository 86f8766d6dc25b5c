"""Measures how long messages between two ranks take, and how far apart the clocks of the two are.

A message bounces between two ranks that do nothing else. Its time counts from when the sender has posted it to when the
receiver has it: what the sender's core does before that is work of the sender. One half of the difference between the
two directions is the difference of the clocks; that they take equally long is assumed.
"""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.simulation.costs import LARGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.runtime.transport.protocol import Transport

#: No message of a step has this tag, nor has the first message on a connection.
_TAG: Final = 2**31 - 3
_ROUNDS: Final = 21
#: Bytes of the smaller message.
SMALL: Final = 8
#: The shortest time that bytes can take, in seconds: less is noise.
_SHORTEST: Final = 1e-6

Pair = tuple[int, int]


class Bounce(NamedTuple):
    """How long messages take between two ranks.

    Attributes:
        clock: how much later the clock of the second rank shows the same moment.
        times: how long a message takes, by its bytes, in each round and direction.
        posts: how long it takes to post one, likewise.
    """

    clock: float
    times: Mapping[int, Sequence[float]]
    posts: Mapping[int, Sequence[float]]

    @property
    def latency(self) -> float:
        """How long a message of a few bytes takes."""
        return max(0.0, median(self.times[min(self.times)]))

    @property
    def bandwidth(self) -> float:
        """Bytes per second, for a message as large as the largest one; ``LARGEST`` if its bytes take no time."""
        small, large = min(self.times), max(self.times)
        taken = median(self.times[large]) - median(self.times[small])
        return (large - small) / taken if taken > _SHORTEST else LARGEST


def probe_links(
    transport: Transport,
    sizes: Mapping[Pair, Sequence[int]],
    device: torch.device,
    now: Callable[[], float],
    rounds: int = _ROUNDS,
) -> dict[Pair, Bounce]:
    """Bounce messages between pairs of ranks, one pair after the other. All ranks call it with the same pairs.

    Args:
        transport: connects the ranks.
        sizes: the bytes of the messages of each pair, of which the lower rank comes first.
        device: where the messages are.
        now: reads this rank's clock.
        rounds: how often each message bounces.
    """
    mine: dict[str, list[tuple[float, float, float]]] = {}
    for (first, second), of_pair in sorted(sizes.items()):
        for size in of_pair if transport.rank in (first, second) else ():
            peer, begins = (second, True) if transport.rank == first else (first, False)
            message = torch.zeros(size, dtype=torch.uint8, device=device)
            bounced = _bounce(transport, message, peer, now, rounds + 1, begins=begins)
            mine[f"{first} {second} {size}"] = bounced[1:]  # the first one finds nothing in any cache
    ranks = [json.loads(data) for data in transport.exchange(json.dumps(mine).encode())]
    return {pair: _compare(pair, of_pair, ranks) for pair, of_pair in sizes.items()}


def _bounce(
    transport: Transport, message: torch.Tensor, peer: int, now: Callable[[], float], rounds: int, *, begins: bool
) -> list[tuple[float, float, float]]:
    """Send a message and get it back, or the other way round; returns when each was posted, sent and received.

    Where messages do not queue in the order in which they are posted, a receive is posted before its message can be
    sent, as in a step: else the sender would first have to learn that the receiver is ready.
    """
    buffer, found = message.clone(), []
    is_early = transport.model.lanes == "message"
    coming = transport.receive(buffer, peer, _TAG) if is_early else None
    for number in range(rounds):
        received = 0.0
        if not begins:
            (coming or transport.receive(buffer, peer, _TAG)).wait()
            received = now()
            coming = transport.receive(buffer, peer, _TAG) if is_early and number + 1 < rounds else None
        posted = now()
        send = transport.send(message, peer, _TAG)
        sent = now()
        if begins:
            (coming or transport.receive(buffer, peer, _TAG)).wait()
            received = now()
            coming = transport.receive(buffer, peer, _TAG) if is_early and number + 1 < rounds else None
        send.wait()
        found.append((posted, sent, received))
    return found


def _compare(pair: Pair, sizes: Sequence[int], ranks: Sequence[Mapping[str, Sequence[Sequence[float]]]]) -> Bounce:
    there, back, posts = {}, {}, {}
    for size in sizes:
        ours, theirs = (ranks[rank][f"{pair[0]} {pair[1]} {size}"] for rank in pair)
        there[size] = [received - sent for (_, sent, _), (_, _, received) in zip(ours, theirs, strict=True)]
        back[size] = [received - sent for (_, _, received), (_, sent, _) in zip(ours, theirs, strict=True)]
        posts[size] = [sent - posted for posted, sent, _ in (*ours, *theirs)]
    small = min(sizes)
    clock = (min(there[small]) - min(back[small])) / 2
    times = {size: [*(one - clock for one in there[size]), *(one + clock for one in back[size])] for size in sizes}
    return Bounce(clock, times, posts)
