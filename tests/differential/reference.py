"""The truth: the stages one after the other, for one microbatch after the other, by plain autograd in one thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from differential.cases import Case
from differential.forms import DROP_IN
from differential.models import Batch, Loss, StageModule, build, weigh
from differential.observing import Observed, detach, differences, finish, merge, observe


@dataclass
class Expected:
    """What a case should do.

    Attributes:
        calls: what each call leaves behind, up to one that the unsplit model refuses.
        trains_nothing: whether the unsplit model has nothing to train in some step.
        lost: stages with parameters to train that no output depends on, in the first step.
        cut: stages without such parameters that pass no gradient on to those before.
    """

    calls: list[Observed] = field(default_factory=list)
    trains_nothing: bool = False
    lost: frozenset[int] | None = None
    cut: frozenset[int] | None = None


def expect(case: Case) -> Expected:
    """Run the case without a pipeline."""
    modules = build(case)
    expected = Expected()
    for number, call in enumerate(case.calls):
        batch = Batch(case, number)
        with torch.set_grad_enabled(call.kind == "step"):
            output, losses = _run(case, modules, batch, expected, trains=call.kind == "step")
        output, losses = output if call.outputs else None, losses if call.losses else []
        expected.calls.append(observe(dict(enumerate(modules)), batch, output, losses))
        if case.door == DROP_IN and case.reduction == "mean" and batch.x.grad is not None:
            # As in torch, scale_grads is for the gradients of parameters.
            expected.calls[-1]["gradient of x"] *= case.microbatches
        if call.kind == "step":
            finish(modules, call.after)
    return expected


def forward(case: Case, modules: list[StageModule], args: tuple[Any, ...], scale: torch.Tensor) -> list[Any]:
    """What each stage returns."""
    values = []
    for index, module in enumerate(modules):
        named = {"scale": scale} if case.rank_of[index] in case.scaled_ranks else {}
        values.append(module(*args, **named))
        args = values[-1] if isinstance(values[-1], tuple) else (values[-1],)
    return values


def _run(
    case: Case, modules: list[StageModule], batch: Batch, expected: Expected, *, trains: bool
) -> tuple[Any, list[torch.Tensor]]:
    targets = batch.split(batch.target)
    parts = zip(batch.microbatches(), batch.split(batch.scale), targets, _shares(case, targets), strict=True)
    outputs, losses = [], []
    lost = cut = frozenset(range(len(modules)))
    for args, scale, target, share in parts:
        values = forward(case, modules, args, scale)
        loss = Loss(case)(values[-1], target)
        outputs.append(detach(values[-1]))
        losses.append(loss.detach())
        if not trains:
            continue
        now_lost, now_cut = _cut_off(modules, [*values[:-1], loss])
        lost, cut = lost & now_lost, cut & now_cut
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, share))
        else:
            expected.trains_nothing = True
    if trains and expected.lost is None:
        expected.lost, expected.cut = lost, cut
    return merge(outputs), losses


def _cut_off(modules: list[StageModule], outputs: list[Any]) -> tuple[frozenset[int], frozenset[int]]:
    """The stages of whose outputs none requires a gradient: those with parameters to train, and others."""
    needs = [any(one.requires_grad for one in tree_leaves(value) if isinstance(one, torch.Tensor)) for value in outputs]
    trains = [any(one.requires_grad for one in module.parameters()) for module in modules]
    without = [index for index in range(len(modules)) if not needs[index]]
    return (
        frozenset(index for index in without if trains[index]),
        frozenset(index for index in without if not trains[index] and index and needs[index - 1]),
    )


def _shares(case: Case, targets: list[torch.Tensor]) -> list[float]:
    """How much the loss of each microbatch counts."""
    if case.reduction == "sum":
        return [1.0] * len(targets)
    if case.door == DROP_IN:
        return [1 / len(targets)] * len(targets)
    counts = [float(weigh(one)) if case.reduction == "weighted" else float(len(one)) for one in targets]
    return [count / sum(counts) for count in counts]


def check_reference(case: Case) -> list[str]:
    """Where a first step in microbatches gives something else than the batch in one piece."""
    per_microbatch = expect(case).calls[0]
    modules = build(case)
    batch = Batch(case, 0)
    output = forward(case, modules, batch.args, batch.scale)[-1]
    loss = Loss(case)(output, batch.target).sum()
    if loss.requires_grad:
        loss.backward()
    whole = observe(dict(enumerate(modules)), batch, output, [])
    compared = {key: value for key, value in per_microbatch.items() if key in whole and not key.startswith("calls")}
    return differences(case, {key: whole[key] for key in compared}, compared, "the whole batch")
