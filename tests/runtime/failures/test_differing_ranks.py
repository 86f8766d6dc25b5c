"""Ranks that do not do the same: different arguments, or one that evaluates while others train."""

import re
import time
from functools import partial

import pytest
import torch.distributed as dist

import penstock as ps
from penstock.errors import PenstockError, StepError
from penstock.runtime import Pipeline, run_in_threads
from penstock.runtime.transport.watchdog import Watchdog
from runtime.faults import (
    MICROBATCHES,
    SOON,
    Faulty,
    Wide,
    batch,
    error_of,
    mse,
    threads,
)
from runtime.workers import Workers

#: What rank 1 does, and what all ranks then say.
DIFFERENT = {
    "schedule": r"rank \d was given a different schedule from rank \d: '\w+, 3 ranks, 3 stages, 3 microbatches, \d+",
    "microbatches": r"a different schedule from rank \d: '\w+, 3 ranks, 3 stages, \d microbatches",
    "stages": r"rank 1 must be given stages \[1\], not \[1, 2\]",
    "shapes": r"rank \d was given a different kind of shapes from rank \d: '\w+' there, '\w+' here",
    "share_losses": r"rank \d was given a different share_losses from rank \d: '\w+' there",
    "interrupted": r"^rank 1 failed: KeyboardInterrupt$",
    "missing": r"not every rank has created its Pipeline: rank \d waited \d s for a message from rank 1;",
    "late": r"not every rank has created its Pipeline: rank \d waited \d s for a message from rank 1;",
}


class Interrupted(dict):
    def items(self):
        raise KeyboardInterrupt


def differently(rank, ranks, *, group):
    found = []
    for what in DIFFERENT:
        schedule = ps.build("1F1B", ranks=ranks, microbatches=MICROBATCHES)
        options = {"loss_fn": mse, "group": group, "timeout": 1.0 if what in ("missing", "late") else 20.0}
        stages = {rank: Faulty(rank)}
        if rank == 1:
            if what == "missing":
                found.append(None)
                dist.barrier(group)
                continue
            if what == "late":
                time.sleep(4)
            schedule = {
                "schedule": ps.build("GPipe", ranks=ranks, microbatches=MICROBATCHES),
                "microbatches": ps.build("1F1B", ranks=ranks, microbatches=4),
            }.get(what, schedule)
            stages = {"stages": {1: Faulty(1), 2: Faulty(2)}, "interrupted": Interrupted(stages)}.get(what, stages)
            options |= {"shapes": {"shapes": "per_microbatch"}, "share_losses": {"share_losses": True}}.get(what, {})
        found.append(error_of(partial(Pipeline, stages, schedule, **options)))
        dist.barrier(group)
    return found, threads()[0]


@pytest.mark.processes
def test_constructors_that_do_not_fit():
    with Workers(3) as pool:
        results = pool.run(differently, fresh=True)
    for what, errors in zip(DIFFERENT, zip(*[found for found, _ in results], strict=True), strict=True):
        for here, error in enumerate(errors):
            if here == 1 and what in ("missing", "interrupted"):
                assert error is None or isinstance(error, KeyboardInterrupt)
                continue
            assert isinstance(error, PenstockError), (what, error)
            assert re.search(DIFFERENT[what], str(error)), (what, str(error))
            assert error.seconds < SOON
    assert [ours for _, ours in results] == [0, 0, 0]


class Late(dict):
    """Stages that take a while to list: other ranks wait for this one, and their watchdogs watch them wait."""

    def items(self):
        time.sleep(0.6)
        return super().items()


def fails_while_it_is_watched(rank, ranks, *, group):
    """The pipeline cannot be created while its watchdog asks the store, which takes long on a busy machine."""
    check = Watchdog._check

    def check_slowly(watchdog, transport):
        time.sleep(1.0)
        return check(watchdog, transport)

    Watchdog._check = check_slowly
    try:
        schedule = ps.build("GPipe" if rank else "1F1B", ranks=ranks, microbatches=MICROBATCHES)
        stages = Late({rank: Faulty(rank)}) if rank else {rank: Faulty(rank)}
        error = error_of(partial(Pipeline, stages, schedule, loss_fn=mse, group=group, timeout=20.0))
        return str(error), threads()[0]
    finally:
        Watchdog._check = check


def test_a_pipeline_that_cannot_be_created_leaves_no_thread(workers):
    for message, ours in workers.run(fails_while_it_is_watched, ranks=2):
        assert "a different schedule" in message
        assert ours == 0


def one_evaluates(rank, make, shapes):
    """One rank trains, the other one evaluates."""
    pipe = make({rank: Wide(rank)}, ps.build("1F1B", ranks=2, microbatches=MICROBATCHES), shapes)
    x, y = batch()
    pipe.step(*([] if rank else [x]), target=y if rank else None)
    try:
        return error_of((lambda: pipe.eval(target=y)) if rank else (lambda: pipe.step(x)))
    finally:
        pipe.close()


def one_evaluates_in_processes(rank, ranks, *, group):
    return [
        one_evaluates(
            rank,
            lambda modules, schedule, shapes: Pipeline(
                modules, schedule, loss_fn=mse, group=group, shapes=shapes, timeout=1.0
            ),
            shapes,
        )
        for shapes in ("inferred", "per_microbatch")
    ]


def test_one_rank_evaluates_while_the_other_trains(workers):
    for errors in workers.run(one_evaluates_in_processes, ranks=2):
        for error in errors:
            assert isinstance(error, StepError)
            assert re.search(r"rank \d waits in .* for rank \d.*no progress for", str(error)), str(error)
            assert error.seconds < SOON


def test_one_rank_evaluates_while_the_other_trains_in_threads():
    for shapes in ("inferred", "per_microbatch"):

        def worker(transport, shapes=shapes):
            return one_evaluates(
                transport.rank,
                lambda modules, schedule, shapes: Pipeline(
                    modules, schedule, loss_fn=mse, transport=transport, shapes=shapes
                ),
                shapes,
            )

        assert all("waits in" in str(error) for error in run_in_threads(worker, 2, timeout=60))
