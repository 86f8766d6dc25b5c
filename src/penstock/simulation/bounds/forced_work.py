"""Computes how much work memory forces a rank to run before an operation, beyond what must precede it by itself.

Which operation releases the memory that an F needs is often open: a W of one stage or of another. But some have to, and
whichever they are, they and what must precede them take time. Backwards in time, I and W take memory and F releases it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.jit import jit
from penstock.graph.longest_path import should_compile
from penstock.simulation.bounds.memory_order import ROUNDING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.simulation.bounds.relaxation import Relaxation

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]


def forced_work(relaxed: Relaxation) -> Floats:
    """Return for every operation and microbatch the least time of further releasing operations on its rank before it.

    Those that run before it in any case do not count. At its start the rank holds what these have taken and it takes
    itself, minus what they and the further ones release; that has to fit. Of one or two operations that release, try
    all numbers, and count what must precede them, except operations that take memory. Of more, assume those that
    release most in their time. O(operations per rank ^ 2 x microbatches x activations held).
    """
    work = np.zeros((len(relaxed.rank), relaxed.microbatches))
    if np.isfinite(relaxed.budget).any():
        find = jit(_find) if should_compile(work.size * 20) else _find
        room = relaxed.budget * (1 + ROUNDING)
        find(work, relaxed.taken, relaxed.takes, relaxed.releases, room, *relaxed.members, relaxed.before)
    return work


def _find(  # noqa: C901 - compiled
    work: Floats, taken: Floats, takes: Floats, releases: Floats, room: Floats, members: Ints, first: Ints, before: Ints
) -> None:
    microbatches = work.shape[1]
    for rank in range(len(first) - 1):
        here = members[first[rank] : first[rank + 1]]
        releasing = here[releases[here] > 1e-9 * room[rank]]
        if len(releasing) == 0 or room[rank] == np.inf:
            continue
        done = np.zeros(len(taken), np.int64)
        for target in here[takes[here] > 0.0]:
            for microbatch in range(microbatches):
                need = takes[target] - room[rank]
                for other in here:
                    done[other] = max(0, min(microbatches, microbatch + before[target, other] + 1))
                    need += (takes[other] - releases[other]) * done[other]
                if need <= 0.0:
                    continue
                if len(releasing) > 2:
                    least = np.inf
                    for other in releasing:
                        least = min(least, taken[other] / releases[other])
                    work[target, microbatch] = need * least
                    continue
                one, two = releasing[0], releasing[-1]
                least = np.inf
                for count in range(microbatches - done[one] + 1):
                    rest = need - count * releases[one]
                    others = 0
                    if rest > 0.0:
                        if one == two:
                            continue
                        others = int(np.ceil(rest / releases[two]))
                        if others > microbatches - done[two]:
                            continue
                    total = 0.0
                    for third in here:
                        if takes[third] == 0.0:
                            upto = done[third]
                            if count > 0:
                                upto = max(upto, done[one] + count + before[one, third])
                            if others > 0:
                                upto = max(upto, done[two] + others + before[two, third])
                            if third == one:
                                upto = max(upto, done[one] + count)
                            if third == two and one != two:
                                upto = max(upto, done[two] + others)
                            total += (min(upto, microbatches) - done[third]) * taken[third]
                    least = min(least, total)
                    if rest <= 0.0:
                        break
                if least < np.inf:
                    work[target, microbatch] = least
