"""The dry run that finds shapes changes nothing that the user can see."""

import random

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.runtime import Pipeline


class Masked(nn.Module):
    """Has a mask that one row of memory stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]).expand(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.mask


class Drawing(nn.Module):
    """Draws from Python's random and from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(4, 4), torch.Generator().manual_seed(0)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = torch.rand(1, generator=self.generator)
        self.seen += [own.item(), random.random()]
        return self.layer(x) * own


class Adding(nn.Module):
    """Changes its arguments in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> torch.Tensor:
        x.add_(1)
        more["bias"].add_(1)
        return self.layer(x.clone())


def pipe_of(*modules: nn.Module) -> Pipeline:
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=2, stages_per_rank=len(modules))
    return Pipeline(dict(enumerate(modules)), schedule, loss_fn=mse_loss)


@pytest.mark.parametrize("place", [0, 1])
def test_a_buffer_that_is_expanded(place: int) -> None:
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    modules[place] = Masked()
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    whole = nn.Sequential(*modules)
    expected = torch.autograd.grad(mse_loss(torch.cat([whole(half) for half in x.split(2)]), y), [*whole.parameters()])
    with pipe_of(*modules) as pipe:
        pipe.step(x, target=y)
        pipe.check_parity(x, target=y)
    for parameter, gradient in zip(whole.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert modules[place].mask.stride() == (0, 1)


def test_random_numbers_of_python_and_of_modules() -> None:
    first, last = Drawing(), Drawing()
    random.seed(5)
    with pipe_of(first, last) as pipe:
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    generator = torch.Generator().manual_seed(0)
    assert first.seen[0::2][-2:] == [torch.rand(1, generator=generator).item() for _ in range(2)]
    chance = random.Random(5)
    drawn = [chance.random() for _ in range(4)]
    assert [*first.seen[1::2][-2:], *last.seen[1::2][-2:]] == drawn


def test_check_parity_leaves_them_too() -> None:
    module = Drawing()
    state, own = random.getstate(), module.generator.get_state()
    with pipe_of(module) as pipe, pytest.raises(ps.errors.StageError, match="a generator that is not restored"):
        pipe.check_parity(torch.ones(4, 4), target=torch.zeros(4, 4))
    assert random.getstate() == state
    assert torch.equal(module.generator.get_state(), own)


def test_arguments_that_are_changed_in_place() -> None:
    x, bias = torch.zeros(4, 4), torch.zeros(4)
    with pipe_of(Adding()) as pipe:
        pipe.step(x, target=torch.zeros(4, 4), more={"bias": bias})
    assert x.tolist() == torch.ones(4, 4).tolist()
    assert bias.tolist() == [1] * 4
