"""Programs of one stage per rank: as rows whose transfers are posted together, or as those of any other order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.ir.actions import REDUCE_GRAD
from penstock.ir.edges import links as links_of
from penstock.pipelining._engine.coalesced import gpipe_label, gpipe_row, no_label, one_f_one_b_row
from penstock.pipelining._engine.links import edges_of
from penstock.pipelining._engine.mode_selection import Mode
from penstock.pipelining._engine.programs import may_post_ahead, program_of_order, program_of_row
from penstock.pipelining._schedule.actions import _Action
from penstock.pipelining._schedule.passes import compute_rows_with_transfers
from penstock.pipelining._schedule.rows import as_rows
from penstock.pipelining._stage.inference import StageInference
from penstock.pipelining._stage.links import LinkedStage
from penstock.schedules.gpipe import gpipe
from penstock.schedules.one_f_one_b import one_f_one_b

if TYPE_CHECKING:
    from penstock.pipelining._engine.methods import CallConvention
    from penstock.pipelining._engine.programs import Compiled
    from penstock.pipelining._schedule.rows import Rows

#: How many sends of GPipe are in flight at most. To wait for the last few would cost time: a rank that is ahead for a
#: moment would be stopped. In each half messages go one way only, so to wait for an earlier send is safe.
_GPIPE_IN_FLIGHT: Final = 6


def program_of_gpipe(
    stage: Any,
    microbatches: int,
    *,
    calls: CallConvention,
    trains: bool,
    mode: Mode = Mode.METHODS,
    backwards: bool = True,
) -> Compiled:
    """Compile the program of one stage of GPipe, or of its forwards only."""
    if _may_post_alone(stage, mode):
        order = as_rows(gpipe(stage.num_stages, microbatches))
        if not backwards:
            order = {rank: row[:microbatches] for rank, row in order.items()}
        return _of_any_order(stage, order, microbatches, calls=calls, trains=trains, mode=mode)
    row = gpipe_row(stage, microbatches, backwards=backwards, reduces=trains)
    return program_of_row(
        row,
        stage,
        microbatches,
        calls=calls,
        trains=trains,
        mode=mode,
        in_flight=_GPIPE_IN_FLIGHT,
        label=gpipe_label,
    )


def program_of_one_f_one_b(
    stage: Any, stages: int, microbatches: int, *, calls: CallConvention, trains: bool, mode: Mode = Mode.METHODS
) -> Compiled:
    """Compile the program of one stage of 1F1B."""
    if _may_post_alone(stage, mode):
        order = as_rows(one_f_one_b(stages, microbatches))
        return _of_any_order(stage, order, microbatches, calls=calls, trains=trains, mode=mode)
    row = one_f_one_b_row(stage.stage_index, stages, microbatches, reduces=trains)
    return program_of_row(row, stage, microbatches, calls=calls, trains=trains, mode=mode, in_flight=1, label=no_label)


def _may_post_alone(stage: Any, mode: Mode) -> bool:
    """Whether each message may be posted separately, whatever others are in flight.

    Those beyond the chain are: posted together with others they could deadlock.
    """
    edges = edges_of([stage])
    if edges is not None and not all(link.is_chain for link in links_of(edges)):
        return True
    return bool(mode) and isinstance(stage, (StageInference, LinkedStage)) and may_post_ahead([stage])


def _of_any_order(
    stage: Any, order: Rows, microbatches: int, *, calls: CallConvention, trains: bool, mode: Mode
) -> Compiled:
    index, stages, edges = stage.stage_index, len(order), edges_of([stage])
    rows = compute_rows_with_transfers(order, {each: each for each in range(stages)}, stages, edges)
    row = [*rows[index], *([_Action(index, REDUCE_GRAD)] if trains else [])]
    return program_of_order(
        {**rows, index: row}, index, {index: stage}, microbatches, calls=calls, trains=trains, mode=mode, edges=edges
    )
