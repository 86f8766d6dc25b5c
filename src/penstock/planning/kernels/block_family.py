"""Compiled: enumerates building blocks for ranks with two stages in a V."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]


def enumerate_blocks(  # noqa: C901 - compiled
    ranks: int, steps: Ints, turns: Ints, stride: int, least: int, most: int, room: int
) -> tuple[Ints, Ints, int]:
    """Return blocks whose plain repetition holds ``least`` to ``most`` activations, what they hold, and their number.

    The four passes F0, F1, I1 and I0 go from rank to rank in some ticks each: a row of ``steps`` for the first ranks,
    another one for the rest. It changes at one of every ``stride`` ranks, or never. ``turns`` are the residues modulo 6
    of F1, I1 and I0 on rank 0, where F0 has 0; no two on a rank may be the same. At most ``room`` blocks are returned.
    """
    found, peaks = np.empty((room, ranks, 4), np.int32), np.empty(room, np.int32)
    count = 0
    block = np.empty((ranks, 4), np.int32)
    at_change, passes = np.empty(4, np.int32), np.empty(4, np.int32)
    token_at, free_for = np.empty(6, np.int32), np.empty(2, np.int32)
    for before in range(len(steps)):
        for turn in range(len(turns)):
            for hops in range(min(1, ranks - 1), ranks):
                for each in range(4):
                    sign = 1 if each % 2 == 0 else -1
                    begin = turns[turn, each - 1] if each else 0
                    at_change[each] = begin + sign * hops * steps[before, each]
                if (
                    (at_change[0] - at_change[1]) % 6 == 0
                    or (at_change[0] - at_change[2]) % 6 == 0
                    or (at_change[0] - at_change[3]) % 6 == 0
                    or (at_change[1] - at_change[2]) % 6 == 0
                    or (at_change[1] - at_change[3]) % 6 == 0
                    or (at_change[2] - at_change[3]) % 6 == 0
                ):
                    break
                rest = ranks - 1 - hops
                if rest and hops % stride:
                    continue
                for after in range(len(steps)):
                    if (after == before) != (rest == 0):
                        continue
                    is_free = True
                    for rank in range(1, rest + 1):
                        for each in range(4):
                            sign = 1 if each % 2 == 0 else -1
                            passes[each] = at_change[each] + sign * rank * steps[after, each]
                        if (
                            (passes[0] - passes[1]) % 6 == 0
                            or (passes[0] - passes[2]) % 6 == 0
                            or (passes[0] - passes[3]) % 6 == 0
                            or (passes[1] - passes[2]) % 6 == 0
                            or (passes[1] - passes[3]) % 6 == 0
                            or (passes[2] - passes[3]) % 6 == 0
                        ):
                            is_free = False
                            break
                    if not is_free:
                        continue
                    end = -1
                    for each in range(4):
                        length = hops * steps[before, each] + rest * steps[after, each]
                        # A pass begins as soon as it can after the one before, on the tick that the residue asks for.
                        begin = end + 1
                        if each:
                            wanted = turns[turn, each - 1] - (length if each % 2 else 0)
                            begin += (wanted - begin) % 6
                        for rank in range(ranks):
                            first = min(rank, hops)
                            way = first * steps[before, each] + (rank - first) * steps[after, each]
                            block[rank, each] = begin + (length - way if each % 2 else way)
                        end = begin + length
                    life = 0  # largest where the steps begin, change or end; six ticks of it are one activation
                    for rank in (0, hops, ranks - 1):
                        life = max(life, block[rank, 3] - block[rank, 0] + block[rank, 2] - block[rank, 1])
                    if life > 6 * most:
                        continue
                    peak = 0
                    for rank in range(ranks):
                        token_at[:] = -1
                        for each in range(4):
                            token_at[block[rank, each] % 6] = each
                        # Weight gradients are owed first in, first out, and two ticks of six are free for them.
                        owed, first_free, second_free = 0, -1, -1
                        for tick in range(18):
                            token = token_at[tick % 6]
                            if token >= 2:
                                owed += 1
                                if owed == 1:
                                    first_free = token
                                else:
                                    second_free = token
                            elif token < 0 and owed > 0:
                                free_for[first_free - 2] = tick % 6
                                first_free, owed = second_free, owed - 1
                        for tick in range(6):
                            live = 0
                            for second in range(2):
                                begin = block[rank, second]
                                back = block[rank, 3 - second]
                                release = back + (free_for[1 - second] - back) % 6
                                live += (tick - begin) // 6 - (tick - release) // 6
                            peak = max(peak, live)
                        if peak > most:
                            break
                    if least <= peak <= most:
                        if count < room:
                            peaks[count] = peak
                            for rank in range(ranks):
                                for each in range(4):
                                    found[count, rank, each] = block[rank, each]
                        count += 1
    kept = min(count, room)
    return found[:kept], peaks[:kept], count
