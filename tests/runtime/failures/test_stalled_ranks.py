"""Ranks that stall, come late or leave early are named by those that wait for them."""

import re
import time

import pytest

import penstock as ps
from penstock.errors import StepError
from penstock.runtime import Pipeline
from runtime.faults import (
    MICROBATCHES,
    SOON,
    Faulty,
    call,
    error_of,
    mse,
)


class Slow(Faulty):
    """Sleeps once, where it would fail."""

    def spring(self, kind, number):
        if self.fault == (kind, number):
            self.fault = None
            time.sleep(4.5)


def stalls(rank, ranks, *, group):
    schedule = ps.build("1F1B", ranks=ranks, microbatches=MICROBATCHES)
    module = Slow(rank)
    with Pipeline({rank: module}, schedule, loss_fn=mse, group=group, timeout=2.0) as pipe:
        call(pipe)
        if rank == 0:
            module.fault = ("F", 1)
        with pytest.raises(StepError) as caught:
            call(pipe)
    return caught.value.rank, str(caught.value), module.weight.grad is None


def test_a_stalled_rank(workers):
    results = workers.run(stalls, ranks=3)
    assert len({(rank, message) for rank, message, _ in results}) == 1
    message = results[0][1]
    # Rank 2, which waits for rank 1, may be the first to tell.
    assert re.search(r"rank 1(, which)? waits in 1RECV_F1 for rank 0, which has been in 0F1 for \d s", message), message
    assert all(dropped for _, _, dropped in results)


def one_is_late(rank, ranks, *, group):
    """Between two steps one rank is busy with something else."""
    schedule = ps.build("1F1B", ranks=ranks, microbatches=MICROBATCHES)
    with Pipeline({rank: Faulty(rank)}, schedule, loss_fn=mse, group=group, timeout=1.0) as pipe:
        call(pipe)
        if rank == 0:
            time.sleep(3.0)
        with pytest.raises(StepError) as caught:
            call(pipe)
    return str(caught.value)


def test_a_rank_that_is_late_for_a_step(workers):
    first, *others = workers.run(one_is_late, ranks=2)
    assert first.startswith("the pipeline has failed and must be rebuilt; the cause: rank 1 waits in")
    assert all("waits in 1RECV_F0 for rank 0, which is between steps" in message for message in others)


def one_leaves_early(rank, ranks, calls, *, group):
    """One rank closes its pipeline after two steps; the other goes on with the given calls."""
    schedule = ps.build("1F1B", ranks=ranks, microbatches=MICROBATCHES)
    errors = []
    for going_on in calls:
        with Pipeline({rank: Faulty(rank)}, schedule, loss_fn=mse, group=group, timeout=60.0) as pipe:
            call(pipe)
            call(pipe)
            if rank == 0:
                errors.append(error_of(lambda pipe=pipe, going_on=going_on: going_on(pipe)))
    return errors


def clip(pipe):
    pipe.clip_grad_norm_(1.0)


def test_a_rank_that_has_closed_its_pipeline_is_named(workers):
    errors, _ = workers.run(one_leaves_early, [call, clip], ranks=2)
    for error, place in zip(errors, [r"0\w+", r"clip_grad_norm_\(\)"], strict=True):
        assert isinstance(error, StepError)
        left = "which closed its pipeline after 2 steps; all ranks must run the same number of steps"
        assert re.search(f"rank 0 waits in {place} for rank 1, {left}", str(error)), str(error)
        assert error.seconds < SOON
