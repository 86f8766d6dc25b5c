"""Repeats one building block per microbatch, on ranks with two stages in a V, and compacts the result.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024: the lifespan of the activations in the block sets the
memory of the schedule. A microbatch enters every sixth tick, and on each rank its four passes F0, F1, I1 and I0 keep
their offsets; the two remaining slots are for the weight gradients. Repeating the block wastes time during warm-up and
cool-down, so the order is then run tick by tick, and every rank runs actions earlier where it can, within the memory of
the plain repetition.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.ir.packed import Codes

#: The ticks at which a rank runs F0, F1, I1 and I0 of microbatch 0.
Block: TypeAlias = tuple[int, int, int, int]

#: A microbatch is six passes on every rank: two forwards, two input gradients, two weight gradients.
PERIOD: Final = 6

_F0, _F1, _I1, _I0, _W1, _W0 = range(PERIOD)
_KINDS: Final = (FORWARD, FORWARD, BACKWARD_INPUT, BACKWARD_INPUT, BACKWARD_WEIGHT, BACKWARD_WEIGHT)
_SECOND_STAGE: Final = (False, True, True, False, True, False)
_LIVE: Final = (+1, +1, 0, 0, -1, -1)
_NEVER: Final = 1 << 60


def repeat_and_compact(blocks: Sequence[Block], microbatches: int) -> list[Codes]:
    """Return the rows of the ranks with these blocks.

    A rank looks for its next action only when it or a neighbour has run one, so there are O(number of actions) looks.
    """
    orders = [_repeat(block, microbatches) for block in blocks]
    limit = max(max(np.cumsum([_LIVE[token] for token in order])) for order in orders)
    done_forward = [array("q", [_NEVER]) * microbatches for _ in range(2 * len(blocks))]
    done_input = [array("q", [_NEVER]) * microbatches for _ in range(2 * len(blocks))]
    ranks = [
        _Rank(rank, order, int(limit), microbatches, done_forward, done_input) for rank, order in enumerate(orders)
    ]
    tick, awake = 0, set(range(len(ranks)))
    while awake:
        chosen = [(rank, ranks[rank].choose(tick)) for rank in awake]  # before any of them runs in this tick
        awake = set()
        for rank, token in chosen:
            if token is not None:
                ranks[rank].run(token, tick + 1)
                awake.update((rank - 1, rank, rank + 1))  # no other rank can have become ready
        awake = {rank for rank in awake if 0 <= rank < len(ranks) and ranks[rank].left}
        tick += 1
    return [rank.codes() for rank in ranks]


def _repeat(block: Block, microbatches: int) -> list[int]:
    """Return the order of a rank if every microbatch is the same block; weight gradients take the first free slots."""
    at = {
        offset + PERIOD * microbatch: token for token, offset in enumerate(block) for microbatch in range(microbatches)
    }
    assert len(at) == 4 * microbatches, f"two passes of the block {block} fall on one tick"
    order: list[int] = []
    owed: deque[int] = deque()
    free_from = 0
    for tick, token in sorted(at.items()):
        for _ in range(min(len(owed), tick - free_from)):
            order.append(owed.popleft())
        order.append(token)
        if token in (_I1, _I0):
            owed.append(_W1 if token == _I1 else _W0)
        free_from = tick + 1
    return [*order, *owed]


class _Rank:
    """What a rank has run, and the plain repetition for the rest."""

    def __init__(
        self,
        rank: int,
        order: list[int],
        limit: int,
        microbatches: int,
        done_forward: list[array[int]],
        done_input: list[array[int]],
    ) -> None:
        first, second = rank, len(done_forward) - 1 - rank
        self.stages = (first, second)
        self.limit = limit
        self.microbatches = microbatches
        self.left = len(order)
        self.ran = array("b")
        #: For each of the six tokens, how many have run, and where in the order the next one is.
        self.done = [0] * PERIOD
        self.places = [array("q") for _ in range(PERIOD)]
        for place, token in enumerate(order):
            self.places[token].append(place)
        for places in self.places:
            places.append(_NEVER)
        self.next = [places[0] for places in self.places]
        #: The live activations before each place of the order, if the rest is run in this order.
        self.live = np.cumsum([0] + [_LIVE[token] for token in order])
        nothing = array("q", [0]) * microbatches
        self.inputs = {
            _F0: (done_forward[first - 1] if first else nothing, nothing),
            _F1: (done_forward[second - 1], nothing),
            _I1: (done_forward[second], done_input[second + 1] if first else nothing),
            _I0: (done_forward[first], done_input[first + 1]),
        }
        self.outputs = {
            _F0: done_forward[first],
            _F1: done_forward[second],
            _I1: done_input[second],
            _I0: done_input[first],
        }

    def choose(self, tick: int) -> int | None:
        """Return the token to run at this tick: the earliest in the order that can run.

        Weight gradients keep their place and fill idle ticks. Once all microbatches have entered, they only fill idle
        ticks, because other ranks wait for everything else.
        """
        done, place_of = self.done, self.next
        head = min(place_of)
        weight = self._ready_weight()
        draining = done[_F0] == self.microbatches
        if weight is not None and not draining and place_of[weight] == head:
            return weight
        best, best_place = None, _NEVER
        for token, (first, second) in self.inputs.items():
            place = place_of[token]
            if place >= best_place or first[done[token]] > tick or second[done[token]] > tick:
                continue
            if _LIVE[token] and place > head and self.live[head : place + 1].max() >= self.limit:
                continue
            best, best_place = token, place
        return weight if best is None else best

    def _ready_weight(self) -> int | None:
        """Return the first weight gradient in the order whose input gradient has run."""
        first, second = self.done[_W0] < self.done[_I0], self.done[_W1] < self.done[_I1]
        if first and second:
            return _W0 if self.next[_W0] < self.next[_W1] else _W1
        if first:
            return _W0
        return _W1 if second else None

    def run(self, token: int, end: int) -> None:
        """Run a token, which ends at the given tick."""
        number, head = self.done[token], min(self.next)
        if _LIVE[token]:  # from now until its place in the order, it has already run
            self.live[head : self.next[token] + 1] += _LIVE[token]
        if token in self.outputs:
            self.outputs[token][number] = end
        self.done[token] += 1
        self.next[token] = self.places[token][number + 1]
        self.left -= 1
        self.ran.append(token)

    def codes(self) -> Codes:
        """Return what was run, packed."""
        tokens = np.frombuffer(self.ran, np.int8)
        codes = np.zeros(len(tokens), np.int64)
        for token, kind in enumerate(_KINDS):
            stage = self.stages[_SECOND_STAGE[token]]
            codes[tokens == token] = packed.pack(stage, kind, np.arange(self.microbatches))
        return codes
