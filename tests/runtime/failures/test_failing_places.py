"""Errors in every place outside the modules: losses, batches, builders, custom functions."""

import contextlib

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import penstock as ps
from penstock.errors import PenstockError, StepError
from penstock.ir.actions import ComputationType
from penstock.runtime import Microbatches, Pipeline, Stage, run_in_threads
from runtime.faults import (
    MICROBATCHES,
    SOON,
    Faulty,
    InjectedError,
    batch,
    error_of,
    mse,
)


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError("no words")


class Raising(Faulty):
    """Raises what it is given, in a real forward or already in the dry run."""

    def __init__(self, index, error=None, dry=False):
        super().__init__(index)
        self.error, self.dry = error, dry
        self.calls = 0

    def forward(self, x, number=-1):
        self.calls += 1
        if self.error is not None and (self.dry or self.calls == 3):
            raise self.error
        return super().forward(x, number)


def wrong_loss(output, target):
    raise InjectedError("in the loss")


def wrong_builder():
    raise InjectedError("in dw_builder")


def wrong_weights():
    def weights():
        raise InjectedError("in the weights")

    return weights


def wrong_function(action, context):
    if str(action).endswith("1"):
        raise InjectedError(f"in a function for {action}")
    context.run(action)


class Wrapped(TwoTensor):
    """A kind of tensor that cannot be sent between stages."""


#: For each: on which rank of two it happens, and what all ranks say.
PLACES = {
    "dry run": (0, "stage 0 failed in the dry run that finds shapes, with inputs float32[2, 3]: KeyError: 'dry'"),
    "dry run of the last but one": (1, "stage 1 failed in the dry run that finds shapes, with inputs float32[2, 3]"),
    "batch": (0, "cannot be split into 3 microbatches"),
    "no batch": (0, "rank 0 has the first stage; call step with its arguments"),
    "target": (1, "target"),
    "loss_fn": (1, "rank 1 failed in 3F0 (stage 3, microbatch 0; inputs float32[2, 3]): InjectedError: in the loss"),
    "dw_builder": (
        0,
        "rank 0 failed in 2I0 (stage 2, microbatch 0; gradients float32[2, 3]): InjectedError: in dw_builder",
    ),
    "weights": (0, "rank 0 failed in 2W0 (stage 2, microbatch 0): InjectedError: in the weights"),
    "function": (1, "InjectedError: in a function for 1SEND_F1"),
    "interrupt": (0, "rank 0 failed in 0F1 (stage 0, microbatch 1; inputs float32[2, 3]): KeyboardInterrupt"),
    "exit": (0, "rank 0 failed in 0F1 (stage 0, microbatch 1; inputs float32[2, 3]): SystemExit: 3"),
    "unspeakable": (0, "UnspeakableError: its message cannot be shown (ValueError)"),
    "long": (0, "inputs float32[2, 3]): ValueError: xxx"),
    "memory": (0, "OutOfMemoryError: no room"),
}


def fail_at(rank, place, make):
    """One mistake, on one rank."""
    schedule = ps.build("InterleavedZeroBubble", ranks=2, microbatches=MICROBATCHES)
    here = rank == PLACES[place][0]
    raised = {
        "interrupt": KeyboardInterrupt(),
        "exit": SystemExit(3),
        "unspeakable": UnspeakableError(),
        "long": ValueError("x" * 100_000),
        "memory": torch.OutOfMemoryError("no room"),
        "dry run": KeyError("dry"),
        "dry run of the last but one": KeyError("dry"),
    }
    stages = []
    for index in schedule.placement.stages_of(rank):
        error = raised.get(place) if here and index < 2 else None
        builder = {"dw_builder": wrong_builder, "weights": wrong_weights}.get(place) if here and index > 1 else None
        stages.append(Stage(index, Raising(index, error, place.startswith("dry")), dw_builder=builder))
    pipe = make(stages, schedule, wrong_loss if place == "loss_fn" else mse)
    if place == "function" and here:
        pipe.register_custom_function(ComputationType.SEND_F, wrong_function)
    x, y = batch()
    args = [] if rank or place == "no batch" else [x[:2] if place == "batch" else x]
    target = y[:2] if place == "target" else y
    try:
        return error_of(lambda: pipe.step(*args, target=target if rank else None))
    finally:
        assert all(stage.module.weight.grad is None for stage in stages)
        pipe.close()


def fail_in_every_place(rank, ranks, *, group):
    return [
        fail_at(
            rank,
            place,
            lambda stages, schedule, loss_fn: Pipeline(stages, schedule, loss_fn=loss_fn, group=group, timeout=20),
        )
        for place in PLACES
    ]


def check_place(place, errors):
    rank, text = PLACES[place]
    for here, error in enumerate(errors):
        if place in ("interrupt", "exit") and here == rank:
            assert isinstance(error, KeyboardInterrupt if place == "interrupt" else SystemExit)
            continue
        assert isinstance(error, PenstockError), (place, error)
        assert text in str(error), (place, str(error))
        assert here == rank or (isinstance(error, StepError) and error.rank == rank)
        assert error.seconds < SOON
        # One error, and the place of it; nothing of the backend.
        assert "gloo" not in error.printed
        assert here == rank or error.printed.count("direct cause") <= error.remote_traceback.count("direct cause")


def test_errors_in_every_place(workers):
    for place, errors in zip(PLACES, zip(*workers.run(fail_in_every_place, ranks=2), strict=True), strict=True):
        check_place(place, errors)


@pytest.mark.parametrize("place", PLACES)
def test_errors_in_every_place_in_threads(place):
    def worker(transport):
        return fail_at(
            transport.rank,
            place,
            lambda stages, schedule, loss_fn: Pipeline(stages, schedule, loss_fn=loss_fn, transport=transport),
        )

    check_place(place, run_in_threads(worker, 2, timeout=60))


def test_any_kind_of_tensor_is_described():
    class Stop(nn.Module):
        def forward(self, x):
            raise InjectedError("here")

    pipe = Pipeline({0: Stop()}, ps.build("GPipe", ranks=1, microbatches=1), loss_fn=mse)
    with pytest.raises(StepError, match=r"0F0 \(stage 0, microbatch 0; inputs float32\[2, 3\]\): InjectedError: here"):
        pipe.step(Microbatches([Wrapped(torch.ones(2, 3), torch.ones(2, 3))]), target=Microbatches([None]))


def test_inputs_of_an_action_whose_error_was_caught_are_not_shown_for_another():
    def catch(action, context):
        if action.microbatch_index == 1:
            raise ValueError("later")
        with contextlib.suppress(InjectedError):
            context.run(action)

    module = Raising(0, InjectedError("caught"), dry=True)
    pipe = Pipeline({0: module}, ps.build("GPipe", ranks=1, microbatches=2), loss_fn=mse)
    pipe.register_custom_function(ComputationType.FORWARD, catch)
    with pytest.raises(StepError, match=r"0F1 \(stage 0, microbatch 1\): ValueError: later"):
        pipe.eval(torch.ones(2, 3))
