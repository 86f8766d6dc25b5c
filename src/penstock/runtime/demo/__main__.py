"""Runs one rank of the demo. ``penstock demo`` starts it and reads the events that it writes, one JSON per line."""

from __future__ import annotations

import copy
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.ir.formats import read
from penstock.runtime.demo.model import CONTEXT, assign_layers, build_layers, loss_of
from penstock.runtime.demo.text import Text
from penstock.runtime.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Samples per microbatch.
SAMPLES = 4
#: How many blocks the model has, or one per stage if that is more.
BLOCKS = 8
LEARNING_RATE = 3e-3
#: After how many steps the learning rate is reached.
WARM_UP = 20
#: How many of the last steps are recorded.
RECORDED = 5
#: How much gradients may differ, relative to the largest: both are sums of float32 numbers, in different order.
TOLERANCE = 1e-4


class Training:
    """This rank's part of the training."""

    def __init__(self, schedule_file: str, steps: int) -> None:
        self.schedule = read(schedule_file)
        self.steps = steps
        blocks = max(BLOCKS, self.schedule.stages)
        self._layers = build_layers(blocks)
        self._layers_of = assign_layers(blocks, self.schedule.stages)
        self._unsplit = nn.Sequential(*copy.deepcopy(self._layers))
        mine = self.schedule.placement.stages_of(dist.get_rank())
        stages = {stage: nn.Sequential(*(self._layers[layer] for layer in self._layers_of[stage])) for stage in mine}
        self.pipe = Pipeline(stages, self.schedule, loss_fn=loss_of)
        self._parameters = [weight for stage in stages.values() for weight in stage.parameters()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE, betas=(0.9, 0.95))
        self._rate = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
        self._text = Text()

    @property
    def size(self) -> int:
        """The number of samples in a batch."""
        return SAMPLES * self.schedule.microbatches

    def run(self) -> bool:
        """Train; returns whether the gradients were right."""
        self._report(
            "start",
            model=str(self.pipe.transport.model),
            parameters=sum(weight.numel() for weight in self._unsplit.parameters()),
            tokens=self.size * CONTEXT,
        )
        self._step(0)
        if not self._gradients_are_right():
            return False
        self._update()
        recorded = min(RECORDED, max(1, self.steps // 2))
        for step in range(1, self.steps - recorded):
            self._step(step)
            self._update()
        with self.pipe.recording() as record:
            for step in range(max(1, self.steps - recorded), max(2, self.steps)):
                self._step(step)
                self._update()
        self._report(
            "recorded",
            costs=record.costs().to_dict(),
            steps=len(record.steps),
            makespan=record.makespan,
            busy=record.busy,
            idle=record.idle,
            ends=record.ends,
        )
        return True

    def _step(self, number: int) -> None:
        self._optimizer.zero_grad()
        tokens, target = self._text.batch(number, self.size, CONTEXT)
        begin = time.perf_counter()
        self.pipe.step(*([tokens] if self.pipe.has_first else []), target=target, return_outputs=False)
        if self.pipe.loss is not None:
            loss = self.pipe.loss.item()
            self._report("step", step=number + 1, loss=loss, seconds=time.perf_counter() - begin)

    def _update(self) -> None:
        self._optimizer.step()
        self._rate.step()

    def _gradients_are_right(self) -> bool:
        """Compare the gradients of the first step with those of the unsplit model."""
        tokens, target = self._text.batch(0, self.size, CONTEXT)
        torch.autograd.backward(loss_of(self._unsplit(tokens), target))
        mine = [layer for stage in self.pipe.stages for layer in self._layers_of[stage]]
        split = {f"{layer}.{name}": weight for layer in mine for name, weight in self._layers[layer].named_parameters()}
        found = differences(split, dict(self._unsplit.named_parameters()))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        difference, largest = found.tolist()
        right = bool(difference <= TOLERANCE * largest)
        self._report("gradients", difference=difference, largest=largest, tolerance=TOLERANCE, right=right)
        del self._unsplit
        return right

    def _report(self, event: str, **facts: Any) -> None:
        """Write an event for the command, on the rank that has the losses."""
        if self.pipe.has_last:
            sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
            sys.stdout.flush()


def differences(split: Mapping[str, Tensor], unsplit: Mapping[str, Tensor]) -> Tensor:
    """The largest difference between two gradients of a parameter, and the largest gradient."""
    found = torch.zeros(2, dtype=torch.float64)
    for name, weight in split.items():
        expected = unsplit[name].grad
        if weight.grad is None or expected is None:
            found[0] = torch.inf
            continue
        difference = (weight.grad.double() - expected.double()).abs().max().nan_to_num(torch.inf)
        found = torch.maximum(found, torch.stack([difference, expected.double().abs().max()]))
    return found


def main() -> None:
    """Train; the arguments are the file of a schedule and the number of steps."""
    dist.init_process_group("gloo")
    training = Training(sys.argv[1], int(sys.argv[2]))
    with training.pipe:
        right = training.run()
    dist.destroy_process_group()
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
