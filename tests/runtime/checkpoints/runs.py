"""A small language model, layouts to train it on, and runs that are saved and resumed, for tests of checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.models.split import Split
from penstock.runtime import Pipeline

WORDS, WIDTH, LENGTH, LAYERS = 11, 6, 3, 7
MICROBATCHES, SAMPLES = 4, 8
_ALONE = threading.Lock()  # ranks that are threads share the random state


class Layout(NamedTuple):
    """How a model is divided."""

    schedule: str
    ranks: int
    stages: int
    options: Mapping[str, int] = MappingProxyType({})
    placement: tuple[int, ...] = ()


LAYOUTS = {
    "1x1": Layout("GPipe", 1, 1),
    "1x4": Layout("LoopedBFS", 1, 4, {"stages_per_rank": 4}),
    "2x1": Layout("1F1B", 2, 2),
    "2x2": Layout("Interleaved1F1B", 2, 4, {"stages_per_rank": 2}),
    "2V": Layout("ZBVZeroBubble", 2, 4),
    "4x1": Layout("1F1B", 4, 4),
    "4x2": Layout("Interleaved1F1B", 4, 8, {"stages_per_rank": 2}),
    "4V": Layout("DualPipeV", 4, 8),
    "3 without stages on 1": Layout("GPipe", 3, 3, placement=(0, 2, 0)),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x)) * self.scale


class Tied(nn.Module):
    """The embedding is the head; a buffer is read by the model's own code, on every stage."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.wte(words))
        for layer in self.layers:
            x = layer(x) + self.shift
        return self.head(x)


def build() -> nn.Module:
    return Tied().double()


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    return words, (words * 3 + step) % WORDS


@cache
def _description(stages: int, make: Any) -> Any:
    return ps.split(make, stages=stages, example=((batch(0)[0][:2],), {}), check=False).to_json()


def split_for(layout: Layout, make: Any = build) -> Any:
    return Split.from_json(make, _description(layout.stages, make))


def schedule_for(layout: Layout) -> Any:
    if layout.placement:
        return _in_turn(ps.Placement(layout.placement, layout.ranks))
    return ps.build(layout.schedule, ranks=layout.ranks, microbatches=MICROBATCHES, **layout.options)


def _in_turn(placement: Any) -> Any:
    """All forwards, then all backwards."""
    rows: list[list[str]] = [[] for _ in range(placement.ranks)]
    for letter, stages in (("F", range(placement.stages)), ("B", reversed(range(placement.stages)))):
        for stage in stages:
            rows[placement.rank_of[stage]] += [f"{stage}{letter}{microbatch}" for microbatch in range(MICROBATCHES)]
    return ps.Schedule(rows, placement=placement)


@contextmanager
def pipeline(layout: Layout, *, seed: int = 0, make: Any = build, **options: Any) -> Any:
    """A pipeline of the model, with an optimizer and a scheduler."""
    schedule = schedule_for(layout)
    transport = options.get("transport")
    rank = transport.rank if transport is not None else torch.distributed.get_rank(options.get("group"))
    with _ALONE:
        split = split_for(layout, make)
        split.materialize(rank, schedule.placement, seed=seed)
    with Pipeline(split, schedule, **{"loss_fn": loss_fn, **options}) as pipe:
        optimizer = ps.Optimizer(pipe, torch.optim.AdamW, lr=0.05)
        yield pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


def train(pipe: Pipeline, optimizer: Any, scheduler: Any, steps: Any) -> list[float]:
    """Train some steps; returns the losses, on the rank of the last stage."""
    losses = []
    for step in steps:
        words, target = batch(step)
        optimizer.zero_grad()
        pipe.step(words, target=target)
        optimizer.step()
        scheduler.step()
        losses += [pipe.loss.item()] if pipe.loss is not None else []
    return losses
