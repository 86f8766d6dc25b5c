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


def scratch(stages: int, microbatches: int, ranks: int, length: int) -> Scratch:
    """Return room for runs of orders of this length."""
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


def _run(  # noqa: C901 - one loop, compiled
    case: Instance, first: Ints, tokens: Tokens, patience: Floats, fill: bool, s: Scratch
) -> tuple[float, float, float]:
    """Run an order; return (makespan, span, mean end), or infinity if it deadlocks or exceeds the memory.

    ``patience`` has for each rank how long a gap must be to be filled, as a share of the W that fills it: while it has
    F left, and afterwards. Without ``fill``, W run where the order has them.
    """
    # Fields that are read in a loop have local names: looking them up takes a fifth of the time of a run.
    end, done, place, cause, now_of, begin_of, held_of, peak, at = s[:9]
    awaited, owed, owed_from, owed_to, stack, ran, ran_to = s[9:]
    dispatch, time, release, rank_of = case.dispatch, case.time, case.release, case.rank_of
    forward_first, forward_stage, forward_delay = case.forward_first, case.forward_stage, case.forward_delay
    backward_first, backward_stage, backward_delay = case.backward_first, case.backward_stage, case.backward_delay
    ranks = len(first) - 1
    done[:] = 0
    now_of[:] = 0.0
    begin_of[:] = NEVER
    held_of[:] = 0.0
    peak[:] = 0.0
    awaited[:] = -1
    forwards_left = np.zeros(ranks, np.int64)
    top = 0
    for rank in range(ranks - 1, -1, -1):
        at[rank] = owed_from[rank] = owed_to[rank] = first[rank]
        ran_to[rank] = 2 * first[rank]
        forwards_left[rank] = case.microbatches * (case.stages_first[rank + 1] - case.stages_first[rank])
        stack[top] = rank
        top += 1
    while top > 0:
        top -= 1
        rank = stack[top]
        now, held, budget = now_of[rank], held_of[rank], case.budget[rank]
        index, ran_at, next_owed, last_owed = at[rank], ran_to[rank], owed_from[rank], owed_to[rank]
        while index < first[rank + 1]:
            token = tokens[index]
            stage, kind = token >> 2, token & 3
            if kind == 2:  # W where the order has it
                if done[token] >= done[4 * stage + 1]:
                    return NEVER, NEVER, NEVER
                done[token] += 1
                now += dispatch + time[token]
                held -= release[token]
                ran[ran_at] = token
                ran_at += 1
                cause[index] = -1
                index += 1
                continue
            ready, latest, missing = 0.0, -1, -1
            if kind == 0:
                number = done[token]
                for slot in range(forward_first[stage], forward_first[stage + 1]):
                    source = forward_stage[slot]
                    if done[4 * source] <= number:
                        missing = 2 * source
                        break
                    when = end[0, source, number] + forward_delay[slot]
                    if when > ready:
                        ready, latest = when, 2 * source
            else:
                number = done[4 * stage + 1] + done[4 * stage + 3]
                if done[4 * stage] <= number:
                    return NEVER, NEVER, NEVER
                ready, latest = end[0, stage, number], 2 * stage
                for slot in range(backward_first[stage], backward_first[stage + 1]):
                    source = backward_stage[slot]
                    if done[4 * source + 1] + done[4 * source + 3] <= number:
                        missing = 2 * source + 1
                        break
                    when = end[1, source, number] + backward_delay[slot]
                    if when > ready:
                        ready, latest = when, 2 * source + 1
            if missing >= 0:
                awaited[rank] = missing
                break
            taken = case.activation[stage] if kind == 0 else 0.0
            if fill:
                share = patience[rank, 0] if forwards_left[rank] > 0 else patience[rank, 1]
                while next_owed < last_owed:
                    weight = 4 * owed[next_owed] + 2
                    cost = time[weight] + dispatch
                    gap = ready - now - dispatch
                    if held + taken <= budget and (gap <= SLACK * cost or gap < share * cost * (1 - SLACK)):
                        break
                    next_owed += 1
                    done[weight] += 1
                    now += cost
                    held -= release[weight]
                    ran[ran_at] = weight
                    ran_at += 1
            if held + taken > budget:
                return NEVER, NEVER, NEVER
            start = now + dispatch
            cause[index] = -1
            if ready > start:
                start = ready
                cause[index] = latest
            if begin_of[rank] == NEVER:
                begin_of[rank] = start
            now = start + time[token]
            held += taken
            peak[rank] = max(peak[rank], held)
            held -= release[token]
            done[token] += 1
            side = 0 if kind == 0 else 1
            end[side, stage, number] = now
            place[side, stage, number] = index
            ran[ran_at] = token
            ran_at += 1
            index += 1
            users = case.forward_users if kind == 0 else case.backward_users
            users_first = case.forward_users_first if kind == 0 else case.backward_users_first
            if kind == 0:
                forwards_left[rank] -= 1
            elif kind == 1 and fill:
                owed[last_owed] = stage
                last_owed += 1
            for slot in range(users_first[stage], users_first[stage + 1]):
                other = rank_of[users[slot]]
                if awaited[other] == 2 * stage + side:
                    awaited[other] = -1
                    stack[top] = other
                    top += 1
        now_of[rank], held_of[rank] = now, held
        at[rank], ran_to[rank], owed_from[rank], owed_to[rank] = index, ran_at, next_owed, last_owed
    begin, latest_end, span, total = NEVER, 0.0, 0.0, 0.0
    for rank in range(ranks):
        if at[rank] < first[rank + 1]:
            return NEVER, NEVER, NEVER
        if first[rank] == first[rank + 1]:
            continue
        now, ran_at = now_of[rank], ran_to[rank]
        for slot in range(owed_from[rank], owed_to[rank]):
            weight = 4 * owed[slot] + 2
            now += time[weight] + dispatch
            ran[ran_at] = weight
            ran_at += 1
        now_of[rank], ran_to[rank] = now, ran_at
        begin, latest_end = min(begin, begin_of[rank]), max(latest_end, now)
        span = max(span, now - begin_of[rank])
        total += now
    return latest_end - begin, span, total / ranks - begin


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
    s: Scratch,
) -> tuple[Tokens, Floats, int]:
    """Improve an order by simulated annealing; return the best order, its patience, and the number of runs.

    ``weights`` says how much makespan and span count. It ends early once their sum is no more than ``goal``. The
    temperature falls from ``hot`` to 0.
    """
    ranks, length = len(first) - 1, len(given)
    stages = len(case.rank_of)
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
                best_tokens, best_patience = tokens.copy(), patience.copy()
        elif fill and choice < 0.1:
            patience[rank, column] = old_share
        elif fused:
            tokens[place] ^= 2
        elif landed != place:
            move(tokens, first[rank], first[rank + 1], landed, place - landed)
    return best_tokens, best_patience, runs


anneal = jit(_anneal)
