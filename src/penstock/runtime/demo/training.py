"""Trains one rank's part of the model, saves it now and then, and records the last steps."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.ir.formats import read
from penstock.models.split import split
from penstock.runtime.checkpoints.load import load
from penstock.runtime.checkpoints.save import save
from penstock.runtime.demo.events import report
from penstock.runtime.demo.examine import compare_gradients
from penstock.runtime.demo.held_memory import HeldMemory
from penstock.runtime.demo.model import CONTEXT, build, loss_of
from penstock.runtime.demo.text import Text
from penstock.runtime.optimizers.optimizer import Optimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.profiling.stage_memory import static_bytes
from penstock.runtime.stopping import stop_on_signal
from penstock.simulation.timeline_json import write_timeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.recording import Recording

LEARNING_RATE = 3e-3
#: After how many steps the learning rate is reached.
WARM_UP = 20
#: How many of the last steps are recorded.
RECORDED = 5
#: After how many steps the next checkpoint is saved.
SAVED_EVERY = 40


def train(job: Mapping[str, Any]) -> bool:
    """Train; returns whether the gradients were right."""
    training = Training(job)
    with training.pipe:
        return training.run()


class Training:
    """This rank's part of the training."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        schedule = read(job["schedule"])
        self._size = job["samples"] * schedule.microbatches
        self._steps: int = job["steps"]
        self._folder = Path(job["folder"])
        self._text = Text()
        self._build = partial(build, job["blocks"])
        example: Any = ((self._text.batch(0, job["samples"], CONTEXT)[0],), {})
        stages = split(self._build, layout=job["layout"], example=example)
        self.pipe = Pipeline(stages, schedule, loss_fn=loss_of, share_losses=True)
        self._optimizer = Optimizer(self.pipe, torch.optim.AdamW, lr=LEARNING_RATE, betas=(0.9, 0.95), max_norm=1.0)
        self._rate = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
        self._state: dict[str, Any] = {"optimizer": self._optimizer, "scheduler": self._rate}
        self._losses: list[float] = []

    def run(self) -> bool:
        """Train up to the last step, or until a signal comes; returns whether the gradients were right."""
        extra: dict[str, Any] = {"losses": self._losses}
        first = load(self.pipe, self._folder, **self._state, extra=extra) if self._folder.is_dir() else 0
        self._losses = extra["losses"]
        self._report(
            "start",
            parameters=sum(weight.numel() for weight in self._build().parameters()),
            tokens=self._size * CONTEXT,
            first=first,
            losses=self._losses,
        )
        recorded_from = max(first + 1, self._steps - RECORDED)
        with stop_on_signal(self.pipe) as stop:
            for number in range(first, min(recorded_from, self._steps)):
                self._step(number)
                if number == 0 and not self._gradients_are_right():
                    return False
                self._update()
                if stop.requested():
                    self._save(number + 1)
                    self._report("stopped", step=number + 1)
                    return True
                if (number + 1) % SAVED_EVERY == 0:
                    self._save(number + 1, wait=False)
            if recorded_from < self._steps:
                self._record(recorded_from)
        self._save(self._steps)
        return True

    def _step(self, number: int) -> None:
        self._optimizer.zero_grad()
        tokens, target = self._text.batch(number, self._size, CONTEXT)
        before, begin = self.pipe.statistics, time.perf_counter()
        self.pipe.step(*([tokens] if self.pipe.has_first else []), target=target, return_outputs=False)
        assert self.pipe.loss is not None  # it is shared
        loss, seconds = self.pipe.loss.item(), time.perf_counter() - begin
        self._losses.append(loss)
        bubble = self.pipe.statistics.since(before).bubble
        self._report("step", step=number + 1, loss=loss, seconds=seconds, bubble=bubble)

    def _update(self) -> None:
        self._optimizer.step()
        self._rate.step()

    def _gradients_are_right(self) -> bool:
        return compare_gradients(self.pipe, self._build(), *self._text.batch(0, self._size, CONTEXT))

    def _save(self, step: int, *, wait: bool = True) -> None:
        save(self.pipe, self._folder, step=step, **self._state, extra={"losses": self._losses}, keep=1, wait=wait)

    def _record(self, first: int) -> None:
        """Record the last steps, and measure the memory of one more, which is not recorded."""
        with self.pipe.recording() as record:
            for number in range(first, self._steps):
                self._step(number)
                self._update()
        memory = self._measure_memory()
        if self.pipe.has_last:
            self._report_recorded(record, memory)

    def _measure_memory(self) -> list[float]:
        """Return the bytes of each rank: the static ones, and the most that the graph of a step holds."""
        held = HeldMemory(self.pipe.parameters())
        tokens, target = self._text.batch(self._steps, self._size, CONTEXT)
        with held.watching():
            self.pipe.step(*([tokens] if self.pipe.has_first else []), target=target, return_outputs=False)
        self._optimizer.zero_grad()
        static = sum(static_bytes(stage.module, optimizer_state=2.0) for stage in self.pipe.stages.values())
        total = torch.zeros(self.pipe.schedule.ranks, dtype=torch.float64)
        total[self.pipe.rank] = static + held.peak
        dist.all_reduce(total)
        found: list[float] = total.tolist()
        return found

    def _report_recorded(self, record: Recording, memory: list[float]) -> None:
        path = self._folder.parent / "measured.json"
        write_timeline(record.timeline(), path)
        self._report(
            "recorded",
            timeline=str(path),
            memory=memory,
            steps=len(record.steps),
            makespan=record.makespan,
            busy=record.busy,
            idle=record.idle,
            ends=record.ends,
        )

    def _report(self, event: str, **facts: Any) -> None:
        """Write an event, on the rank that has the losses."""
        if self.pipe.has_last:
            report(event, **facts)
