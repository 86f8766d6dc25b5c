"""Stages that fail on request, and what every rank makes of it.

A fault is a kind and a microbatch: the stage fails in its forward, in the gradient of its input, or in that of its
weight, for that microbatch. Transfers, and what has no code of the user's in it, fail through a custom function.
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import StepError
from penstock.runtime import Microbatches, Pipeline

WIDTH = 3
MICROBATCHES = 3
mse = functional.mse_loss
#: Within so many seconds every rank that is in the step knows.
SOON = 5.0
#: The seconds after which a rank that is silent counts as gone, where ranks are killed.
PATIENCE = 3.0


class InjectedError(Exception):
    """What the stages raise."""


class Trap(torch.autograd.Function):
    """Passes a tensor on; its gradient springs if it is set."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, stage: Faulty, kind: str, number: int) -> torch.Tensor:
        context.facts = stage, kind, number
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        stage, kind, number = context.facts
        stage.spring(kind, number)
        return gradient, None, None, None


class Faulty(nn.Module):
    """A layer that fails on request."""

    def __init__(self, index: int) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(index)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=chance) / 2)
        self.fault: tuple[str, int] | None = None
        self.failed_at = 0.0

    def forward(self, x: torch.Tensor, number: int = -1) -> torch.Tensor:
        self.spring("F", number)
        x, weight = Trap.apply(x, self, "I", number), Trap.apply(self.weight, self, "W", number)
        return torch.tanh(x @ weight)

    def spring(self, kind: str, number: int) -> None:
        if self.fault == (kind, number):
            self.failed_at = time.time()
            raise InjectedError(f"{kind} of microbatch {number}")


class Wide(nn.Module):
    """Gives more bytes than a header has, so that one taken for the other would end a process."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 600) if index == 0 else nn.Linear(600, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@dataclass
class Outcome:
    """What a rank made of a step that failed somewhere.

    Attributes:
        error: what it raised; None if it had completed its part before.
        printed: what the user sees of it.
        at: when, on the clock of the machine.
        failed_at: when the fault was, on the rank that had it.
        left: how many parameters have a gradient after it.
        again: what the next call raised.
        seconds: how long that took.
        right: whether the gradients of the step before were right.
    """

    error: StepError | None = None
    printed: str = ""
    at: float = 0.0
    failed_at: float = 0.0
    left: int = 0
    again: Exception | None = None
    seconds: float = 0.0
    right: bool = True


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(5)
    return torch.randn(6, WIDTH, generator=chance), torch.randn(6, WIDTH, generator=chance)


def call(pipe: Pipeline, **more: Any) -> Any:
    """A step with the number of the microbatch for every stage."""
    x, y = batch()
    args = [x] if pipe.has_first else []
    number = Microbatches(list(range(MICROBATCHES)))
    return pipe.step(*args, target=y if pipe.has_last else None, number=number, **more)


def expected(count: int) -> list[torch.Tensor]:
    """The gradients of the unsplit model, by stage."""
    stages = [Faulty(index) for index in range(count)]
    x, y = batch()
    for stage in stages:
        x = stage(x)
    mse(x, y).backward()
    return [stage.weight.grad for stage in stages]


def is_right(modules: dict[int, Faulty], count: int) -> bool:
    wanted = expected(count)
    return all(torch.allclose(module.weight.grad, wanted[index], atol=1e-6) for index, module in modules.items())


def faults(name: str, ranks: int) -> list[tuple[int, int]]:
    """Every action of every rank, as (rank, position in its lowered row)."""
    low = lowered(name, ranks)
    return [(rank, position) for rank, row in enumerate(low.actions) for position in range(len(row))]


def lowered(name: str, ranks: int) -> ps.Schedule:
    return ps.lower(ps.build(name, ranks=ranks, microbatches=MICROBATCHES))


def set_fault(pipe: Pipeline, modules: dict[int, Faulty], action: Any, outcome: Outcome) -> None:
    """Make one action of this rank fail, in the user's code where there is some in it."""
    kinds = {"F": "F", "B": "I", "I": "I", "W": "W"}
    text = str(action.computation_type.value)
    stage = modules.get(action.stage_index)
    first = action.stage_index == 0 and text in ("B", "I")  # its input has no gradient: only the weight has
    if text in kinds and stage is not None and not (first and text == "I"):
        stage.fault = ("W" if first else kinds[text], action.microbatch_index)
        return

    def function(this: Any, context: Any) -> None:
        if this == action:
            outcome.failed_at = time.time()
            raise InjectedError(f"in {this}")
        context.run(this)

    pipe.register_custom_function(action.computation_type, function)


