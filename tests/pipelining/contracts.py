"""What contract tests share: each runs with torch's package, which proves that it tells the truth, and with ours.

A test asks for ``package``, and takes every name from it (``package.schedules._Action``). A function for processes
gets its name and calls ``Package(name)``.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

UPSTREAM = "torch.distributed.pipelining"
OURS = "penstock.pipelining"
PACKAGES = [UPSTREAM, OURS]

WIDTH = 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Package:
    """One of the two packages, by its name: ``Package(OURS).schedules`` is a module of it."""

    name: str

    @property
    def ours(self) -> bool:
        return self.name == OURS

    @property
    def top(self) -> ModuleType:
        return importlib.import_module(self.name)

    def __getattr__(self, module: str) -> ModuleType:
        if module.startswith("__"):
            raise AttributeError(module)
        return importlib.import_module(f"{self.name}.{module}")

    def schedule_class(self, name: str) -> Any:
        return self.schedules.get_schedule_class(name)

    def actions(self, text: str) -> list[Any]:
        """A row of actions as one writes it: ``0F0 0F1 . 0B0``, a dot for an idle step."""
        return [None if cell == "." else self.schedules._Action.from_str(cell) for cell in text.split()]

    def rows(self, *texts: str) -> dict[int, list[Any]]:
        return {rank: self.actions(text) for rank, text in enumerate(texts)}


def text(row: list[Any]) -> str:
    """A row of actions as ``Package.actions`` reads it."""
    return " ".join("." if action is None else str(action) for action in row)


@contextmanager
def wrong_upstream(package: Package, reason: str, error: type[Exception] = AssertionError) -> Iterator[None]:
    """A deliberate difference: what stands here works with ours, and torch fails at it with this error."""
    assert reason
    if package.ours:
        yield
    else:
        with pytest.raises(error):
            yield


@contextmanager
def fake_group(rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """A default process group whose messages go nowhere: one process plays one of several ranks."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(count: int, seed: int = 0) -> nn.ModuleList:
    """A model: layers with two matrices each, the same ones for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)
        )


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that adds over microbatches to that of the whole batch."""
    return ((output - target) ** 2).sum()


def averaged(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def gradients(modules: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in modules.named_parameters()}


def unsplit(model: nn.ModuleList, x: torch.Tensor, target: torch.Tensor, loss_fn: Any = summed) -> Any:
    """What the model gives in one piece: output, loss, gradients by name."""
    model.zero_grad()
    output = x
    for layer in model:
        output = layer(output)
    loss = loss_fn(output, target)
    loss.backward()
    found = SimpleNamespace(output=output.detach(), loss=loss.detach(), gradients=gradients(model))
    model.zero_grad()
    return found


def assert_gradients(model: nn.ModuleList, stages: list[int], expected: dict[str, torch.Tensor | None]) -> None:
    """The parameters of these stages have the gradients that they have in the unsplit model."""
    for name, gradient in gradients(model).items():
        if int(name.split(".")[0]) in stages:
            torch.testing.assert_close(gradient, expected[name], msg=lambda message, name=name: f"{name}: {message}")


def step_arguments(stages: list[Any], x: torch.Tensor, target: torch.Tensor, losses: list[Any]) -> tuple[Any, Any]:
    """What ``step`` is called with on the rank of these stages."""
    args = (x,) if any(stage.is_first for stage in stages) else ()
    kwargs = {"target": target, "losses": losses} if any(stage.is_last for stage in stages) else {}
    return args, kwargs


@contextmanager
def no_tensors_in_cycles() -> Iterator[None]:
    """No tensor that only the collector of cycles would find. What was there before is not looked at."""
    gc.freeze()  # for good: it is little, and it would be looked at in every later collection
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        found = [thing for thing in gc.garbage if isinstance(thing, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not found, f"{len(found)} tensors are in cycles, e.g. of shape {tuple(found[0].shape)}"
