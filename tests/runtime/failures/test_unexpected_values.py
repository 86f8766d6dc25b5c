"""Values that are not what was agreed."""

import torch

import penstock as ps
from penstock.errors import StepError
from penstock.runtime import Pipeline, run_in_threads
from runtime.faults import (
    MICROBATCHES,
    SOON,
    Faulty,
    call,
    error_of,
    mse,
)


class Odd(Faulty):
    """For microbatch 1 it gives something else, once it is switched on."""

    change = None

    def forward(self, x, number=-1):
        out = super().forward(x, number)
        return CHANGES[self.change](out) if self.change and number == 1 else out


CHANGES = {
    "larger": lambda out: torch.cat([out, out] * 300),
    "smaller": lambda out: out[:1],
    "turned": lambda out: out.T,
    "double": lambda out: out.double(),
    "tuple": lambda out: (out, out),
    "dict": lambda out: {"x": out},
    "number": lambda out: 3,
    "set": lambda out: {out},
    "sparse": lambda out: out.detach().to_sparse(),
    "constant": lambda out: out.detach(),
}
SAID = {
    "larger": "output is float32[1200, 3], but float32[2, 3] was agreed",
    "smaller": "output is float32[1, 3], but float32[2, 3] was agreed",
    "turned": "output is float32[3, 2], but float32[2, 3] was agreed",
    "double": "output is float64[2, 3], but float32[2, 3] was agreed",
    "tuple": "output is a tuple of 2, but a tensor was agreed",
    "dict": "output is a dict with the keys 'x', but a tensor was agreed",
    "number": "output is 3, but a tensor was agreed",
    "set": "set, which cannot be sent between stages",
    "sparse": "sparse",
    "constant": "output has requires_grad=False, but True was agreed",
}


def odd_values(rank, make, changes):
    """For each change: a good step, then one in which stage 1 gives something else in its middle microbatch."""
    schedule = ps.build("1F1B", ranks=3, microbatches=MICROBATCHES)
    found = []
    for change in changes:
        module = Odd(rank)
        pipe = make({rank: module}, schedule)
        call(pipe)
        module.change = change if rank == 1 else None
        found.append(error_of(lambda pipe=pipe: call(pipe)))
        assert module.weight.grad is None
        pipe.close()
    return found


def odd_values_in_processes(rank, ranks, *, group):
    return odd_values(
        rank, lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, group=group, timeout=20), CHANGES
    )


def check_odd_values(results):
    for errors, change in zip(zip(*results, strict=True), CHANGES, strict=True):
        for error in errors:
            assert isinstance(error, StepError), error
            assert (error.rank, error.stage, error.microbatch, error.action) == (1, 1, 1, "1F1")
            assert "MetadataError: " in str(error) or change in ("set", "sparse")
            assert SAID[change] in str(error)
            if change not in ("set", "sparse"):
                assert "the output of stage 1 is not what stage 2 expects" in str(error)
            assert error.seconds < SOON


def test_a_wrong_value_in_the_middle_microbatch(workers):
    check_odd_values(workers.run(odd_values_in_processes, ranks=3))


def test_a_wrong_value_in_the_middle_microbatch_in_threads():
    for change in CHANGES:

        def worker(transport, change=change):
            return odd_values(
                transport.rank,
                lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, transport=transport),
                [change],
            )[0]

        errors = run_in_threads(worker, 3, timeout=60)
        # A rank that comes late to the step learns that it was over before.
        outcome = {
            str(error).removeprefix("the pipeline has failed and must be rebuilt; the cause: ") for error in errors
        }
        assert len(outcome) == 1
        assert SAID[change] in outcome.pop()


class Nan(Faulty):
    def forward(self, x, number=-1):
        out = super().forward(x, number)
        return out * float("nan") if number == 1 else out


def with_nan(rank, make):
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=MICROBATCHES)
    modules = {index: (Nan if index == 1 else Faulty)(index) for index in schedule.placement.stages_of(rank)}
    losses = []
    with make(modules, schedule) as pipe:
        for _ in range(2):
            out = call(pipe, losses=losses)
        finite = [bool(torch.isfinite(module.weight.grad).all()) for module in modules.values()]
    return [bool(loss.isnan()) for loss in losses], out, finite


def with_nan_in_processes(rank, ranks, *, group):
    return with_nan(rank, lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, group=group, timeout=20))


def test_nan_goes_through(workers):
    """Nothing fails, as in the unsplit model: the loss of that microbatch tells, and so does every gradient."""
    results = workers.run(with_nan_in_processes, ranks=2)
    results.append(
        run_in_threads(
            lambda transport: with_nan(
                transport.rank,
                lambda modules, schedule: Pipeline(modules, schedule, loss_fn=mse, transport=transport),
            ),
            2,
            timeout=60,
        )[0]
    )
    for losses, out, _ in (results[0], results[2]):
        assert losses == [False, True, False] * 2
        assert out.isnan().all(1).tolist() == [False, False, True, True, False, False]
    assert [finite for _, _, finite in results] == [[False, False]] * 3
