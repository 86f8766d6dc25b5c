"""A parameter that several stages hold trains as one: gradients, three AdamW steps, accumulation, clipping."""

from __future__ import annotations

import copy
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
    build,
    differences,
    loss_fn,
    model,
    parameters,
    run,
    stages_of,
    step,
    train,
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


@pytest.mark.parametrize("lanes", ["rank", "pair", "direction", "message"])
@pytest.mark.parametrize("buffering", ["rendezvous", "eager"])
def test_the_exchange_passes_every_kind_of_lane(lanes: str, buffering: str) -> None:
    schedule = build("GPipe", 4)
    comm = ps.CommModel(buffering, lanes=lanes)
    for found in run_in_threads(lambda transport: train(transport, schedule, 2, 1), 4, model=comm, timeout=60):
        assert max(found.values()) < 1e-12, found


def test_a_recording_leaves_the_exchange_out() -> None:
    schedule = build("1F1B", 2)

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> list[str]:
        with pipe.recording() as record:
            step(pipe, 0)
        assert next(one for one in parameters(mine)).grad is not None
        return [str(timed.action) for timed in record.steps[0]]

    tied, untied = run(schedule, work), run(schedule, work, ties=[])
    assert tied == untied
    assert all(tied)


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


def test_both_ends_on_one_rank_become_one_tensor_and_nothing_is_sent() -> None:
    schedule = build("ZBVZeroBubble", 2)
    modules = apart(model(4))
    assert modules[0].wte.weight is not modules[3].head.weight

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> None:
        if pipe.has_first:
            assert mine[0].wte.weight is mine[3].head.weight
        step(pipe, 0)  # which negotiates shapes
        pipe.transport.send_bytes = pipe.transport.exchange = None  # type: ignore[method-assign]  # must not be called
        step(pipe, 1)

    run(schedule, work, modules=modules)


def test_one_object_on_two_ranks_that_are_threads() -> None:
    """Both add to one gradient: nothing is summed twice, also where a third holder has its own copy."""
    schedule = build("1F1B", 4)
    whole = model(4, readers=1)
    expected = copy.deepcopy(nn.ModuleList(whole))
    for number in range(2):
        unsplit_step(list(expected), number)
    norm = float(nn.utils.clip_grad_norm_(parameters(list(expected)), 0.01))
    modules = list(whole)  # stages 0 and 3 share a tensor, stage 1 has a copy
    modules[1] = copy.deepcopy(modules[1])

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> tuple[dict[str, float], float]:
        for number in range(2):
            step(pipe, number)
        found = float(pipe.clip_grad_norm_(0.01))
        pipe.transport.exchange(b"")  # until all have clipped
        return differences(mine, list(expected), gradients=True), found

    for found, ours in run(schedule, work, modules=modules):
        assert max(found.values()) < 1e-12
        assert ours == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize(("name", "ranks", "options"), SCHEDULES)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_tie_counts_once_in_the_norm(name: str, ranks: int, options: dict[str, int], norm_type: float) -> None:
    schedule = build(name, ranks, options)
    whole = model(schedule.stages)
    expected = copy.deepcopy(nn.ModuleList(whole))
    unsplit_step(list(expected), 0)
    norm = float(nn.utils.clip_grad_norm_(parameters(list(expected)), 0.01, norm_type))

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> tuple[float, dict[str, float]]:
        step(pipe, 0)
        return float(pipe.clip_grad_norm_(0.01, norm_type)), differences(mine, list(expected), gradients=True)

    for ours, found in run(schedule, work, modules=apart(whole)):
        assert ours == pytest.approx(norm, rel=1e-12)
        assert max(found.values()) < 1e-12


# Gradients that are missing, sparse or too large ----------------------------------------------------------------------


