"""Proves by turns that no rank waits forever: whatever is awaited has an earlier turn than what waits for it.

The lowering knows a turn for every action. Checking that these are a proof takes one pass over the edges of the event
graph, and no walk through it. If they ascend along every row, the edges are not even needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.graph.array_blocks import blocks
from penstock.graph.events import pair_transfers, rank_ranges

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.graph.action_table import ActionTable
    from penstock.graph.comm_model import CommModel
    from penstock.graph.events import RankRange

    Ints = NDArray[np.signedinteger[Any]]


def prove_deadlock_free(actions: ActionTable, model: CommModel, turns: Ints) -> bool:
    """Return whether the turns, one per action, prove the absence of deadlock; if not, there may still be none.

    O(n), if the turns ascend along every row; O(n log n) otherwise.
    """
    if actions.has_transfers and _ascend(actions, turns) and _are_shared(actions, turns):
        return True
    return all(_all_wait_for_earlier(part, model, turns) for part in rank_ranges(actions))


def _ascend(actions: ActionTable, turns: Ints) -> bool:
    """Return whether every step of a rank has a later turn than the one before it, and an overlap a single turn.

    Then so do all edges within a rank. The others are between a send and its receive, or from a receive to a later send
    of the same lane; if a send and its receive share a turn, all edges are in order, whatever the model.
    """
    for block in blocks(len(actions) - 1):
        ahead, behind = block, slice(block.start + 1, block.stop + 1)
        together = actions.cell[ahead] == actions.cell[behind]
        fine = ((turns[ahead] < turns[behind]) != together) & (turns[ahead] <= turns[behind])
        if not (fine | (actions.rank[ahead] != actions.rank[behind])).all():
            return False
    return True


def _are_shared(actions: ActionTable, turns: Ints) -> bool:
    """Return whether every send has the turn of its receive."""
    pairs = pair_transfers(actions)
    return bool((turns[pairs.send] == turns[pairs.receive]).all())


def _all_wait_for_earlier(part: RankRange, model: CommModel, turns: Ints) -> bool:
    within, cell = turns[part.begin : part.end], part.actions.cell[part.begin : part.end]
    # The parts of one event must have the same turn, otherwise the turns prove nothing.
    if ((cell[1:] == cell[:-1]) & (within[1:] != within[:-1])).any():
        return False
    if model.capacity == 0 and (turns[part.operation] != turns[part.partner]).any():
        return False
    for reason, awaited, waiting in part.edges(model):
        # A receive may have the same turn as its send: no cycle consists of messages alone.
        if (turns[awaited] + (reason != "message") > turns[waiting]).any():
            return False
    return True
