"""Runs every check on a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import ModelError, ScheduleError, SizeError, VerificationError
from penstock.graph.action_table import ActionTable, is_too_sparse
from penstock.graph.comm_model import MODELS, CommModel
from penstock.ir import packed
from penstock.ir.actions import FORWARD, Action
from penstock.ir.placement import first_gap
from penstock.ir.schedule import Schedule
from penstock.verification.completeness import check_completeness, check_duplicates, check_placement
from penstock.verification.deadlock import check_deadlock, is_deadlock_free
from penstock.verification.findings import Finding, collect, report
from penstock.verification.memory import check_memory
from penstock.verification.order import check_order
from penstock.verification.reductions import check_reductions
from penstock.verification.sharding import check_sharding
from penstock.verification.transfers import check_transfers
from penstock.verification.window import draw_findings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.graph.action_table import Positions
    from penstock.verification.findings import Problem

#: The strictest behaviour that point-to-point communication in torch.distributed can show.
DEFAULT_MODEL: Final = CommModel(buffering="rendezvous", lanes="pair")


def check(schedule: Schedule, *, model: CommModel = DEFAULT_MODEL, memory_limit: float | None = None) -> list[Finding]:
    """Return everything that is wrong with a schedule; an empty list is a proof that it runs.

    >>> from penstock.ir.schedule import Schedule
    >>> check(Schedule([["0F0", "0B0"], ["1F0", "1B0"]]))
    []
    >>> for finding in check(Schedule([["0F0", "0B0"], ["1B0", "1F0"]])):
    ...     print(finding)
    rank 1, step 0: 1B0 needs 1F0, which comes later, at step 1; move 1F0 before it

    Args:
        schedule: compute-only or lowered.
        model: how communication behaves.
        memory_limit: how many activations, each of one stage and microbatch, a rank can hold.
    """
    _check_arguments(schedule, model, memory_limit)
    return _all_findings(ActionTable(schedule), model, memory_limit)


def _all_findings(
    actions: ActionTable, model: CommModel, memory_limit: float | None = None, turns: Positions | None = None
) -> list[Finding]:
    if is_too_sparse(actions.schedule):
        return [_sparse_finding(actions.schedule)]
    problems = collect(_structure(actions))
    problems += collect([check_deadlock(actions, model, turns, only_problem=not problems)])
    if memory_limit is not None:
        problems += collect([check_memory(actions, memory_limit)])
    return report(problems)


def verify(schedule: Schedule, *, model: CommModel = DEFAULT_MODEL, memory_limit: float | None = None) -> None:
    """Raise ``VerificationError`` with everything that is wrong, shown on the grid, or return if nothing is."""
    _raise_if_any(schedule, check(schedule, model=model, memory_limit=memory_limit))


def verify_structure(schedule: Schedule) -> None:
    """Verify everything but the absence of deadlock, for callers that prove that themselves."""
    _check_arguments(schedule, DEFAULT_MODEL, None)
    sparse = is_too_sparse(schedule)
    findings = [_sparse_finding(schedule)] if sparse else report(collect(_structure(ActionTable(schedule))))
    _raise_if_any(schedule, findings)


def verify_actions(actions: ActionTable, *, model: CommModel = DEFAULT_MODEL, turns: Positions | None = None) -> None:
    """Verify a schedule by its action table, for callers that have one.

    Args:
        actions: the action table of the schedule.
        model: how communication behaves.
        turns: a witness that there is no deadlock, see ``check_deadlock``.
    """
    _raise_if_any(actions.schedule, _all_findings(actions, model, turns=turns))


def safe_models(schedule: Schedule) -> dict[CommModel, bool]:
    """Return for every communication model whether the schedule is free of deadlock, the strictest model first.

    Raises:
        VerificationError: something else is wrong, so it is unknown what waits for what.
    """
    _check_arguments(schedule, DEFAULT_MODEL, None)
    actions = ActionTable(schedule)
    _raise_if_any(schedule, report(collect(_structure(actions))))
    return {model: is_deadlock_free(actions, model) for model in MODELS}


def _raise_if_any(schedule: Schedule, findings: list[Finding]) -> None:
    if findings:
        raise VerificationError(findings, draw_findings(schedule, findings))


def _structure(actions: ActionTable) -> list[Iterator[Problem]]:
    """Return all checks but those of deadlock and memory."""
    return [
        check_placement(actions),
        check_duplicates(actions),
        check_completeness(actions),
        check_order(actions),
        check_transfers(actions),
        check_sharding(actions),
        check_reductions(actions),
    ]


def _check_arguments(schedule: object, model: object, memory_limit: object) -> None:
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"expected a Schedule, got {schedule!r}")
    if not isinstance(model, CommModel):
        raise ModelError(f"model must be a CommModel, e.g. CommModel('rendezvous', 'pair'), got {model!r}")
    if memory_limit is not None and not _is_limit(memory_limit):
        raise SizeError(
            f"memory_limit must be a non-negative number, got {memory_limit!r}",
            field="memory_limit",
            value=memory_limit,
        )


def _is_limit(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _sparse_finding(schedule: Schedule) -> Finding:
    """Report one example of the many missing actions."""
    codes = schedule.codes
    mine = codes[(packed.types(codes) == packed.TYPE_NUMBER[FORWARD]) & (packed.stages(codes) == 0)]
    numbers = set(packed.microbatches(mine).tolist())
    gap = first_gap(numbers)
    action = Action(0, FORWARD, len(numbers) if gap is None else gap)
    wanted = schedule.stages * schedule.microbatches
    return Finding(
        "missing",
        schedule.placement.rank_of[0],
        None,
        action,
        f"{action} is missing, as are most others: {schedule.stages} stages x {schedule.microbatches} microbatches "
        f"need {wanted} forwards, but there are only {len(codes)} actions",
        "number the microbatches from 0 without gaps, and check the number of microbatches if it is given",
    )