def test_a_gradient_that_only_one_holder_has() -> None:
    """The others get it all the same."""
    schedule = build("1F1B", 2)
    modules = apart(model(2))
    modules[0].register_parameter("head_weight", nn.Parameter(modules[1].head.weight.detach().clone()))
    whole = model(2)
    words, target = batch()
    outputs = whole[1].head.weight.detach().clone()  # the head alone has a gradient
    loss = loss_fn(nn.functional.linear(whole[1].norm(whole[0](words)), outputs.requires_grad_()), target)
    (wanted,) = torch.autograd.grad(loss, [outputs])

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> torch.Tensor | None:
        step(pipe, 0)
        return mine[0].head_weight.grad if pipe.has_first else mine[1].head.weight.grad

    for found in run(schedule, work, modules=modules, ties=[("head_weight", "head.weight")]):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_no_holder_has_a_gradient() -> None:
    modules = apart(model(2))
    for module in modules:
        module.register_parameter("spare", nn.Parameter(torch.ones(3, dtype=torch.float64)))

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> torch.Tensor | None:
        step(pipe, 0)
        return next(iter(mine.values())).spare.grad

    assert run(build("1F1B", 2), work, modules=modules, ties=["spare"]) == [None, None]


def test_a_sparse_gradient_and_a_dense_one() -> None:
    """Their sum is dense, as in the unsplit model, and accumulates."""
    whole = model(2, sparse=True)
    expected = copy.deepcopy(nn.ModuleList(whole))
    for number in range(2):
        unsplit_step(list(expected), number)

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> dict[str, float]:
        for number in range(2):
            step(pipe, number)
        return differences(mine, list(expected), gradients=True)

    for found in run(build("1F1B", 2), work, modules=apart(whole)):
        assert max(found.values()) < 1e-12


class Words(nn.Module):
    """A second embedding of the same words, for whatever comes along as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 6, sparse=True, dtype=torch.float64)

    def forward(self, words: torch.Tensor, so_far: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        here = self.wte(words)
        return words, here if so_far is None else so_far * here


def test_sparse_gradients_alone_stay_sparse() -> None:
    whole = [Words(), Words(), Words()]
    for module in whole[1:]:
        module.wte.weight = whole[0].wte.weight
    words, target = batch()[0], torch.randn(8, 3, 6, dtype=torch.float64)
    squared = lambda output, target: ((output[1] - target) ** 2).mean()  # noqa: E731
    modules = apart(whole)
    for _ in range(2):
        squared(whole[2](*whole[1](*whole[0](words))), target).backward()
    schedule = build("1F1B", 3)

    def worker(transport: Any) -> torch.Tensor:
        mine = stages_of(modules, schedule, transport.rank)
        with Pipeline(mine, schedule, loss_fn=squared, transport=transport, ties=["wte.weight"]) as pipe:
            for _ in range(2):
                pipe.step(*((words,) if pipe.has_first else ()), target=target if pipe.has_last else None)
            return mine[transport.rank].wte.weight.grad

    found = run_in_threads(worker, 3, timeout=60)
    for gradient in found:
        assert gradient.is_sparse
        torch.testing.assert_close(gradient.to_dense(), whole[0].wte.weight.grad.to_dense(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_element_types(dtype: torch.dtype) -> None:
    whole = model(2, dtype=dtype)

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> torch.Tensor:
        step(pipe, 0)
        weight = mine[0].wte.weight if pipe.has_first else mine[1].head.weight
        assert weight.grad.dtype is dtype
        return weight.grad

    one, other = run(build("1F1B", 2), work, modules=apart(whole))
    unsplit_step(whole, 0)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, whole[0].wte.weight.grad, rtol=0.05, atol=0.02)


def test_an_overflow_in_a_tied_gradient_counts_everywhere() -> None:
    modules = apart(model(2))
    modules[1].head.weight.register_hook(lambda gradient: gradient * float("inf"))

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> bool:
        scaler = pipe._engine.scaling._scaler
        optimizer = torch.optim.SGD(parameters(mine), lr=1.0)
        before = [one.detach().clone() for one in parameters(mine)]
        step(pipe, 0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 32.0
        return all(torch.equal(one, other) for one, other in zip(before, parameters(mine), strict=True))

    def worker(transport: Any) -> bool:
        schedule = build("1F1B", 2)
        mine = stages_of(modules, schedule, transport.rank)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        options: dict[str, Any] = {"scaler": scaler, "ties": [TIE], "transport": transport}
        with Pipeline(mine, schedule, loss_fn=loss_fn, **options) as pipe:
            return work(pipe, mine)

    assert run_in_threads(worker, 2, timeout=60) == [True, True]
