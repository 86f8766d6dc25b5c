"""Every check, one after the other."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from penstock.errors import VerificationError
from penstock.graph.leaves import Leaves
from penstock.graph.models import MODELS, CommModel
from penstock.ir.actions import FORWARD, Action
from penstock.verification.complete import misplaced, missing, repeated
from penstock.verification.deadlock import deadlocked, is_free
from penstock.verification.findings import Finding, told
from penstock.verification.memory import over_memory
from penstock.verification.order import disordered
from penstock.verification.sharding import wrongly_reduced, wrongly_sharded
from penstock.verification.transfers import untransferred
from penstock.verification.window import picture

if TYPE_CHECKING:
    from penstock.ir.schedule import Schedule

#: What point-to-point communication in torch.distributed can show at its harshest.
DEFAULT_MODEL: Final = CommModel(buffering="rendezvous", lanes="pair")


def check(schedule: Schedule, *, model: CommModel = DEFAULT_MODEL, memory_limit: float | None = None) -> list[Finding]:
    """Everything that is wrong with a schedule; an empty list is a proof that it runs.

    >>> from penstock.ir.schedule import Schedule
    >>> check(Schedule([["0F0", "0B0"], ["1F0", "1B0"]]))
    []
    >>> for finding in check(Schedule([["0F0", "0B0"], ["1B0", "1F0"]])):
    ...     print(finding)
    rank 1, step 0: 1B0 needs 1F0, which comes later, at step 1; move 1F0 before it

    Args:
        schedule: compute-only or lowered.
        model: how communication behaves.
        memory_limit: how many activations, of a stage and a microbatch each, a rank has room for.
    """
    if (sparse := _sparse(schedule)) is not None:
        return [sparse]
    leaves = Leaves(schedule)
    problems = [
        misplaced(leaves),
        repeated(leaves),
        missing(leaves),
        disordered(leaves),
        untransferred(leaves),
        wrongly_sharded(leaves),
        wrongly_reduced(leaves),
        deadlocked(leaves, model),
    ]
    if memory_limit is not None:
        problems.append(over_memory(leaves, memory_limit))
    return told(chain.from_iterable(problems))


def verify(schedule: Schedule, *, model: CommModel = DEFAULT_MODEL, memory_limit: float | None = None) -> None:
    """Raise ``VerificationError`` with everything that is wrong, shown on the grid; return if nothing is."""
    findings = check(schedule, model=model, memory_limit=memory_limit)
    if findings:
        raise VerificationError(findings, picture(schedule, findings))


def safe_models(schedule: Schedule) -> dict[CommModel, bool]:
    """Under which communication models the schedule is free of deadlock, the harshest first."""
    leaves = Leaves(schedule)
    return {model: is_free(leaves, model) for model in MODELS}


def _sparse(schedule: Schedule) -> Finding | None:
    """So much is missing that tables of what should be there would not fit: say so, and leave it at that."""
    wanted = schedule.stages * schedule.microbatches
    if wanted <= 8 * len(schedule.codes) + 100_000:
        return None
    action = Action(0, FORWARD, schedule.microbatches - 1)
    return Finding(
        "missing",
        None,
        None,
        action,
        f"{schedule.stages} stages times {schedule.microbatches} microbatches need {wanted} forwards, and there are "
        f"only {len(schedule.codes)} actions",
        "number the microbatches from 0 without a gap",
    )
