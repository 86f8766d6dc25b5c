"""Parameters are gathered before they are used, and gradients reduced once, when they are complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.graph.sorting import order_by
from penstock.ir.actions import BACKWARD_WEIGHT, COMPUTE, FULL_BACKWARD, REDUCE_GRAD, RESHARD, UNSHARD, Action
from penstock.verification.findings import Finding, Problem, at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.leaves import Leaves


def wrongly_sharded(leaves: Leaves) -> Iterator[Problem]:
    """Uses of parameters that are not there; nothing in a schedule without any UNSHARD or RESHARD."""
    if not len(leaves.are(UNSHARD, RESHARD)):
        return
    places = leaves.are(UNSHARD, RESHARD, *COMPUTE)
    places = places[order_by(leaves.stage[places], places)]
    changes = leaves.is_kind(places, UNSHARD) | leaves.is_kind(places, RESHARD)
    # The last change before each of them, if it is of the same stage.
    number = np.arange(len(places))
    last = np.maximum.accumulate(np.where(changes, number, -1))
    last = np.concatenate([[-1], last[:-1]]) if len(last) else last
    known = (last >= 0) & (leaves.stage[places[np.maximum(last, 0)]] == leaves.stage[places])
    gathered = known & leaves.is_kind(places[np.maximum(last, 0)], UNSHARD)
    unshards = changes & leaves.is_kind(places, UNSHARD)
    if (gathered != unshards).all():
        return  # whatever is not an UNSHARD has the parameters, and an UNSHARD has not
    computes = ~changes
    yield Problem(
        "unsharded_twice",
        places[leaves.is_kind(places, UNSHARD) & gathered],
        at(leaves, "unsharded_twice", "{}, but the stage is unsharded already", "drop it"),
    )
    yield Problem(
        "resharded_twice",
        places[leaves.is_kind(places, RESHARD) & ~gathered],
        at(leaves, "resharded_twice", "{}, but the stage is not unsharded", "drop it"),
    )
    yield Problem(
        "resharded_in_use",
        places[computes & known & ~gathered],
        at(leaves, "resharded_in_use", "{} runs on a stage that was resharded before it", "reshard it later"),
    )
    yield Problem(
        "not_unsharded",
        places[computes & ~known],
        at(leaves, "not_unsharded", "{} runs on a stage that was not unsharded", "unshard it before"),
    )


def wrongly_reduced(leaves: Leaves) -> Iterator[Problem]:
    """REDUCE_GRAD too early, twice or not at all; nothing in a schedule without any."""
    reductions = leaves.are(REDUCE_GRAD)
    reductions = reductions[leaves.stage[reductions] < leaves.schedule.stages]
    if not len(reductions):
        return
    backwards = leaves.are(FULL_BACKWARD, BACKWARD_WEIGHT)
    backwards = backwards[leaves.stage[backwards] < leaves.schedule.stages]
    last = np.full(leaves.schedule.stages, -1, np.int64)
    last[leaves.stage[backwards]] = backwards  # in order: the last one stays
    count = np.bincount(leaves.stage[reductions], minlength=leaves.schedule.stages)
    if (count == (last >= 0)).all() and (last[leaves.stage[reductions]] < reductions).all():
        return  # one of every stage that has gradients, behind them
    _, first = np.unique(leaves.stage[reductions], return_index=True)
    again = np.ones(len(reductions), bool)
    again[first] = False
    yield Problem(
        "reduced_twice",
        reductions[again],
        at(leaves, "reduced_twice", "{} is there a second time", "drop it"),
    )
    yield Problem(
        "reduced_early",
        reductions[~again & (last[leaves.stage[reductions]] < 0)],
        at(leaves, "reduced_early", "{}, but the stage has no backward", "drop it, or add the backward"),
    )
    early = ~again & (last[leaves.stage[reductions]] > reductions)
    yield Problem(
        "reduced_early",
        reductions[early],
        at(leaves, "reduced_early", "{} comes before the last gradients of the stage", "move it behind them"),
    )
    without = np.setdiff1d(np.flatnonzero(last >= 0), leaves.stage[reductions])

    def tell(stage: int) -> Finding:
        action, rank = Action(stage, REDUCE_GRAD), int(leaves.home[stage])
        return Finding(
            "not_reduced",
            rank,
            None,
            action,
            f"{action} is missing, though other stages have theirs",
            f"add it to rank {rank}",
        )

    yield Problem("not_reduced", without, tell)
