"""Sparse gradients, as of ``Embedding(sparse=True)``, with a GradScaler and with clipping."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.runtime import Pipeline, run_in_threads

WORDS, WIDTH = 9, 4


def modules() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH, sparse=True), nn.Linear(WIDTH, WORDS))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.tensor([1, 1, 2, 3, 1, 2, 5, 1])  # with words that come twice in a microbatch, and in two
    return words, words.roll(1)


def train(ranks: int, split: nn.Sequential, work: Any, name: str = "1F1B", **options: Any) -> list[Any]:
    """What ``work`` returns on each rank, after a step."""
    several = {"stages_per_rank": 2} if ranks == 1 else {}
    schedule = ps.build("LoopedBFS" if ranks == 1 else name, ranks=ranks, microbatches=2, **several)

    def run(transport: Any) -> Any:
        mine = {index: split[index] for index in schedule.placement.stages_of(transport.rank)}
        settings = {key: make() for key, make in options.items()}
        with Pipeline(mine, schedule, loss_fn=cross_entropy, transport=transport, **settings) as pipe:
            words, target = batch()
            pipe.step(words, target=target)
            return work(pipe, settings.get("scaler"))

    return run_in_threads(run, ranks, timeout=60)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0)


def optimizer_of(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for stage in pipe.stages.values() for one in stage.module.parameters()], lr=0.1)


def scaled_step(pipe: Pipeline, mine: torch.amp.GradScaler) -> float:
    optimizer = optimizer_of(pipe)
    mine.unscale_(optimizer)
    mine.step(optimizer)
    mine.update()
    return mine.get_scale()


@pytest.mark.parametrize(("name", "ranks"), [("LoopedBFS", 1), ("1F1B", 2), ("ZB-H1", 2)])
def test_a_scaler_does_what_it_does_for_the_unsplit_model(name: str, ranks: int) -> None:
    split = modules()
    whole = copy.deepcopy(split)
    words, target = batch()
    cross_entropy(whole(words), target).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    assert train(ranks, split, scaled_step, name, scaler=scaler) == [256.0] * ranks
    assert split[0].weight.grad.is_sparse
    for one, other in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense())
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["0.weight", "1.bias"])
def test_an_overflow_is_one_on_every_rank(name: str) -> None:
    """Whether it is the sparse gradient that overflows, or another one."""
    split = modules()
    split.get_parameter(name).register_hook(lambda gradient: gradient * float("inf"))
    before = [parameter.detach().clone() for parameter in split.parameters()]
    assert train(2, split, scaled_step, scaler=scaler) == [128.0, 128.0]
    for parameter, value in zip(split.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_rows_whose_sum_overflows() -> None:
    """A row that comes twice counts with the sum of both, with which it is trained."""
    split = modules()
    rows = torch.sparse_coo_tensor([[1, 1]], torch.full((2, WIDTH), 3e38), (WORDS, WIDTH), check_invariants=True)
    split[0].weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", rows))
    assert train(2, split, scaled_step, scaler=scaler) == [128.0, 128.0]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.01, 1000.0])
def test_clipping(norm_type: float, max_norm: float) -> None:
    split = modules()
    whole = copy.deepcopy(split)
    words, target = batch()
    cross_entropy(whole(words), target).backward()
    gradients = [parameter.grad.to_dense() for parameter in whole.parameters()]
    norm = torch.linalg.vector_norm(torch.cat([one.flatten() for one in gradients]), norm_type)
    for found in train(2, split, lambda pipe, _: pipe.clip_grad_norm_(max_norm, norm_type)):
        torch.testing.assert_close(found, norm)
    scale = min(1.0, max_norm / (float(norm) + 1e-6))
    for parameter, gradient in zip(split.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.to_dense(), gradient * scale)
