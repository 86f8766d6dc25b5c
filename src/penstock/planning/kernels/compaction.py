"""Compiled: repeats building blocks, and compacts the result tick by tick, as ``schedules/building_blocks.py`` does.

Passes are numbered as there: F0, F1, I1, I0, W1, W0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]
    Passes = NDArray[np.int8]

#: Later than any tick, and after any place.
NEVER: Final = 2**30


def repeat(blocks: Ints, microbatches: int) -> tuple[Passes, Ints, Ints, int]:
    """Return the plain repetition: orders, places of the n-th pass of each kind, live activations, and their peak.

    Weight gradients take the first free ticks. The peak is -1 if two passes fall on one tick.
    """
    ranks, length = len(blocks), 6 * microbatches
    order = np.empty((ranks, length), np.int8)
    places = np.full((ranks, 6, microbatches + 1), NEVER, np.int32)
    live = np.zeros((ranks, length + 1), np.int32)
    owed = np.empty(2 * microbatches, np.int8)
    due, done = np.empty(4, np.int32), np.empty(6, np.int32)
    peak = 0
    for rank in range(ranks):
        done[:] = 0
        for each in range(4):
            due[each] = blocks[rank, each]
        first_owed, last_owed, tick = 0, 0, 0
        for place in range(length):
            token, when = -1, NEVER
            for each in range(4):
                if due[each] < when:
                    token, when = each, due[each]
                elif due[each] == when and when < NEVER:
                    return order, places, live, -1
            if first_owed < last_owed and tick < when:
                token = owed[first_owed]
                first_owed += 1
                tick += 1
            else:
                due[token] = when + 6 if done[token] + 1 < microbatches else NEVER
                tick = when + 1
                if token >= 2:
                    owed[last_owed] = token + 2
                    last_owed += 1
            order[rank, place] = token
            places[rank, token, done[token]] = place
            done[token] += 1
            change = 1 if token <= 1 else (-1 if token >= 4 else 0)
            live[rank, place + 1] = live[rank, place] + change
            peak = max(peak, live[rank, place + 1])
    return order, places, live, peak


def run(order: Passes, places: Ints, live: Ints, limit: int) -> tuple[Passes, int, int]:  # noqa: C901 - compiled
    """Run tick by tick, and return the orders in which the passes ran, the makespan and the span."""
    ranks, length = order.shape
    microbatches = length // 6
    ran = np.empty((ranks, length), np.int8)
    # By stage, with a stage that is always done before and after them: when its passes end.
    forward = np.full((2 * ranks + 2, microbatches), NEVER, np.int32)
    backward = np.full((2 * ranks + 2, microbatches), NEVER, np.int32)
    forward[0], backward[2 * ranks + 1] = 0, 0
    done = np.zeros((ranks, 6), np.int32)
    count, begin = np.zeros(ranks, np.int32), np.zeros(ranks, np.int32)
    left, tick, last, span = ranks * length, 0, 0, 0
    while left and last >= tick - 1:  # nothing starts after a tick without any action
        for rank in range(ranks):
            if count[rank] == length:
                continue
            mine, place_of = done[rank], places[rank]
            head, choice = NEVER, -1
            for token in range(6):
                head = min(head, place_of[token, mine[token]])
            weight0, weight1 = mine[5] < mine[3], mine[4] < mine[2]
            if weight0 or weight1:
                choice = 4
                if weight0 and (not weight1 or place_of[5, mine[5]] < place_of[4, mine[4]]):
                    choice = 5
            if choice < 0 or mine[0] == microbatches or place_of[choice, mine[choice]] != head:
                nearest = NEVER
                for token in range(4):
                    number = mine[token]
                    place = place_of[token, number]
                    if place >= nearest:
                        continue
                    # F waits for the stage before, I for its own F and for the stage after.
                    stage = 2 * ranks - rank if token == 1 or token == 2 else rank + 1
                    if token <= 1:
                        is_ready = forward[stage - 1, number] <= tick
                        if is_ready:
                            for between in range(head, place + 1 if place > head else head):
                                if live[rank, between] >= limit:
                                    is_ready = False
                                    break
                    else:
                        is_ready = forward[stage, number] <= tick and backward[stage + 1, number] <= tick
                    if is_ready:
                        nearest, choice = place, token
            if choice < 0:
                continue
            number = mine[choice]
            if choice != 2 and choice != 3:  # from now until its place in the order, it has already run
                change = 1 if choice <= 1 else -1
                for between in range(head, place_of[choice, number] + 1):
                    live[rank, between] += change
            if choice == 0 or choice == 1:
                forward[2 * ranks - rank if choice == 1 else rank + 1, number] = tick + 1
            elif choice == 2 or choice == 3:
                backward[2 * ranks - rank if choice == 2 else rank + 1, number] = tick + 1
            if count[rank] == 0:
                begin[rank] = tick
            ran[rank, count[rank]] = choice
            count[rank] += 1
            mine[choice] = number + 1
            left -= 1
            last = tick
            span = max(span, tick + 1 - begin[rank])
        tick += 1
    return ran, tick if not left else -1, span
