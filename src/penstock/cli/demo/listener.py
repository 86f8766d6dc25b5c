"""Reads what the ranks of the demo write, and shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

#: The number of lines that report losses if there is no terminal for a progress bar.
REPORTS: Final = 10


class Listener:
    """Reads events of the ranks, and shows them.

    Attributes:
        losses: the loss of every step, those before a checkpoint included.
        profiled: what the layers cost.
        recorded: what was measured in the last steps.
        stopped_at: the step after which a signal ended the training.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._tokens = 0
        self._seconds = 0.0
        self._timed = 0
        self._first = 0
        self._gradients: dict[str, Any] | None = None
        self._bar: Progress | None = None
        self.losses: list[float] = []
        self.profiled: dict[str, Any] | None = None
        self.recorded: dict[str, Any] | None = None
        self.stopped_at: int | None = None

    @property
    def gradients_are_right(self) -> bool | None:
        """Whether the gradients match; None if they have not been compared."""
        return None if self._gradients is None else self._gradients["right"]

    @property
    def is_complete(self) -> bool:
        """Whether all steps have been trained."""
        return len(self.losses) >= self._steps and self.gradients_are_right is not False

    @property
    def facts(self) -> dict[str, Any]:
        """The results, as in JSON."""
        return {"losses": self.losses, "gradients": self._gradients, "tokens_per_second": self.rate}

    @property
    def rate(self) -> float | None:
        """Tokens per second, without the first step, which negotiates shapes."""
        return self._tokens * self._timed / self._seconds if self._seconds else None

    @property
    def first(self) -> int:
        """How many steps the checkpoint had."""
        return self._first

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Say what is going on until an event says more."""
        if not self._console.is_terminal:
            self._print(text)
            yield
            return
        with Progress(
            TextColumn("{task.description}"), console=self._console, auto_refresh=False, transient=True
        ) as bar:
            self._bar = bar
            bar.add_task(text)
            bar.refresh()
            yield
        self._bar = None

    @contextmanager
    def progress_bar(self) -> Iterator[None]:
        """Show a progress bar if the output is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}"),
        )
        # Redrawn on events: a refresh thread would be forked into the ranks.
        with Progress(*columns, console=self._console, auto_refresh=False, expand=True) as self._bar:
            self._bar.add_task("", total=self._steps, summary="starting")
            self._bar.refresh()
            yield

    def end_line(self) -> None:
        """Leave the progress bar as it is, so that messages are below it."""
        if self._bar is not None:
            self._bar.stop()

    def on_line(self, rank: int, is_error: bool, line: str) -> None:
        """Handle a line of a rank: an event, or other output."""
        event = None if is_error or not line.startswith("{") else json.loads(line)
        if event is None:
            Console(stderr=True, highlight=False).print(Text(f"rank {rank}: {line}"), soft_wrap=True)
            return
        handlers = {
            "profiling": self._profiling,
            "profiled": self._profiled,
            "start": self._start,
            "gradients": self._compared,
            "step": self._step,
            "stopped": self._stopped,
            "recorded": self._recorded,
        }
        handlers[event.pop("event")](event)

    def _profiling(self, facts: dict[str, Any]) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=f"profiling {facts['line']}")
            self._bar.refresh()

    def _profiled(self, facts: dict[str, Any]) -> None:
        self.profiled = facts
        self._print(facts["table"] + "\n")

    def _start(self, facts: dict[str, Any]) -> None:
        self._tokens, self._first, self.losses = facts["tokens"], facts["first"], facts["losses"]
        self._print(f"a GPT of {facts['parameters']:,} parameters, {facts['tokens']:,} bytes of Python in a step")
        if self._first:
            self._print(f"resumed after step {self._first}, loss {self.losses[-1]:.3f}")
        if self._first >= self._steps:
            self._print(f"the checkpoint has {self._first} steps already; --steps {2 * self._first} trains on")

    def _compared(self, facts: dict[str, Any]) -> None:
        self._gradients = facts
        verdict = "match the unsplit model" if facts["right"] else "do not match the unsplit model"
        self._print(
            f"gradients of the first step {verdict}: largest difference {facts['difference']:.1e}, "
            f"largest gradient {facts['largest']:.1e}"
        )

    def _step(self, facts: dict[str, Any]) -> None:
        self.losses.append(facts["loss"])
        number, last = facts["step"], facts["step"] == self._steps
        if number > self._first + 1:  # the first step includes negotiating shapes
            self._seconds += facts["seconds"]
            self._timed += 1
        if self._bar is not None:
            rate = f"{self._tokens / facts['seconds']:,.0f} tokens/s"
            summary = f"loss {facts['loss']:.3f}  {rate}  bubble {facts['bubble']:.0%}"
            self._bar.update(self._bar.task_ids[0], completed=number, summary=summary)
            self._bar.refresh()
        elif number == self._first + 1 or last or number % max(1, self._steps // REPORTS) == 0:
            self._print(f"step {number} loss {facts['loss']:.3f}")

    def _stopped(self, facts: dict[str, Any]) -> None:
        self.stopped_at = facts["step"]

    def _recorded(self, facts: dict[str, Any]) -> None:
        self.recorded = facts

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
