"""Shows how far a training run is: one line, rewritten in a terminal, or written now and then to a log."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Final, NamedTuple, Self

from rich.cells import cell_len, set_cell_size

from penstock.errors import StageError

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline
    from penstock.runtime.statistics import Statistics

#: Seconds between two lines in a terminal.
_REDRAWN_EVERY: Final = 0.1
#: Rates are those of the last seconds.
_WINDOW: Final = 30.0
#: The width of a terminal that does not say it.
_DEFAULT_WIDTH: Final = 80
_GAP: Final = "  "


class _Sample(NamedTuple):
    """What is known at a step."""

    time: float
    step: int
    tokens: float
    statistics: Statistics


class ProgressLine:
    """Shows step, loss, tokens per second, bubble and the time that is left, on one rank.

    In a terminal it is one line, rewritten; anywhere else, e.g. in a log, a line every ten seconds. Every rank may make
    one and call it: the rank of the last stage, which has the loss, writes. The bubble is that of this rank; rates and
    the bubble are those of the last half minute.

    >>> import sys
    >>> import torch, penstock as ps
    >>> from penstock.runtime import Pipeline
    >>> schedule, loss_fn = ps.build("GPipe", ranks=1, microbatches=2), torch.nn.functional.mse_loss
    >>> pipe = Pipeline({0: torch.nn.Linear(4, 4)}, schedule, loss_fn=loss_fn)
    >>> with ps.ProgressLine(pipe, steps=2, file=sys.stdout) as line:
    ...     for step in range(2):
    ...         _ = pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    ...         line.update(step + 1, loss=0.25)
    step 1/2  loss 0.25
    step 2/2  loss 0.25...

    Args:
        pipe: the pipeline.
        steps: at which step the run ends, if that is known.
        every: how many seconds between two lines that are not in a terminal.
        rank: which rank writes; by default the one of the last stage.
        file: where to; by default the standard error.
    """

    def __init__(
        self,
        pipe: Pipeline,
        steps: int | None = None,
        *,
        every: float = 10.0,
        rank: int | None = None,
        file: IO[str] | None = None,
    ) -> None:
        ranks = pipe.transport.ranks
        if rank is not None and not 0 <= rank < ranks:
            raise StageError(f"rank must be one of the {ranks} ranks of this pipeline (0 to {ranks - 1}), not {rank}")
        writes = pipe.has_last if rank is None else pipe.rank == rank
        self._pipe = pipe
        self._steps = steps
        self._writes = writes
        self._file = file or sys.stderr
        self._is_terminal = self._file.isatty()
        self._every = _REDRAWN_EVERY if self._is_terminal else every
        self._tokens = 0.0
        self._latest: _Sample | None = None
        self._written: _Sample | None = None
        self._parts: dict[str, object] = {}
        self._samples: deque[_Sample] = deque()
        self._is_open = False

    def update(self, step: int, *, tokens: float = 0, **values: object) -> None:
        """Note that a step is done, and show it if it is time to.

        Args:
            step: how many steps are done.
            tokens: how many tokens this step has trained on.
            **values: what to show, in this order, e.g. ``loss=pipe.loss``; None is left out. A tensor is only read if
                it is shown.
        """
        if not self._writes:
            return
        self._tokens += tokens
        self._parts = values
        self._latest = now = _Sample(time.monotonic(), step, self._tokens, self._pipe.statistics)
        if self._written is None or now.time - self._written.time >= self._every or step == self._steps:
            self._write(now)

    def close(self) -> None:
        """Show the last step, and end the line."""
        if self._latest is not None and self._latest is not self._written:
            self._write(self._latest)
        if self._is_open:
            self._is_open = False
            self._file.write("\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, now: _Sample) -> None:
        self._written = now
        self._samples.append(now)
        while len(self._samples) > 2 and self._samples[1].time < now.time - _WINDOW:
            self._samples.popleft()
        if self._is_terminal:
            self._is_open = True
            # The last column stays free: some terminals go to the next line when it is written.
            width = (os.get_terminal_size(self._file.fileno()).columns or _DEFAULT_WIDTH) - 1
            self._file.write("\r" + set_cell_size(fit(self._describe(), width), width))
        else:
            self._file.write(_GAP.join(self._describe()) + "\n")
        self._file.flush()

    def _describe(self) -> list[str]:
        """Describe the present step, the most important first."""
        first, last = self._samples[0], self._samples[-1]
        seconds, steps = last.time - first.time, last.step - first.step
        parts = [f"step {last.step}" if self._steps is None else f"step {last.step}/{self._steps}"]
        parts += [f"{name} {_number(value)}" for name, value in self._parts.items() if value is not None]
        if seconds <= 0 or steps <= 0:
            return parts
        if (tokens := last.tokens - first.tokens) > 0:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        else:
            parts.append(_rate(seconds / steps))
        if self._steps is not None and last.step < self._steps:
            parts.append(f"eta {_duration((self._steps - last.step) * seconds / steps)}")
        parts.append(f"bubble {last.statistics.since(first.statistics).bubble:.0%}")
        return parts


def fit(parts: list[str], width: int) -> str:
    """Join as many parts as fit into a line, and cut off the first if it does not.

    >>> fit(["step 10", "loss 2.5", "bubble 12%"], 20), fit(["step 10"], 4)
    ('step 10  loss 2.5', 'step')
    """
    line = parts[0]
    for part in parts[1:]:
        if cell_len(line) + cell_len(_GAP + part) <= width:
            line += _GAP + part
    return line if cell_len(line) <= width else set_cell_size(line, width)


def _number(value: object) -> str:
    """Write a number, or a tensor of one, briefly.

    >>> _number(2.34567), _number(3e-5), _number(12), _number("warm-up")
    ('2.346', '3e-05', '12', 'warm-up')
    """
    read = getattr(value, "item", None)
    value = value if read is None else read()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rate(seconds: float) -> str:
    """Write how fast steps are.

    >>> _rate(0.25), _rate(4)
    ('4.0 steps/s', '4.0 s/step')
    """
    return f"{1 / seconds:.1f} steps/s" if seconds < 1 else f"{seconds:.1f} s/step"


def _duration(seconds: float) -> str:
    """Write a time.

    >>> _duration(42), _duration(754), _duration(7 * 3600 + 240), _duration(3 * 86400 + 5 * 3600)
    ('42s', '12:34', '7:04:00', '3d 5h')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minutes}:{second:02}" if minutes else f"{second}s"
