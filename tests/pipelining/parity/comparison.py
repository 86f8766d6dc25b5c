"""What a scenario returns, and how two of them are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

SMALL = 1e-10


@dataclass(frozen=True)
class Raised:
    """An exception as data: its type and those that it is one of, the nearest first."""

    kinds: tuple[str, ...]
    text: str
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException, trace: str = "") -> Raised:
        return cls(tuple(kind.__name__ for kind in type(error).__mro__), str(error), trace)

    def __str__(self) -> str:
        return f"{self.kinds[0]}: {self.text}"


def differences(theirs: Any, ours: Any, at: str = "result") -> list[str]:
    """Where ours is not what theirs is. Tensors to 1e-10 of their size; an error of ours may be of a narrower type."""
    if isinstance(theirs, Raised) or isinstance(ours, Raised):
        return _errors(theirs, ours, at)
    if type(theirs) is not type(ours):
        return [f"{at} is {ours!r}, not {theirs!r}"]
    if isinstance(theirs, torch.Tensor):
        return _tensors(theirs, ours, at)
    if isinstance(theirs, dict):
        if list(theirs) != list(ours):
            return [f"{at} has {list(ours)}, not {list(theirs)}"]
        return [each for key in theirs for each in differences(theirs[key], ours[key], f"{at}[{key!r}]")]
    if isinstance(theirs, list | tuple):
        if len(theirs) != len(ours):
            return [f"{at} has {len(ours)} items, not {len(theirs)}: {ours!r}, not {theirs!r}"]
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [each for place, pair in pairs for each in differences(*pair, f"{at}[{place}]")]
    return [] if theirs == ours else [f"{at} is {ours!r}, not {theirs!r}"]


def _errors(theirs: Any, ours: Any, at: str) -> list[str]:
    if not isinstance(theirs, Raised):
        return [f"{at} is raised: {ours}\n{ours.trace}"]
    if not isinstance(ours, Raised):
        return [f"{at} is {ours!r}; {theirs} should be raised"]
    return [] if theirs.kinds[0] in ours.kinds else [f"{at} is raised as {ours}; it should be {theirs}\n{ours.trace}"]


def _tensors(theirs: torch.Tensor, ours: torch.Tensor, at: str) -> list[str]:
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return [f"{at} is {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"]
    if theirs.requires_grad != ours.requires_grad:
        return [f"{at} has requires_grad={ours.requires_grad}, not {theirs.requires_grad}"]
    if not theirs.numel():
        return []
    gap = (theirs.detach().double() - ours.detach().double()).abs().max().item()
    scale = max(1.0, theirs.detach().double().abs().max().item())
    return [] if gap <= SMALL * scale else [f"{at} is off by {gap:.3g}"]
