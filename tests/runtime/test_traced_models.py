"""Models that ``penstock.pipelining.pipeline`` traces train in a pipeline as they do in one piece.

Losses, outputs and every gradient are compared with the model as it was built, over three steps of AdamW, by both front
doors. A trace keeps the number of samples, so microbatches are even.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import penstock as ps
from penstock.errors import TraceError
from penstock.pipelining import SplitPoint, pipeline
from penstock.pipelining.schedules import _Action, _PipelineScheduleRuntime, get_schedule_class
from penstock.runtime import DistributedTransport, Pipeline
from runtime.split_families import LAYERS, OWN, Batch, build, draw_batch
from runtime.wired import random_schedule

NAMES = ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "custom"]
#: The drop-in needs as many microbatches as stages for some of them.
MICROBATCHES, STEPS = 8, 3
SAMPLES = 2 * MICROBATCHES
CLOSE = 1e-10

#: Where models may be cut: before each of these modules but the first.
BLOCKS = {
    "mlp": [str(2 * number) for number in range(LAYERS)],
    "residual": [f"layers.{number}" for number in range(LAYERS)],
    "unet": [f"{way}.{number}" for way in ("down", "up") for number in range(LAYERS // 2)],
    "tied": [f"blocks.{number}" for number in range(LAYERS)],
    "several": [f"{side}.{number}" for number in range(LAYERS // 2) for side in ("left", "right")],
    "gpt2": [f"transformer.h.{number}" for number in range(LAYERS)],
    **{
        name: [f"model.layers.{number}" for number in range(LAYERS)]
        for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "mixtral")
    },
    "llava": [
        *[f"model.vision_tower.encoder.layers.{number}" for number in range(LAYERS // 2)],
        *[f"model.language_model.layers.{number}" for number in range(LAYERS)],
    ],
    "t5": [f"{side}.block.{number}" for side in ("encoder", "decoder") for number in range(LAYERS // 2)],
}
#: Others cannot be traced: where one would cut them, and why not.
UNTRACED = {
    "dropout": ("layers.4", "its dropout is seeded by a number of the batch"),
    "mixtral": ("model.layers.4", "its experts are looped over, as data says, unless they are batched"),
}


def loss_of(family: str) -> Any:
    """The model's own loss, or that of the family."""
    return OWN[family].loss_fn if family in OWN else lambda output, _: output["loss"]


def loss_of_flat(family: str) -> Any:
    """The same of what the last stage of the drop-in returns: outputs in a row."""
    if family == "several":
        return lambda output, target: OWN[family].loss_fn({"sum": output[0], "parts": output[1:]}, target)
    return OWN[family].loss_fn if family in OWN else lambda output, _: output[0]


def weight_of(family: str) -> Any:
    """What the loss of a microbatch is a mean over, given its target; None for the samples."""
    first = 0 if family == "t5" else 1
    return None if family in OWN else lambda labels: (labels[:, first:] != -100).sum()


def batch_of(family: str, step: int, samples: int = SAMPLES) -> Batch:
    """A batch in which every microbatch has labels."""
    batch = draw_batch(family, samples, step)
    if family == "several":  # a later stage takes what it uses of the model's arguments by keyword
        return Batch((), dict(zip("xy", batch.args, strict=True)) | batch.kwargs, batch.target)
    return batch if family in OWN else batch._replace(target=batch.kwargs["labels"])


def build_traceable(family: str) -> nn.Module:
    """The model, which returns no cache."""
    model = build(family)
    if family == "mixtral":
        model.set_experts_implementation("batched_mm")
    for part in model.modules():
        if getattr(getattr(part, "config", None), "use_cache", False):
            part.config.use_cache = False
    return model


