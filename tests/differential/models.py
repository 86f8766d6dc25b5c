"""The stages of a case, its batches and its loss: the same for the reference and for every rank of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from differential.cases import Case, StagePlan
from differential.forms import FORMS, WIDTH
from differential.pieces import DOUBLE, PIECES

MOST = 64
"""More samples than any batch has."""


class StageModule(nn.Module):
    """A stage: it unpacks what it is called with, runs its pieces, and packs the result."""

    def __init__(self, plan: StagePlan) -> None:
        super().__init__()
        self.plan = plan
        self.pieces = nn.Sequential(*(PIECES[name]() for name in plan.pieces))
        self.table = nn.Embedding(7, WIDTH, **DOUBLE) if plan.takes == "ids" else None
        if "side" in FORMS[plan.gives].pack.__code__.co_names:
            self.side = nn.Linear(WIDTH, WIDTH, bias=False, **DOUBLE)
        if plan.tied:
            self.tied = nn.Linear(WIDTH, WIDTH, bias=False, **DOUBLE)
        self.register_buffer("constant", torch.rand(WIDTH, **DOUBLE))
        self.memory = torch.zeros(MOST, WIDTH, **DOUBLE)
        self.kept: dict[str, Any] = {}
        self.listed: list[Any] = []
        self.entered: torch.Tensor | None = None
        if plan.frozen:
            self.requires_grad_(False)

    def forward(self, *args: Any, scale: torch.Tensor | None = None) -> Any:
        h = self.enter(args)
        if scale is not None:
            h = h * scale
        self.entered = h
        h = self.pieces(h)
        if self.plan.tied:
            h = h + torch.tanh(self.tied(h))
        if self.plan.detaches:
            h = h.detach()
        value = FORMS[self.plan.gives].pack(h, self)
        self.entered = None
        return value

    def enter(self, args: tuple[Any, ...]) -> torch.Tensor:
        """Make a tensor with a row for each sample of what the stage is called with."""
        takes = self.plan.takes
        if takes in FORMS:
            return FORMS[takes].unpack(*args)
        (x, *more) = args
        if takes == "ids":
            return self.table(x).sum(1)
        if takes == "columns":
            return x.t()
        if takes == "two":
            return x * more[0]
        if takes == "a dict":
            return x["x"] * x["y"]
        return x.add_(1) if takes == "changed x" else x


def build(case: Case) -> list[StageModule]:
    """All stages; those of one rank share the weight that is tied, others have copies of it."""
    modules = []
    with torch.random.fork_rng(devices=[]):
        for index, plan in enumerate(case.stages):
            torch.manual_seed(1000 * case.seed + index)
            modules.append(StageModule(plan))
    owners: dict[int, nn.Parameter] = {}
    tied = [(index, module) for index, module in enumerate(modules) if module.plan.tied]
    for index, module in tied:
        rank = case.rank_of[index]
        if rank not in owners:
            owners[rank] = module.tied.weight
            with torch.no_grad():
                module.tied.weight.copy_(tied[0][1].tied.weight)
        module.tied.weight = owners[rank]
    return modules


class Batch:
    """What a call is made with, the same on every rank that draws it."""

    def __init__(self, case: Case, number: int) -> None:
        call = case.calls[number]
        self.case, self.samples = case, call.samples
        generator = torch.Generator().manual_seed(1000 * case.seed + 100 + number)
        self.x = torch.randn(self.samples, WIDTH, generator=generator, **DOUBLE)
        self.y = torch.randn(self.samples, WIDTH, generator=generator, **DOUBLE)
        self.ids = torch.randint(7, (self.samples, 2), generator=generator)
        self.target = torch.randn(self.samples, WIDTH, generator=generator, **DOUBLE)
        self.scale = torch.rand(self.samples, 1, generator=generator, **DOUBLE)
        if case.given == "columns":
            self.x = self.x.t().contiguous()
        if case.needs_gradient:
            self.x.requires_grad_()

    @property
    def dim(self) -> int:
        """The dimension of the samples in x."""
        return 1 if self.case.given == "columns" else 0

    @property
    def args(self) -> tuple[Any, ...]:
        """What the first stage is called with."""
        given = self.case.given
        if given == "ids":
            return (self.ids,)
        if given == "two":
            return self.x, self.y
        return ({"x": self.x, "y": self.y},) if given == "a dict" else (self.x,)

    def split(self, tensor: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
        """A part for each microbatch, as far as there are samples."""
        return list(torch.tensor_split(tensor, min(self.case.microbatches, self.samples), dim))

    def microbatches(self) -> list[tuple[Any, ...]]:
        """What the first stage is called with, for each microbatch."""
        given = self.case.given
        if given == "ids":
            return [(part,) for part in self.split(self.ids)]
        parts = self.split(self.x, self.dim)
        if given == "two":
            return list(zip(parts, self.split(self.y), strict=True))
        if given == "a dict":
            return [({"x": x, "y": y},) for x, y in zip(parts, self.split(self.y), strict=True)]
        return [(part,) for part in parts]

    def kwargs(self, rank: int) -> dict[str, Any]:
        return {"scale": self.scale} if rank in self.case.scaled_ranks else {}


class _Doubled(torch.autograd.Function):
    """Doubles the gradient, in the memory in which it comes."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mul_(2)


class Loss:
    """The loss of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __call__(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        value = output if isinstance(output, tuple) else (output,)
        h = FORMS[self.case.stages[-1].gives].unpack(*value)
        errors = ((h - target) ** 2).mean(1)
        if self.case.reduction == "sum":
            loss = errors.sum()
        elif self.case.reduction == "weighted":
            loss = (errors * target[:, 0].abs()).sum() / weigh(target)
        else:
            loss = errors.mean()
        if self.case.loss == "of shape [1]":
            return loss.reshape(1)
        return _Doubled.apply(loss) if self.case.loss else loss


def weigh(target: torch.Tensor) -> torch.Tensor:
    """How much a microbatch counts, where that is not by its samples."""
    return target[:, 0].abs().sum()