def attempt(pipe: Pipeline, modules: dict[int, Faulty], outcome: Outcome, together: Any) -> Outcome:
    """The step that fails, and the call after it."""
    try:
        call(pipe)
    except Exception as error:
        outcome.at = time.time()
        outcome.error, outcome.printed = error, "".join(traceback.format_exception(error))  # type: ignore[assignment]
        error.__traceback__ = error.__cause__ = error.__context__ = None
    outcome.failed_at = max([outcome.failed_at, *[module.failed_at for module in modules.values()]])
    together()  # whoever had completed its part is between two steps now
    began = time.monotonic()
    try:
        call(pipe)
    except Exception as error:
        outcome.again = error
        error.__traceback__ = error.__cause__ = error.__context__ = None
    outcome.seconds = time.monotonic() - began
    outcome.left = sum(module.weight.grad is not None for module in modules.values())
    return outcome


def problems(outcomes: list[Outcome], action: Any, rank: int, *, soon: float = 5.0) -> list[str]:
    """Everything that is not as it should be after an action failed on a rank."""
    found = []
    failed_at = max(outcome.failed_at for outcome in outcomes)
    for here, outcome in enumerate(outcomes):
        where = f"{action} of rank {rank}, seen by rank {here}"
        if outcome.error is None and here == rank:
            found.append(f"{where}: no error")
        if outcome.error is not None:
            found += [f"{where}: {fault}" for fault in _faults_of(outcome, action, rank, here)]
            if outcome.at - failed_at > soon:
                found.append(f"{where}: known after {outcome.at - failed_at:.1f} s")
        if not isinstance(outcome.again, StepError) or "must be rebuilt" not in str(outcome.again):
            found.append(f"{where}: the next call raises {outcome.again!r}")
        elif str(action) not in str(outcome.again) or outcome.seconds > soon:
            found.append(f"{where}: the next call takes {outcome.seconds:.1f} s and says {outcome.again}")
        if outcome.left:
            found.append(f"{where}: {outcome.left} gradients are left")
        if not outcome.right:
            found.append(f"{where}: wrong gradients in the step before")
    return found


def _faults_of(outcome: Outcome, action: Any, rank: int, here: int) -> list[str]:
    error = outcome.error
    if not isinstance(error, StepError):
        return [f"raises {error!r}"]
    leaf = action.parts[0]
    facts = (error.rank, error.action, error.stage, error.microbatch)
    wanted = (rank, str(action), leaf.stage_index, leaf.microbatch_index)
    found = [] if facts == wanted else [f"{facts} instead of {wanted}"]
    microbatch = "" if leaf.microbatch_index is None else f", microbatch {leaf.microbatch_index}"
    texts = [f"rank {rank} failed in {action} (stage {leaf.stage_index}{microbatch}", "InjectedError: "]
    if action.is_compute and not str(action).startswith("0I") and leaf.computation_type != "W":
        texts.append("; inputs float32[2, 3])" if leaf.computation_type == "F" else "; gradients float32[")
    found += [f"{text!r} is not in {error}" for text in texts if text not in str(error)]
    if "Traceback" not in (error.remote_traceback or "") or "raise InjectedError" not in (error.remote_traceback or ""):
        found.append(f"remote_traceback is {error.remote_traceback}")
    if outcome.printed.count("raise InjectedError") != 1:
        found.append(
            f"prints the place of the error {outcome.printed.count('raise InjectedError')} times:\n{outcome.printed}"
        )
    return found


def threads() -> tuple[int, int]:
    """Threads of Python that are ours, and all threads of this process.

    One in which gloo still tries to reach a rank that was killed cannot be ended; it ends when gloo gives up.
    """
    gc.collect()
    names = [one.name for one in threading.enumerate() if not one.name.startswith("penstock connects")]
    ours = [name for name in names if "penstock" in name or name.startswith("rank ")]
    return len(ours), len(list(Path("/proc/self/task").iterdir()))


def fresh_modules(schedule: ps.Schedule, rank: int) -> dict[int, Faulty]:
    return {index: Faulty(index) for index in schedule.placement.stages_of(rank)}


def error_of(function: Callable[[], Any]) -> Any:
    """What it raises, without what would not go to another process."""
    began = time.monotonic()
    try:
        function()
    except BaseException as error:
        error.printed = "".join(traceback.format_exception(error))
        error.seconds = time.monotonic() - began
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error
    return None