def trace(family: str, stages: int) -> Any:
    """Trace the model and cut it into this many stages."""
    example = batch_of(family, 0, samples=2)
    blocks = BLOCKS[family]
    cuts = [blocks[len(blocks) * stage // stages] for stage in range(1, stages)]
    return pipeline(
        build_traceable(family), example.args, example.kwargs, split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING)
    )


def microbatches(batch: Batch) -> Iterator[Batch]:
    for number in range(MICROBATCHES):
        parts = [one.tensor_split(MICROBATCHES)[number] for one in (*batch.args, *batch.kwargs.values(), batch.target)]
        kwargs = dict(zip(batch.kwargs, parts[len(batch.args) : -1], strict=True))
        yield Batch(tuple(parts[: len(batch.args)]), kwargs, parts[-1])


def tensors(output: Any) -> list[torch.Tensor]:
    return [one.detach() for one in tree_leaves(output) if isinstance(one, torch.Tensor)]


class Whole:
    """The model as it was built, and its optimizer."""

    def __init__(self, family: str, *, weigh: Any = None) -> None:
        self.family = family
        self.weigh = weigh or len
        self.model = build_traceable(family)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))

    def step(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Losses, and outputs of microbatches put together."""
        self.optimizer.zero_grad()
        losses, outputs, weights = [], [], []
        for part in microbatches(batch):
            output = self.model(*part.args, **part.kwargs)
            losses.append(loss_of(self.family)(output, part.target))
            outputs.append(tensors(output))
            weights.append(int(self.weigh(part.target)))
        # Transformers computes the loss in float32: another order of these factors would be off by its precision.
        sum(weight / sum(weights) * loss for weight, loss in zip(weights, losses, strict=True)).backward()
        merged = [
            torch.cat(column) if column[0].dim() else torch.stack(column) for column in zip(*outputs, strict=True)
        ]
        return torch.stack(losses).detach(), merged


def differences(whole: Whole, run: Any, stages: list[nn.Module], *, has_last: bool, first: bool) -> Iterator[str]:
    """Everything in which three steps differ from those of the unsplit model."""
    mine = {name: one for stage in stages for name, one in stage.named_parameters()}
    held = dict.fromkeys(one for stage in stages for one in stage.parameters())
    optimizer = torch.optim.AdamW(list(held) or [torch.zeros(1)], lr=1e-2)
    for number in range(STEPS):
        batch = batch_of(whole.family, number)
        expected, outputs = whole.step(batch)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        found = run(*(batch.args if first else ()), target=batch.target, losses=losses, **batch.kwargs)
        pairs = {f"gradient of {name}": (one.grad, whole.parameters[name].grad) for name, one in mine.items()}
        whole.optimizer.step()
        optimizer.step()
        pairs |= {f"value of {name}": (one, whole.parameters[name]) for name, one in mine.items()}
        if has_last:
            pairs["losses"] = torch.stack([one.detach() for one in losses]), expected
            ours = tensors(found)
            if len(ours) < len(outputs) and isinstance(found, tuple):
                ours = outputs = []  # the drop-in returns only what the last stage makes, as torch's
            pairs |= {f"output {place}": pair for place, pair in enumerate(zip(ours, outputs, strict=True))}
        for what, (one, other) in pairs.items():
            if (one is None) != (other is None):
                yield f"step {number}: only one has a {what}"
            elif one is not None and not (gap := float((one - other).detach().abs().max())) <= CLOSE:
                yield f"step {number}: the {what} differs by {gap:.3g}"


def compared_native(_: int, ranks: int, family: str, names: list[str], *, group: Any) -> list[str]:
    transport = DistributedTransport(group, timeout=60.0)
    found = []
    try:
        for name in names:
            schedule = schedule_of(name, ranks)
            options = {} if family in OWN else {"loss_reduction": "weighted", "loss_weight": weight_of(family)}
            split = trace(family, schedule.stages)
            pipe = Pipeline(split, schedule, transport=transport, loss_fn=loss_of(family), **options)
            stages = [stage.module for stage in pipe.stages.values()]
            gaps = differences(
                Whole(family, weigh=weight_of(family)), pipe.step, stages, has_last=pipe.has_last, first=True
            )
            found += [f"{family}, {name}, {ranks} ranks: {gap}" for gap in gaps]
    finally:
        transport.close()
    return found


def compared_dropin(rank: int, ranks: int, family: str, names: list[str], *, group: Any) -> list[str]:
    found = []
    for name in names:
        schedule = schedule_of(name, ranks)
        pipe = trace(family, schedule.stages)
        stages = [pipe.build_stage(index, torch.device("cpu"), group) for index in schedule.placement.stages_of(rank)]
        kind = _PipelineScheduleRuntime if name == "custom" else get_schedule_class(name)
        run = kind(stages[0] if name == "1F1B" else stages, MICROBATCHES, loss_fn=loss_of_flat(family))
        if name == "custom":
            rows = {
                rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(schedule.actions)
            }
            run._prepare_schedule_with_comms(rows)
        has_last, has_first = any(stage.is_last for stage in stages), any(stage.is_first for stage in stages)
        modules = [stage.submod for stage in stages]
        gaps = differences(Whole(family), run.step, modules, has_last=has_last, first=has_first)
        found += [f"{family}, {name}, {ranks} ranks, drop-in: {gap}" for gap in gaps]
    return found


def schedule_of(name: str, ranks: int) -> ps.Schedule:
    """A schedule; the custom one has stages on every rank, in any order."""
    if name != "custom":
        return ps.build(name, ranks=ranks, microbatches=MICROBATCHES)
    drawn = (random_schedule(Random(seed), ranks, 6, MICROBATCHES, split=True) for seed in range(100))
    return next(schedule for schedule in drawn if len(set(schedule.placement.rank_of)) == ranks)


def run_in_double(rank: int, ranks: int, door: str, family: str, names: list[str], *, group: Any) -> list[str]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        compared = compared_native if door == "native" else compared_dropin
        return compared(rank, ranks, family, names, group=group)
    finally:
        torch.set_default_dtype(default)


def check(workers: Any, door: str, family: str, names: list[str], ranks: int) -> None:
    found = workers.run(run_in_double, door, family, names, ranks=ranks, limit=240)
    assert [each for rank in found for each in rank] == []


@pytest.mark.parametrize(("family", "name", "ranks"), [("tied", "1F1B", 4), ("unet", "custom", 2)])
def test_traced_models_train_as_in_one_piece(workers, family, name, ranks):
    check(workers, "native", family, [name], ranks)


@pytest.mark.parametrize(("family", "name", "ranks"), [("tied", "custom", 2), ("gpt2", "1F1B", 2)])
def test_traced_models_train_in_the_drop_in(workers, family, name, ranks):
    check(workers, "drop-in", family, [name], ranks)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", BLOCKS)
def test_traced_models_under_all_schedules(workers, family, ranks):
    check(workers, "native", family, NAMES, ranks)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", BLOCKS)
def test_traced_models_in_the_drop_in_under_all_schedules(workers, family, ranks):
    check(workers, "drop-in", family, NAMES, ranks)


@pytest.mark.parametrize("family", UNTRACED)
def test_what_cannot_be_traced(family):
    block, _ = UNTRACED[family]
    example, model = batch_of(family, 0, samples=2), build(family)
    if family not in OWN:
        model.config.use_cache = False
    with pytest.raises(TraceError):
        pipeline(model, example.args, example.kwargs, split_spec={block: SplitPoint.BEGINNING})
