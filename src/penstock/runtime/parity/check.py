"""Runs a batch through the unsplit model, with full and split backwards, and through the schedule, and compares."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.errors import StageError
from penstock.execution.preserved_state import copy_as_leaves
from penstock.runtime.parity.comparison import alone, compare, compared_losses, gather_differences, parameters_of
from penstock.runtime.parity.loss_reduction import reduction_of
from penstock.runtime.parity.preserve import pop_gradients, preserved_pipeline, restore_values
from penstock.runtime.parity.replay import Replay, order_of
from penstock.runtime.parity.report import HALVES, SCHEDULED, Parity, describe_untied
from penstock.runtime.parity.shared_parameters import SharedParameters, copies_among, likely_ties
from penstock.runtime.parity.unsplit import Unsplit

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.runtime.engine import Engine
    from penstock.runtime.parity.preserve import Values

_CALL: Final = "check_parity()"


def check_parity(
    engine: Engine, run_step: Callable[..., Any], args: Any, kwargs: dict[str, Any], target: Any
) -> Parity:
    """See ``Pipeline.check_parity``."""
    engine.begin_call(_CALL)
    if engine.is_forward_only:
        raise StageError("check_parity compares gradients, but this schedule has no backward")
    parameters = parameters_of(engine.stages)
    values: Values = {}
    with engine.failures, torch.enable_grad(), preserved_pipeline(engine, parameters, values) as begin:
        batch = engine.batches.of_step(copy_as_leaves(args), copy_as_leaves(kwargs), target, varying=True)
        # So that shapes are known, and no dry run is needed below.
        engine.programs.training(batch, engine.customize)
        values |= {one: one.detach().clone() for one in parameters}  # now that lazy ones have theirs
        shared = SharedParameters(engine.transport, parameters)
        mine = shared.mine
        unsplit = Unsplit(engine, batch, parameters, mine)
        begin()
        expected, halves, losses = unsplit.run(split=True)
        halves = engine.ties.add_up(shared.add_up(halves), engine.transport)
        reduction = reduction_of(engine, unsplit, losses, target)
        engine.judges_loss &= bool(reduction.unchecked)  # else it is judged here, and better
        begin()
        found: list[torch.Tensor] = []
        with Replay(engine.stages, order_of(engine)):
            run_step(*copy_as_leaves(args), target=target, losses=found, return_outputs=False, **copy_as_leaves(kwargs))
        engine.transport.progress.call = _CALL  # again
        shared.wait()
        scheduled = pop_gradients(mine)
        differences = [
            *compare(alone(mine, engine.stages), halves, expected, HALVES),
            *compare(mine, scheduled, expected, SCHEDULED),
            *compared_losses(engine, found, losses),
            *unsplit.inputs,
        ]
        everything = gather_differences(engine, differences)
        random = False
        if not all(one.fits for one in everything):
            begin()
            again, _, _ = unsplit.run(split=False)
            varies = any(not one.fits for one in compare(mine, again, expected, SCHEDULED))
            random = any(data == b"1" for data in engine.transport.exchange(b"1" if varies else b"0"))
        copies = copies_among(engine.transport, mine, engine.ties.uncounted)
        trained = [
            data.decode() for data in engine.transport.exchange(restore_values(parameters, values).encode()) if data
        ]
    if trained:
        raise StageError(
            f"{trained[0]} changed during check_parity (it has been restored); does a hook step an optimizer? "
            "Remove such hooks while check_parity runs"
        )
    untied = likely_ties(copies)
    parity = Parity(
        tuple(everything),
        random,
        tuple(float(loss) for loss in losses),
        reduction,
        tuple(tuple(map(str, places)) for places in copies),
        untied,
    )
    if parity.wrong:
        raise StageError(str(parity), stage=parity.wrong[0].stage)
    if not reduction.fits:
        raise StageError(str(parity), stage=engine.schedule.stages - 1)
    if untied and engine.rank == 0:
        warnings.warn("\n".join(map(describe_untied, untied)), stacklevel=3)  # the caller of check_parity()
    return parity
