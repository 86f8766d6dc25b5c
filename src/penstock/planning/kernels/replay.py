"""Runs an order, and improves orders by moving actions: the two kernels that do most of the work.

Each rank runs its F and I in the given order. W are either in the order too, or are owed and fill gaps: W goes ahead of
the next F or I if that has to wait long enough, or needs the memory. When the next F or I can start depends only on
what precedes it in the orders, so the look-ahead is exact and needs no queue of events: ranks are run one after the
other, each until it needs what another one has not run yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.graph.jit import jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.planning.instance import Instance

    Ints = NDArray[np.int64]
    Tokens = NDArray[np.int32]
    Floats = NDArray[np.float64]
    Random = NDArray[np.uint64]

NEVER: Final = np.inf
#: Gaps and limits are compared with this tolerance, as a share.
SLACK: Final = 1e-9
#: How much of the mean end of all ranks counts in what the search minimises: it makes a direction of ties.
MEAN_SHARE: Final = 0.01


class Scratch(NamedTuple):
    """What a run writes. Made once, because allocating takes longer than running a short order.

    Attributes:
        end: the end of F, and of I or B, of each stage and microbatch.
        done: how often each token has run.
        place: the places of F, and of I or B, in the order.
        cause: for every place, what it waited for: 2 * stage, plus 1 for I and B; -1 if for its own rank alone.
        now: the end of the last action of each rank.
        begin: the start of its first one.
        held: the memory that it holds.
        peak: the most that it held.
        at: its next place.
        awaited: what it waits for, as in ``cause``.
        owed: for each rank, the stages whose W are owed, in order.
        owed_from: where the first of them is.
        owed_to: where they end.
        stack: the ranks to run.
        ran: what each rank ran, with W, from twice its first place on.
        ran_to: where that ends.
    """

    end: Floats
    done: Ints
    place: Ints
    cause: Ints
    now: Floats
    begin: Floats
    held: Floats
    peak: Floats
    at: Ints
    awaited: Ints
    owed: Ints
    owed_from: Ints
    owed_to: Ints
    stack: Ints
    ran: Tokens
    ran_to: Ints


def _scratch(stages: int, microbatches: int, ranks: int, length: int) -> Scratch:
    return Scratch(
        np.zeros((2, stages, microbatches)),
        np.zeros(4 * stages, np.int64),
        np.zeros((2, stages, microbatches), np.int64),
        np.zeros(length, np.int64),
        np.zeros(ranks),
        np.zeros(ranks),
        np.zeros(ranks),
        np.zeros(ranks),
        np.zeros(ranks, np.int64),
        np.zeros(ranks, np.int64),
        np.zeros(length, np.int64),
        np.zeros(ranks, np.int64),
        np.zeros(ranks, np.int64),
        np.zeros(4 * ranks + 4, np.int64),
        np.zeros(2 * length, np.int32),
        np.zeros(ranks, np.int64),
    )


scratch = jit(_scratch)


def _run(  # noqa: C901 - one loop, compiled
    case: Instance, first: Ints, tokens: Tokens, patience: Floats, fill: bool, s: Scratch
) -> tuple[float, float, float]:
    """Run an order; return (makespan, span, mean end), or infinity if it deadlocks or exceeds the memory.

    ``patience`` has for each rank how long a gap must be to be filled, as a share of the W that fills it: while it has
    F left, and afterwards. Without ``fill``, W run where the order has them.
    """
    ranks, microbatches = len(first) - 1, case.microbatches
    s.done[:] = 0
    s.now[:] = 0.0
    s.held[:] = 0.0
    s.peak[:] = 0.0
    s.awaited[:] = -1
    forwards_left = np.zeros(ranks, np.int64)
    top = 0
    for rank in range(ranks - 1, -1, -1):
        s.at[rank] = first[rank]
        s.owed_from[rank] = first[rank]
        s.owed_to[rank] = first[rank]
        s.ran_to[rank] = 2 * first[rank]
        s.begin[rank] = NEVER
        forwards_left[rank] = microbatches * (case.stages_first[rank + 1] - case.stages_first[rank])
        s.stack[top] = rank
        top += 1
    while top > 0:
        top -= 1
        rank = s.stack[top]
        now, held = s.now[rank], s.held[rank]
        while s.at[rank] < first[rank + 1]:
            token = tokens[s.at[rank]]
            stage, kind = token >> 2, token & 3
            if kind == 2:  # W where the order has it
                if s.done[token] >= s.done[4 * stage + 1]:
                    return NEVER, NEVER, NEVER
                s.done[token] += 1
                now = now + case.dispatch + case.time[token]
                held -= case.release[token]
                s.ran[s.ran_to[rank]] = token
                s.ran_to[rank] += 1
                s.cause[s.at[rank]] = -1
                s.at[rank] += 1
                continue
            ready, cause, missing = 0.0, -1, -1
            if kind == 0:
                number = s.done[token]
                for slot in range(case.forward_first[stage], case.forward_first[stage + 1]):
                    source = case.forward_stage[slot]
                    if s.done[4 * source] <= number:
                        missing = 2 * source
                        break
                    when = s.end[0, source, number] + case.forward_delay[slot]
                    if when > ready:
                        ready, cause = when, 2 * source
            else:
                number = s.done[4 * stage + 1] + s.done[4 * stage + 3]
                if s.done[4 * stage] <= number:
                    return NEVER, NEVER, NEVER
                ready, cause = s.end[0, stage, number], 2 * stage
                for slot in range(case.backward_first[stage], case.backward_first[stage + 1]):
                    source = case.backward_stage[slot]
                    if s.done[4 * source + 1] + s.done[4 * source + 3] <= number:
                        missing = 2 * source + 1
                        break
                    when = s.end[1, source, number] + case.backward_delay[slot]
                    if when > ready:
                        ready, cause = when, 2 * source + 1
            if missing >= 0:
                s.awaited[rank] = missing
                break
            taken = case.activation[stage] if kind == 0 else 0.0
            if fill:
                share = patience[rank, 0] if forwards_left[rank] > 0 else patience[rank, 1]
                while s.owed_from[rank] < s.owed_to[rank]:
                    owing = s.owed[s.owed_from[rank]]
                    cost = case.time[4 * owing + 2] + case.dispatch
                    gap = ready - now - case.dispatch
                    if held + taken <= case.budget[rank] and (gap <= SLACK * cost or gap < share * cost * (1 - SLACK)):
                        break
                    s.owed_from[rank] += 1
                    s.done[4 * owing + 2] += 1
                    now += cost
                    held -= case.release[4 * owing + 2]
                    s.ran[s.ran_to[rank]] = 4 * owing + 2
                    s.ran_to[rank] += 1
            if held + taken > case.budget[rank]:
                return NEVER, NEVER, NEVER
            start = now + case.dispatch
            s.cause[s.at[rank]] = -1
            if ready > start:
                start = ready
                s.cause[s.at[rank]] = cause
            if s.begin[rank] == NEVER:
                s.begin[rank] = start
            now = start + case.time[token]
            held += taken
            if held > s.peak[rank]:
                s.peak[rank] = held
            held -= case.release[token]
            s.done[token] += 1
            side = 0 if kind == 0 else 1
            s.end[side, stage, number] = now
            s.place[side, stage, number] = s.at[rank]
            s.ran[s.ran_to[rank]] = token
            s.ran_to[rank] += 1
            s.at[rank] += 1
            if kind == 0:
                forwards_left[rank] -= 1
                users_from, users_to = case.forward_users_first[stage], case.forward_users_first[stage + 1]
            else:
                users_from, users_to = case.backward_users_first[stage], case.backward_users_first[stage + 1]
                if kind == 1 and fill:
                    s.owed[s.owed_to[rank]] = stage
                    s.owed_to[rank] += 1
            for slot in range(users_from, users_to):
                user = case.forward_users[slot] if kind == 0 else case.backward_users[slot]
                other = case.rank_of[user]
                if s.awaited[other] == 2 * stage + side:
                    s.awaited[other] = -1
                    s.stack[top] = other
                    top += 1
        s.now[rank] = now
        s.held[rank] = held
    begin, end, span, total = NEVER, 0.0, 0.0, 0.0
    for rank in range(ranks):
        if s.at[rank] < first[rank + 1]:
            return NEVER, NEVER, NEVER
        if first[rank] == first[rank + 1]:
            continue
        for slot in range(s.owed_from[rank], s.owed_to[rank]):
            owing = s.owed[slot]
            s.now[rank] += case.time[4 * owing + 2] + case.dispatch
            s.ran[s.ran_to[rank]] = 4 * owing + 2
            s.ran_to[rank] += 1
        last = s.now[rank]
        begin, end = min(begin, s.begin[rank]), max(end, last)
        span = max(span, last - s.begin[rank])
        total += last
    return end - begin, span, total / ranks - begin


run = jit(_run)


def _next_random(state: Random) -> np.uint64:
    """Return the next number of a 64-bit xorshift generator, whose state is an array of one."""
    x: np.uint64 = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return x


next_random = jit(_next_random)


def _uniform(state: Random) -> float:
    return float(next_random(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


uniform = jit(_uniform)


def _below(state: Random, count: int) -> int:
    return int(next_random(state) >> np.uint64(11)) % count


below = jit(_below)


def _critical_places(case: Instance, first: Ints, rank_at: Ints, tokens: Tokens, s: Scratch, path: Ints) -> int:
    """Write the places on the critical path of the last run into ``path``; return how many there are."""
    worst, latest = -1, -1.0
    for rank in range(len(first) - 1):
        if first[rank] < first[rank + 1] and s.now[rank] > latest:
            worst, latest = rank, s.now[rank]
    place, count = first[worst + 1] - 1, 0
    while count < len(path):
        path[count] = place
        count += 1
        cause = s.cause[place]
        if cause < 0:
            if place == first[rank_at[place]]:
                break
            place -= 1
            continue
        token = tokens[place]
        stage, side = token >> 2, 0 if token & 3 == 0 else 1
        # The microbatch of the place: its cause is the same microbatch of another stage, or its own forward.
        number = 0
        low, high = 0, case.microbatches - 1
        while low <= high:  # places of a stage ascend with the microbatch
            middle = (low + high) >> 1
            if s.place[side, stage, middle] == place:
                number = middle
                break
            if s.place[side, stage, middle] < place:
                low = middle + 1
            else:
                high = middle - 1
        place = s.place[cause & 1, cause >> 1, number]
    return count


critical_places = jit(_critical_places)


def _move(tokens: Tokens, low: int, high: int, place: int, distance: int) -> int:
    """Move the token at a place by up to a distance, within [low, high); return where it is now.

    It does not pass a token of its own stage and kind, which would change nothing, nor, next to each other, the F and I
    of one microbatch; a longer move that breaks that deadlocks and is rejected.
    """
    token = tokens[place]
    step = 1 if distance > 0 else -1
    for _ in range(abs(distance)):
        other = place + step
        if other < low or other >= high or tokens[other] == token:
            break
        tokens[place] = tokens[other]
        tokens[other] = token
        place = other
    return place


move = jit(_move)


def _anneal(  # noqa: C901 - one loop, compiled
    case: Instance,
    first: Ints,
    given: Tokens,
    start_patience: Floats,
    fill: bool,
    weights: Floats,
    goal: float,
    steps: int,
    hot: float,
    seed: int,
) -> tuple[Tokens, Floats, int]:
    """Improve an order by simulated annealing; return the best order, its patience, and the number of runs.

    ``weights`` says how much makespan and span count. It ends early once their sum is no more than ``goal``. The
    temperature falls from ``hot`` to 0.
    """
    ranks, length = len(first) - 1, len(given)
    stages = len(case.rank_of)
    s = scratch(stages, case.microbatches, ranks, length)
    rank_at = np.zeros(length, np.int64)
    for rank in range(ranks):
        rank_at[first[rank] : first[rank + 1]] = rank
    tokens, patience = given.copy(), start_patience.copy()
    makespan, span, mean = run(case, first, tokens, patience, fill, s)
    current = weights[0] * makespan + weights[1] * span + MEAN_SHARE * mean
    best, best_mean, best_tokens, best_patience = current, mean, tokens.copy(), patience.copy()
    path = np.zeros(length, np.int64)
    on_path = critical_places(case, first, rank_at, tokens, s, path) if current < NEVER else 0
    state = np.array([np.uint64(seed) * np.uint64(2654435761) + np.uint64(88172645463325252)], np.uint64)
    may_fuse = False
    for stage in range(stages):
        may_fuse = may_fuse or case.splits[stage]
    runs = 1
    for step in range(steps):
        if best - MEAN_SHARE * best_mean <= goal:
            break
        temperature = hot * (1.0 - step / steps)
        choice = uniform(state)
        place = path[below(state, on_path)] if on_path > 0 and uniform(state) < 0.75 else below(state, length)
        rank = rank_at[place]
        old_share, column, landed, fused = 0.0, 0, place, False
        if fill and choice < 0.1:
            column = below(state, 2)
            old_share = patience[rank, column]
            patience[rank, column] = min(1.5, max(0.0, old_share + (uniform(state) - 0.5) * 0.8))
        elif fill and may_fuse and choice < 0.2 and tokens[place] & 3 != 0:
            if not case.splits[tokens[place] >> 2]:
                continue
            fused = True
            tokens[place] ^= 2  # I and B
        else:
            distance = 1 if uniform(state) < 0.5 else 2 + below(state, 9)
            if uniform(state) < 0.5:
                distance = -distance
            landed = move(tokens, first[rank], first[rank + 1], place, distance)
            if landed == place:
                continue
        makespan, span, mean = run(case, first, tokens, patience, fill, s)
        runs += 1
        value = weights[0] * makespan + weights[1] * span + MEAN_SHARE * mean
        if value <= current or (temperature > 0 and uniform(state) < np.exp((current - value) / temperature)):
            current = value
            on_path = critical_places(case, first, rank_at, tokens, s, path)
            if value < best:
                best, best_mean = value, mean
                best_tokens[:] = tokens
                best_patience[:] = patience
        elif fill and choice < 0.1:
            patience[rank, column] = old_share
        elif fused:
            tokens[place] ^= 2
        elif landed != place:
            move(tokens, first[rank], first[rank + 1], landed, place - landed)
    return best_tokens, best_patience, runs


anneal = jit(_anneal)
