"""An exception in any action: one clear error on all ranks, soon, and nothing left behind."""

import threading

import pytest
import torch.distributed as dist

from penstock.runtime import Pipeline, run_in_threads
from runtime.faults import (
    SOON,
    Outcome,
    attempt,
    call,
    faults,
    fresh_modules,
    is_right,
    lowered,
    mse,
    problems,
    set_fault,
    threads,
)

SMALL = [("1F1B", 2), ("1F1B", 3), ("ZBVZeroBubble", 2), ("ZBVZeroBubble", 3)]


def fail_once(rank, schedule, action, together, make):
    """A good step, one in which an action of some rank fails, and the call after it."""
    modules = fresh_modules(schedule, rank)
    outcome = Outcome()
    pipe = make(modules, schedule)
    try:
        call(pipe)
        outcome.right = is_right(modules, schedule.stages)
        if action is not None:
            set_fault(pipe, modules, action, outcome)
        together()
        return attempt(pipe, modules, outcome, together)
    finally:
        pipe.close()


@pytest.mark.parametrize(("name", "ranks"), SMALL)
def test_an_exception_in_every_action_in_threads(name, ranks):
    schedule = lowered(name, ranks)
    found = []
    for rank, position in faults(name, ranks):
        action = schedule.actions[rank][position]
        together = threading.Barrier(ranks)

        def worker(transport, rank=rank, action=action, together=together):
            return fail_once(
                transport.rank,
                schedule,
                action if transport.rank == rank else None,
                together.wait,
                lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, transport=transport),
            )

        found += problems(run_in_threads(worker, ranks, timeout=60), action, rank)
    assert found == []


def every_action(rank, ranks, name, part, parts, *, group):
    """All of them, one after the other, in the same processes."""
    schedule = lowered(name, ranks)
    outcomes, counts = [], []
    for failing, position in faults(name, ranks)[part::parts]:
        action = schedule.actions[failing][position] if failing == rank else None
        outcomes.append(
            fail_once(
                rank,
                schedule,
                action,
                lambda: dist.barrier(group),
                lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, group=group, timeout=30),
            )
        )
        counts.append(threads())
    modules = fresh_modules(schedule, rank)
    with Pipeline(modules, schedule, loss_fn=mse, group=group, timeout=30) as pipe:
        call(pipe)
    return outcomes, is_right(modules, schedule.stages), counts


def check_every_action(workers, name, ranks, part=0, parts=1):
    schedule = lowered(name, ranks)
    results = workers.run(every_action, name, part, parts, ranks=ranks, limit=900)
    found = []
    slowest = 0.0
    for number, (rank, position) in enumerate(faults(name, ranks)[part::parts]):
        outcomes = [outcomes[number] for outcomes, _, _ in results]
        found += problems(outcomes, schedule.actions[rank][position], rank, soon=SOON)
        began = max(outcome.failed_at for outcome in outcomes)
        slowest = max([slowest, *[outcome.at - began for outcome in outcomes if outcome.error is not None]])
    assert found == []
    assert all(right for _, right, _ in results)
    for _, _, counts in results:
        assert all(ours == 0 for ours, _ in counts)
        assert counts[-1][1] <= counts[0][1] + 1  # those of gloo come and go
    return slowest


@pytest.mark.parametrize(
    ("name", "ranks"), [one if one[1] == 2 else pytest.param(*one, marks=pytest.mark.full) for one in SMALL]
)
def test_an_exception_in_every_action(workers, name, ranks):
    print(f"{name} on {ranks} ranks: known after {check_every_action(workers, name, ranks):.2f} s at most")  # noqa: T201


def test_an_exception_in_some_actions_of_three_ranks(workers):
    check_every_action(workers, "1F1B", 3, parts=8)
