"""Removes deadlocks from a schedule by moving its transfers, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import VerificationError
from penstock.lowering.send_receive import send_receive
from penstock.verification.check import DEFAULT_MODEL, check
from penstock.verification.deadlock import without_transfers
from penstock.verification.window import draw_findings

if TYPE_CHECKING:
    from penstock.graph.comm_model import CommModel
    from penstock.ir.schedule import Schedule


def repair(schedule: Schedule, model: CommModel = DEFAULT_MODEL) -> Schedule:
    """Return a schedule with the same actions that is free of deadlock under the model; unchanged if it already is.

    The transfers are removed and added again by ``send_receive``, in one order that all ranks agree on. Every edge of
    the event graph then goes from an earlier turn to a later one, under every model, so there is no cycle. This fails
    only if the compute actions alone deadlock, and then no order of transfers can help.

    Raises:
        VerificationError: something else is wrong, or the compute actions deadlock; the findings say which.
    """
    findings = check(schedule, model=model)
    if not findings:
        return schedule
    compute = without_transfers(schedule)
    others = [finding for finding in findings if finding.kind != "deadlock"] or check(compute, model=model)
    if others:
        broken = schedule if others[0] in findings else compute
        raise VerificationError(others, draw_findings(broken, others))
    return send_receive(compute)
