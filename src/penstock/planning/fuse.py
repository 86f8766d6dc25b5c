"""Joins I with the W that follows it to a whole backward, where that makes nothing worse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.planning.orders import KINDS, B, I, Order, W

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.planning.evaluator import Evaluator, Trial
    from penstock.planning.orders import Tokens


def fuse(evaluator: Evaluator, trial: Trial) -> Trial:
    """Return the trial with as many whole backwards as possible, rank by rank, without making it worse.

    A whole backward is one action instead of two, which a simulation with ``dispatch`` sees, and a real rank always.
    """
    best, rows = trial, trial.order.rows
    joined = [_join(row) for row in rows]
    for chosen in [range(len(rows)), *([rank] for rank in range(len(rows)))]:
        best = _tried(evaluator, best, joined, chosen)
    return best


def _tried(evaluator: Evaluator, best: Trial, joined: Sequence[Tokens], ranks: Sequence[int]) -> Trial:
    rows = best.order.rows
    if all(len(joined[rank]) == len(rows[rank]) for rank in ranks):
        return best
    for rank in ranks:
        rows[rank] = joined[rank]
    fused = evaluator.replay(best.origin, Order.from_rows(rows))
    return best if fused is None or evaluator.quality(fused) > evaluator.quality(best) else fused


def _join(row: Tokens) -> Tokens:
    """Return the row with every I that its own W follows replaced by B."""
    if not len(row):
        return row
    stage, kind = row // KINDS, row % KINDS
    owed = np.zeros(len(row), np.int64)  # the W that the stage owes before each action
    for each in np.unique(stage):
        mine = np.flatnonzero(stage == each)
        change = (kind[mine] == I).astype(np.int64) - (kind[mine] == W)
        owed[mine] = np.cumsum(change) - change
    follows = np.zeros(len(row), bool)
    follows[:-1] = (kind[:-1] == I) & (kind[1:] == W) & (stage[:-1] == stage[1:]) & (owed[:-1] == 0)
    whole = np.where(follows, row - I + B, row)
    return np.asarray(whole[~np.append(False, follows[:-1])], row.dtype)
