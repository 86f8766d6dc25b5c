"""A parameter that several stages hold trains as one: gradients, three AdamW steps, accumulation, clipping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime import Pipeline, run_in_threads
from runtime.tied_models import (
    TIE,
    apart,
    batch,
    differences,
    loss_fn,
    model,
    parameters,
    stages_of,
    unsplit_step,
)

SCHEDULES = [
    ("1F1B", 2, {}),
    ("1F1B", 4, {}),
    ("Interleaved1F1B", 2, {"stages_per_rank": 2}),
    ("InterleavedZeroBubble", 2, {"stages_per_rank": 2}),
    ("ZBVZeroBubble", 2, {}),
    ("DualPipeV", 2, {}),
]


def build(name: str, ranks: int, options: dict[str, int] | None = None, microbatches: int = 4) -> ps.Schedule:
    return ps.build(name, ranks=ranks, microbatches=microbatches, **(options or {}))


def step(pipe: Pipeline, number: int) -> None:
    words, target = batch(number)
    pipe.step(*((words,) if pipe.has_first else ()), target=target if pipe.has_last else None)


def train(transport: Any, schedule: ps.Schedule, readers: int = 0, steps: int = 3) -> dict[str, float]:
    """Train in stages and unsplit; returns how far apart the parameters are, and their last gradients."""
    whole = model(schedule.stages, readers=readers)
    mine = stages_of(apart(whole), schedule, transport.rank)
    with Pipeline(mine, schedule, loss_fn=loss_fn, transport=transport, ties=[TIE]) as pipe:
        ours, theirs = (torch.optim.AdamW(parameters(one), lr=0.1) for one in (mine, whole))
        for number in range(steps):
            ours.zero_grad()
            theirs.zero_grad()
            step(pipe, number)
            unsplit_step(whole, number)
            ours.step()
            theirs.step()
        gradients = {f"grad {key}": gap for key, gap in differences(mine, whole, gradients=True).items()}
        return differences(mine, whole) | gradients


@pytest.mark.parametrize(("name", "ranks", "options"), SCHEDULES)
def test_three_steps_equal_those_of_the_unsplit_model(name: str, ranks: int, options: dict[str, int]) -> None:
    schedule = build(name, ranks, options)
    for found in run_in_threads(lambda transport: train(transport, schedule), ranks, timeout=60):
        assert len(found) >= 4
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("readers", [1, 2])
def test_three_or_four_holders(readers: int) -> None:
    schedule = build("1F1B", 4)
    for found in run_in_threads(lambda transport: train(transport, schedule, readers), 4, timeout=60):
        assert max(found.values()) < 1e-12, found


def run(schedule: ps.Schedule, work: Callable[[Pipeline, dict[int, nn.Module]], Any], **options: Any) -> list[Any]:
    """Call a function on each rank, in threads, with a pipeline whose stages have their own copies."""
    modules = options.pop("modules", None) or apart(model(schedule.stages))
    options.setdefault("ties", [TIE])

    def worker(transport: Any) -> Any:
        mine = stages_of(modules, schedule, transport.rank)
        with Pipeline(mine, schedule, loss_fn=loss_fn, transport=transport, **options) as pipe:
            return work(pipe, mine)

    return run_in_threads(worker, schedule.ranks, timeout=60)


def test_gradients_accumulate_over_steps() -> None:
    """After the second step every holder has the sum of both steps, not twice that of the first."""
    schedule, whole = build("1F1B", 2), model(2)
    expected = copy.deepcopy(nn.ModuleList(whole))
    for number in range(3):
        unsplit_step(list(expected), number)

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> dict[str, float]:
        for number in range(3):
            step(pipe, number)
        return differences(mine, list(expected), gradients=True)

    for found in run(schedule, work, modules=apart(whole)):
        assert max(found.values()) < 1e-12


def test_holders_are_equal_bit_by_bit() -> None:
    """In single precision, where another order of the sum would round otherwise."""
    schedule = build("1F1B", 4)
    modules = apart(model(4, readers=2, dtype=torch.float32))

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> torch.Tensor:
        step(pipe, 0)
        (module,) = mine.values()
        return (module.wte if pipe.has_first else module.head).weight.grad

    first, *others = run(schedule, work, modules=modules)
    assert first.abs().max() > 0
    assert all(torch.equal(first, other) for other in others)
