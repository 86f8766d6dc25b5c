"""Models that ``penstock.split`` divides train in a pipeline as they do in one piece, on the same microbatches.

Losses, outputs and every gradient are compared with the model as it was built, over three steps of AdamW. Microbatches
are uneven. Models with ordinary dropout are left out: each rank draws its own numbers, in the order of its schedule, so
they are equal only if the seed comes with the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import penstock as ps
from penstock.models.split import Split
from penstock.runtime import DistributedTransport, Pipeline
from runtime.split_families import FAMILIES, HUGGING_FACE, LAYERS, OWN, Batch, build, draw_batch
from runtime.wired import random_schedule

NAMES = ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "custom"]
MICROBATCHES, SAMPLES, STEPS = 3, 7, 3
SIZES = [3, 2, 2]
CLOSE = 1e-10


class Seen(NamedTuple):
    """What a step of the unsplit model gives: by microbatch, merged, and by all names, since a tied one has several."""

    losses: torch.Tensor
    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor]


def train_whole(family: str) -> list[Seen]:
    """Train the model as it was built."""
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [_run_whole(model, family, part) for part in _microbatches(draw_batch(family, SAMPLES, step))]
        total = sum(weight for _, _, weight in parts)
        # Transformers computes the loss in float32: another order of these factors would be off by its precision.
        sum(weight / total * loss for loss, _, weight in parts).backward()
        named = dict(model.named_parameters(remove_duplicate=False))
        gradients = {name: None if one.grad is None else one.grad.clone() for name, one in named.items()}
        optimizer.step()
        outputs = [_merged(column) for column in zip(*[_tensors(output) for _, output, _ in parts], strict=True)]
        losses = torch.stack([loss.detach() for loss, _, _ in parts])
        if family not in OWN:  # whose outputs begin with the loss
            outputs[0] = sum(weight / total * loss.detach() for loss, _, weight in parts)
        seen.append(Seen(losses, outputs, gradients, {name: one.detach().clone() for name, one in named.items()}))
    return seen


def _run_whole(model: nn.Module, family: str, part: Batch) -> tuple[torch.Tensor, Any, int]:
    """The loss of a microbatch, its output, and what the loss is a mean over."""
    if family in OWN:
        output = model(*part.args, **part.kwargs)
        return OWN[family].loss_fn(output, part.target), output, len(part.target)
    output = model(**part.kwargs, use_cache=False)
    begin = 0 if family == "t5" else 1
    return output.loss, output, int((part.kwargs["labels"][:, begin:] != -100).sum())


def _microbatches(batch: Batch) -> Iterator[Batch]:
    for number in range(MICROBATCHES):
        args = tuple(one.split(SIZES)[number] for one in batch.args)
        kwargs = {name: one.split(SIZES)[number] for name, one in batch.kwargs.items()}
        yield Batch(args, kwargs, None if batch.target is None else batch.target.split(SIZES)[number])


def _tensors(output: Any) -> list[torch.Tensor]:
    return [one.detach() for one in tree_leaves(output) if isinstance(one, torch.Tensor)]


def _merged(column: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat(column) if column[0].dim() else torch.stack(column)


def differences(family: str, expected: list[Seen], schedule: ps.Schedule, transport: DistributedTransport) -> list[str]:
    """Everything in which the steps of a pipeline differ from those of the unsplit model."""
    options = {"loss_fn": OWN[family].loss_fn} if family in OWN else {}
    split = _split(family, schedule)
    pipe = Pipeline(split, schedule, transport=transport, **options)
    mine = {name: one for stage in pipe.stages.values() for name, one in stage.module.named_parameters()}
    # A stage that is a single activation has no parameters, but an optimizer needs one.
    optimizer = torch.optim.AdamW(list(dict.fromkeys(mine.values())) or [torch.zeros(1)], lr=1e-2)
    found = []
    for step, wanted in enumerate(expected):
        batch = draw_batch(family, SAMPLES, step)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        output = pipe.step(*batch.args, target=batch.target, losses=losses, **batch.kwargs)
        pairs = {f"gradient of {name}": (one.grad, wanted.gradients[name]) for name, one in mine.items()}
        if pipe.has_last:
            ours = _tensors(output)
            found += [] if len(ours) == len(wanted.outputs) else [f"step {step}: {len(ours)} outputs"]
            pairs["losses"] = torch.stack([one.detach() for one in losses]), wanted.losses
            pairs |= {f"output {n}": pair for n, pair in enumerate(zip(ours, wanted.outputs, strict=False))}
        optimizer.step()
        pairs |= {f"value of {name}": (one, wanted.parameters[name]) for name, one in mine.items()}
        found += [f"step {step}: the {what} differs by {gap:.3g}" for what, gap in _gaps(pairs)]
    held = {name for stage in split.stages().values() for name, _ in stage.named_parameters(remove_duplicate=False)}
    found += [f"{name} is in no stage" for name in expected[0].gradients if name not in held]
    if sorted(pipe.stages) != list(schedule.placement.stages_of(transport.rank)):
        found.append(f"stages {sorted(pipe.stages)}")
    return found


def _split(family: str, schedule: ps.Schedule) -> Split:
    """Split by count; for a custom schedule by name, at random places. With an example where one is needed."""
    given = draw_batch(family, 2, 0)
    needs_example = family not in ("mlp", *HUGGING_FACE) or family == "llava"
    options = {"example": (given.args, given.kwargs)} if needs_example else {}
    if "name" in schedule.metadata:
        return ps.split(build(family), stages=schedule.stages, **options)
    names = [name for stage in ps.split(build(family), stages=2, check=False, **options).layout for name in stage]
    cuts = sorted(Random(len(names)).sample(range(1, len(names)), schedule.stages - 1))
    layout = [names[start:end] for start, end in pairwise([0, *cuts, len(names)])]
    return ps.split(build(family), layout=layout, **options)


def _gaps(pairs: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]) -> Iterator[tuple[str, float]]:
    for what, (one, other) in pairs.items():
        one, other = (torch.zeros(()) if each is None else each.detach() for each in (one, other))
        gap = float("inf") if one.dim() and one.shape != other.shape else (one - other).abs().max().item()
        if not gap <= CLOSE:  # nor if it is NaN
            yield what, gap


def compared(_rank: int, ranks: int, cases: list[tuple[str, tuple[str, ...]]], *, group: Any) -> list[str]:
    transport = DistributedTransport(group, timeout=60.0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    found = []
    try:
        for family, names in cases:
            expected = train_whole(family)
            for name in names:
                where = f"{family}, {name}, {ranks} ranks"
                found += [f"{where}: {one}" for one in differences(family, expected, _schedule(name, ranks), transport)]
    finally:
        torch.set_default_dtype(default)
        transport.close()
    return found


def _schedule(name: str, ranks: int) -> ps.Schedule:
    if name == "custom":
        return random_schedule(Random(7), ranks, 5, MICROBATCHES, split=True)
    return ps.build(name, ranks=ranks, microbatches=MICROBATCHES)


def _some(ranks: int) -> list[tuple[str, tuple[str, ...]]]:
    """Every model under one schedule, every schedule with several models, others on four ranks than on two."""
    return [(family, (NAMES[(number + ranks) % len(NAMES)],)) for number, family in enumerate(FAMILIES)]


def test_what_the_models_are_for():
    """Numbers are dropped, by the seed; experts have a loss of their own."""
    args, kwargs, _ = draw_batch("dropout", SAMPLES, 0)
    model = build("dropout")
    first, again, other = (model(*args, seeds=kwargs["seeds"] + shift) for shift in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert not torch.allclose(first, model.eval()(*args, **kwargs))
    experts = build("mixtral")(**draw_batch("mixtral", SAMPLES, 0).kwargs)
    assert experts.aux_loss > 0
    assert len(experts.router_logits) == LAYERS


@pytest.mark.parametrize("ranks", [2, 4])
def test_models_train_as_in_one_piece(workers, ranks):
    found = workers.run(compared, _some(ranks), ranks=ranks, limit=240)
    assert [each for rank in found for each in rank] == []


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_train_as_in_one_piece_under_all_schedules(workers, family, ranks):
    found = workers.run(compared, [(family, tuple(NAMES))], ranks=ranks, limit=240)
    assert [each for rank in found for each in rank] == []
