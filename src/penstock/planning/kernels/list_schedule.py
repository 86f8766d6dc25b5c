"""Builds orders by list scheduling: whenever a rank is free, it runs what is ready and most urgent.

Every F and every backward has an urgency, to which an offset per stage and direction is added: the smaller, the
earlier. If the urgency of microbatch i is i, and the offset of the backward of a stage exceeds that of its forward by
n, the stage keeps n microbatches in flight before a backward goes first. If urgencies are the times at which another
schedule starts its actions, the result is that schedule, adapted to these costs and limits. W fill gaps, or give memory
back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.jit import jit
from penstock.planning.kernels.replay import MEAN_SHARE, NEVER, SLACK, below, uniform

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.planning.instance import Instance

    Ints = NDArray[np.int64]
    Tokens = NDArray[np.int32]
    Floats = NDArray[np.float64]


def _push(heap: Floats, size: int, time: float, rank: int) -> int:
    """Add an entry to a heap of (time, rank)."""
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        if heap[parent, 0] < time or (heap[parent, 0] == time and heap[parent, 1] <= rank):
            break
        heap[place, 0], heap[place, 1] = heap[parent, 0], heap[parent, 1]
        place = parent
    heap[place, 0], heap[place, 1] = time, rank
    return size + 1


push = jit(_push)


def _pop(heap: Floats, size: int) -> tuple[float, int, int]:
    """Remove the first entry of a heap; return it and the new size."""
    time, rank = heap[0, 0], int(heap[0, 1])
    size -= 1
    last_time, last_rank = heap[size, 0], heap[size, 1]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            heap[right, 0] < heap[child, 0] or (heap[right, 0] == heap[child, 0] and heap[right, 1] < heap[child, 1])
        ):
            child = right
        if last_time < heap[child, 0] or (last_time == heap[child, 0] and last_rank <= heap[child, 1]):
            break
        heap[place, 0], heap[place, 1] = heap[child, 0], heap[child, 1]
        place = child
    heap[place, 0], heap[place, 1] = last_time, last_rank
    return time, rank, size


pop = jit(_pop)


def _schedule(  # noqa: C901 - one loop, compiled
    case: Instance,
    first: Ints,
    urgency: Floats,
    offset: Floats,
    patience: Floats,
    wait: Floats,
    reserve: bool,
    tokens: Tokens,
) -> tuple[float, float, float]:
    """Build an order of F and I (or B); return (makespan, span, mean end), or infinity if the memory does not suffice.

    Args:
        case: the instance.
        first: where the tokens of each rank begin; they are written into ``tokens``.
        urgency: of F, and of I or B, of each stage and microbatch.
        offset: per stage, what is added to that of F, and of I or B.
        patience: per rank, how long a gap must be to be filled with W, as a share of it: while F are left, and then.
        wait: per rank, how long F waits for an I that is about to arrive and more urgent, as a share of F.
        reserve: whether F of a stage leaves room for one F of each later stage of its rank, which rules out deadlocks.
        tokens: the order that is built.
    """
    ranks, stages, microbatches = len(first) - 1, len(case.rank_of), case.microbatches
    end = np.zeros((2, stages, microbatches))
    done = np.zeros((3, stages), np.int64)  # F; I or B; W
    now, begin, held = np.zeros(ranks), np.full(ranks, NEVER), np.zeros(ranks)
    at, left = first[:-1].copy(), np.zeros(ranks, np.int64)
    owed = np.empty(len(tokens), np.int64)
    owed_from, owed_to = first[:-1].copy(), first[:-1].copy()
    heap, size = np.empty((8 * len(tokens) + 8 * ranks + 64, 2)), 0
    later = np.zeros(stages)  # the room that F of a stage leaves to the later stages of its rank
    for rank in range(ranks):
        room = 0.0
        for slot in range(case.stages_first[rank + 1] - 1, case.stages_first[rank] - 1, -1):
            later[case.stages_of[slot]] = room
            room += case.activation[case.stages_of[slot]] if reserve else 0.0
        left[rank] = microbatches * (case.stages_first[rank + 1] - case.stages_first[rank])
        size = push(heap, size, 0.0, rank)
    while size > 0:
        time, rank, size = pop(heap, size)
        if time < now[rank] or (at[rank] == first[rank + 1] and owed_from[rank] == owed_to[rank]):
            continue
        best, best_key, best_side, known, blocked = -1, NEVER, 0, NEVER, False
        urgent, urgent_key = NEVER, NEVER
        for slot in range(case.stages_first[rank], case.stages_first[rank + 1]):
            stage = case.stages_of[slot]
            number = done[0, stage]
            if number < microbatches:
                ready, missing = 0.0, False
                for entry in range(case.forward_first[stage], case.forward_first[stage + 1]):
                    source = case.forward_stage[entry]
                    if done[0, source] <= number:
                        missing = True
                        break
                    ready = max(ready, end[0, source, number] + case.forward_delay[entry])
                if not missing:
                    if held[rank] + case.activation[stage] + later[stage] > case.budget[rank]:
                        blocked = True
                    elif ready <= time + case.dispatch:
                        key = urgency[0, stage, number] + offset[stage, 0]
                        if key < best_key:
                            best, best_key, best_side = stage, key, 0
                    else:
                        known = min(known, ready)
            number = done[1, stage]
            if number < done[0, stage]:
                ready, missing = end[0, stage, number], False
                for entry in range(case.backward_first[stage], case.backward_first[stage + 1]):
                    source = case.backward_stage[entry]
                    if done[1, source] <= number:
                        missing = True
                        break
                    ready = max(ready, end[1, source, number] + case.backward_delay[entry])
                if not missing:
                    key = urgency[1, stage, number] + offset[stage, 1]
                    if ready <= time + case.dispatch:
                        if key < best_key:
                            best, best_key, best_side = stage, key, 1
                    else:
                        known = min(known, ready)
                        if ready < urgent:
                            urgent, urgent_key = ready, key
        if (
            best >= 0
            and best_side == 0
            and urgent_key < best_key
            and urgent - time - case.dispatch <= wait[rank] * case.time[4 * best]
        ):
            best = -1
        if best < 0:
            gap = known - time - case.dispatch
            if owed_from[rank] < owed_to[rank]:
                owing = owed[owed_from[rank]]
                cost = case.time[4 * owing + 2] + case.dispatch
                share = patience[rank, 0] if left[rank] > 0 else patience[rank, 1]
                if (blocked and known == NEVER) or (gap > SLACK * cost and gap >= share * cost * (1 - SLACK)):
                    owed_from[rank] += 1
                    done[2, owing] += 1
                    if begin[rank] == NEVER:
                        begin[rank] = time + case.dispatch
                    now[rank] = time + cost
                    held[rank] -= case.release[4 * owing + 2]
                    size = push(heap, size, now[rank], rank)
                    continue
            if known < NEVER:
                size = push(heap, size, known - case.dispatch if known - case.dispatch > time else known, rank)
            continue
        kind = 0 if best_side == 0 else (1 if case.splits[best] else 3)
        token, number = 4 * best + kind, done[best_side, best]
        if begin[rank] == NEVER:
            begin[rank] = time + case.dispatch
        now[rank] = time + case.dispatch + case.time[token]
        held[rank] += (case.activation[best] if kind == 0 else 0.0) - case.release[token]
        end[best_side, best, number] = now[rank]
        done[best_side, best] += 1
        tokens[at[rank]] = token
        at[rank] += 1
        if kind == 0:
            left[rank] -= 1
        elif kind == 1:
            owed[owed_to[rank]] = best
            owed_to[rank] += 1
        if size + stages + 2 >= len(heap):
            return NEVER, NEVER, NEVER
        size = push(heap, size, now[rank], rank)
        users = case.forward_users if best_side == 0 else case.backward_users
        bounds = case.forward_users_first if best_side == 0 else case.backward_users_first
        for slot in range(bounds[best], bounds[best + 1]):
            other = case.rank_of[users[slot]]
            if other != rank and now[other] <= time:
                size = push(heap, size, time, other)  # it waits, and now knows for how long
    first_begin, last_end, span, total = NEVER, 0.0, 0.0, 0.0
    for rank in range(ranks):
        if at[rank] < first[rank + 1]:
            return NEVER, NEVER, NEVER
        if first[rank] < first[rank + 1]:
            first_begin, last_end = min(first_begin, begin[rank]), max(last_end, now[rank])
            span = max(span, now[rank] - begin[rank])
            total += now[rank]
    return last_end - first_begin, span, total / ranks - first_begin


schedule = jit(_schedule)


def _tune(
    case: Instance,
    first: Ints,
    urgency: Floats,
    start: Floats,
    start_patience: Floats,
    start_wait: Floats,
    reserve: bool,
    unit: float,
    weights: Floats,
    goal: float,
    steps: int,
    hot: float,
    seed: int,
) -> tuple[Tokens, Floats, int]:
    """Improve the parameters of list scheduling by annealing; return the best order, its patience, and how many it ran.

    ``unit`` is how much more urgent one microbatch is than the next; the rest is as in ``replay.anneal``.
    """
    stages, ranks = len(case.rank_of), len(first) - 1
    offset, patience, wait = start.copy(), start_patience.copy(), start_wait.copy()
    tokens = np.zeros(first[-1], np.int32)
    makespan, span, mean = schedule(case, first, urgency, offset, patience, wait, reserve, tokens)
    current = weights[0] * makespan + weights[1] * span + MEAN_SHARE * mean
    best, best_mean, best_tokens, best_patience = current, mean, tokens.copy(), patience.copy()
    state = np.array([np.uint64(seed) * np.uint64(2654435761) + np.uint64(88172645463325252)], np.uint64)
    runs = 1
    for step in range(steps):
        if best - MEAN_SHARE * best_mean <= goal:
            break
        temperature = hot * (1.0 - step / steps)
        old_offset, old_patience, old_wait = offset.copy(), patience.copy(), wait.copy()
        choice = uniform(state)
        low = below(state, stages)
        high = min(stages, low + 1 + (below(state, stages) if uniform(state) < 0.4 else 0))
        if choice < 0.65:
            side = 1 if uniform(state) < 0.7 else 0
            change = (1 + below(state, 4)) * 0.5 * unit
            offset[low:high, side] += change if uniform(state) < 0.5 else -change
        elif choice < 0.85:
            column, change = below(state, 2), (uniform(state) - 0.5) * 0.8
            low, high = low % ranks, max(low % ranks + 1, min(high, ranks))
            for rank in range(low, high):
                patience[rank, column] = min(1.5, max(0.0, patience[rank, column] + change))
        else:
            low, high = low % ranks, max(low % ranks + 1, min(high, ranks))
            change = (uniform(state) - 0.5) * 0.8
            for rank in range(low, high):
                wait[rank] = min(1.5, max(0.0, wait[rank] + change))
        makespan, span, mean = schedule(case, first, urgency, offset, patience, wait, reserve, tokens)
        runs += 1
        value = weights[0] * makespan + weights[1] * span + MEAN_SHARE * mean
        if value <= current or (temperature > 0 and uniform(state) < np.exp((current - value) / temperature)):
            current = value
            if value < best:
                best, best_mean = value, mean
                best_tokens, best_patience = tokens.copy(), patience.copy()
        else:
            offset, patience, wait = old_offset, old_patience, old_wait
    return best_tokens, best_patience, runs


tune = jit(_tune)
