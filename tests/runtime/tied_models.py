"""A small language model whose embedding and head are one parameter, unsplit and in stages, for tests of ties."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.runtime import Pipeline, run_in_threads

WORDS, WIDTH, LENGTH = 11, 6, 3
_MAKING = threading.Lock()  # ranks that are threads share the random state
TIE = ("wte.weight", "head.weight")


class Start(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.wpe = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.wte(words) + self.wpe


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Reader(Block):
    """A block that uses the embedding as well, as a head of its own in the middle does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.head(x).softmax(-1) @ self.head.weight


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def model(
    stages: int, *, readers: int = 0, sparse: bool = False, dtype: torch.dtype = torch.float64
) -> list[nn.Module]:
    """The stages of the unsplit model: the parameter is one tensor in all that use it."""
    with _MAKING, torch.random.fork_rng():
        torch.manual_seed(stages)
        between = [Reader() if number < readers else Block() for number in range(stages - 2)]
        made: list[Any] = [Start(sparse), *between, End()]
    for one in made[1:]:
        if hasattr(one, "head"):
            one.head.weight = made[0].wte.weight
    whole = nn.ModuleList(made).to(dtype)
    assert all(one.head.weight is whole[0].wte.weight for one in whole if hasattr(one, "head"))
    return list(whole)


def apart(modules: list[nn.Module]) -> list[nn.Module]:
    """The stages as they are on different ranks: each with its own copy of the parameter."""
    return [copy.deepcopy(module) for module in modules]


def batch(number: int = 0, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    words = (torch.arange(size * LENGTH).reshape(size, LENGTH) * (number + 3) + number) % WORDS
    return words, words.flip(0, 1)


def unsplit_step(modules: list[nn.Module], number: int) -> torch.Tensor:
    words, target = batch(number)
    loss = loss_fn(nn.Sequential(*modules)(words), target)
    loss.backward()
    return loss.detach()


def parameters(modules: list[nn.Module] | dict[int, nn.Module]) -> list[nn.Parameter]:
    every = modules.values() if isinstance(modules, dict) else modules
    return list(dict.fromkeys(one for module in every for one in module.parameters()))


def differences(mine: dict[int, nn.Module], whole: list[nn.Module], *, gradients: bool = False) -> dict[str, float]:
    """How far each parameter, or its gradient, is from that of the unsplit model, by stage and name."""
    found = {}
    for stage, module in mine.items():
        theirs = dict(whole[stage].named_parameters())
        for name, one in module.named_parameters():
            other = theirs[name]
            ours, wanted = (one.grad, other.grad) if gradients else (one, other)
            assert (ours is None) == (wanted is None), (stage, name)
            if ours is not None:
                found[f"{stage} {name}"] = float((_dense(ours) - _dense(wanted)).abs().max())
    return found


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()


def stages_of(modules: list[nn.Module], schedule: ps.Schedule, rank: int) -> dict[int, nn.Module]:
    return {index: modules[index] for index in schedule.placement.stages_of(rank)}


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


def run(schedule: ps.Schedule, work: Callable[[Pipeline, dict[int, nn.Module]], Any], **options: Any) -> list[Any]:
    """Call a function on each rank, in threads, with a pipeline whose stages have their own copies."""
    modules = options.pop("modules", None) or apart(model(schedule.stages))
    options.setdefault("ties", [TIE])

    def worker(transport: Any) -> Any:
        mine = stages_of(modules, schedule, transport.rank)
        with Pipeline(mine, schedule, loss_fn=loss_fn, transport=transport, **options) as pipe:
            return work(pipe, mine)

    return run_in_threads(worker, schedule.ranks, timeout=60)
