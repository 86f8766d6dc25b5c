"""Measures how long a save delays training: in the background, and while training waits for it.

Two ranks with a core each train a transformer whose parameters and AdamW's state are 200 MB per rank. They run windows
of some steps: without a save, with one in the background that begins with the window, and with one that is waited for,
in a new random order in each round. What a window takes longer than the one of its round without a save is the delay.
It counts on the slowest rank, with everything: the copy that is made first, and what the thread that writes takes from
training, whose core it shares. The window is long enough for the save to end in it.
"""

from __future__ import annotations

import gc
import resource
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import penstock as ps
from goals import Goal, finish, parser_of
from penstock.runtime import Pipeline
from runtime_parts.models import Block
from runtime_parts.processes import on_ranks
from runtime_parts.racing import Spread

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, MICROBATCHES = 2, 8
PLAIN, BACKGROUND, WAITED = "no save", "in the background", "waited for"
#: The goal: at most this share of a step per save in the background.
LIMIT = 0.05


@dataclass
class Windows:
    """What windows of one kind took on one rank, in seconds, window by window.

    Attributes:
        wall: the window.
        call: the call of ``save`` in it.
        complete: from that call until the checkpoint was complete.
        processor: the processor time of the process.
    """

    wall: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    complete: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


class Stage(nn.Module):
    """Transformer blocks with names of their own."""

    def __init__(self, number: int, blocks: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.number = number
        self.add_module(f"stage{number}", nn.Sequential(*(Block(width) for _ in range(blocks))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        return self.get_submodule(f"stage{self.number}")(x)  # type: ignore[no-any-return]


class Training:
    """The training of one rank."""

    def __init__(self, rank: int, blocks: int, width: int, length: int, folder: Path) -> None:
        schedule = ps.build("1F1B", ranks=RANKS, microbatches=MICROBATCHES)
        self.pipe = Pipeline({rank: Stage(rank, blocks, width)}, schedule, loss_fn=functional.mse_loss)
        self.optimizer = ps.Optimizer(self.pipe, torch.optim.AdamW, lr=1e-4)
        self.batch = torch.randn(MICROBATCHES, length, width)
        self.folder, self.saves = folder, 0

    def step(self) -> None:
        """Train a step."""
        self.pipe.step(self.batch, target=self.batch, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, *, wait: bool) -> Any:
        """Save, and keep only the last checkpoint."""
        self.saves += 1
        return ps.save(self.pipe, self.folder, step=self.saves, optimizer=self.optimizer, keep=1, wait=wait)

    def window(self, kind: str, steps: int, windows: Windows) -> None:
        """Time a window."""
        gc.collect()
        dist.barrier()
        usage, begin, saving, completed = _processor_time(), time.perf_counter(), None, None
        if kind != PLAIN:
            saving = self.save(wait=kind == WAITED)
            windows.call.append(time.perf_counter() - begin)
        for _ in range(steps):
            self.step()
            if saving is not None and saving.done and completed is None:
                completed = time.perf_counter() - begin
        windows.wall.append(time.perf_counter() - begin)
        if saving is not None:
            saving.wait()
            windows.complete.append(completed or time.perf_counter() - begin)
        windows.processor.append(_processor_time() - usage)


def measure(
    rank: int, tell: Callable[[str], None], size: tuple[int, int, int], rounds: int, steps: int, folder: str
) -> tuple[dict[str, Windows], list[float], int]:
    """Run the windows on one rank; returns them, how long steps take, and the bytes of the state."""
    training = Training(rank, *size, Path(folder))
    kinds = {kind: Windows() for kind in (PLAIN, BACKGROUND, WAITED)}
    for kind in kinds:
        training.window(kind, steps, Windows())
    drawn = Random(0)
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        for kind in drawn.sample(list(kinds), len(kinds)):
            training.window(kind, steps, kinds[kind])
    states = [one for state in training.optimizer.state.values() for one in state.values()]
    held = sum(one.nbytes for one in (*training.pipe.parameters(), *states))
    training.pipe.close()
    return kinds, [wall / steps for wall in kinds[PLAIN].wall], held


def _processor_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def milliseconds(seconds: list[float]) -> str:
    """Return the median and the quartiles."""
    return str(Spread.of(one * 1e3 for one in seconds))


def slowest(found: list[Any], kind: str, what: str) -> list[float]:
    """Return the longer time of the ranks, window by window."""
    return [max(both) for both in zip(*(getattr(rank[0][kind], what) for rank in found), strict=True)]


def show(found: list[Any], steps: int) -> float:
    """Print what was measured; returns the median delay by a save in the background, as a share of a step."""
    plain = slowest(found, PLAIN, "wall")
    step = Spread.of(wall / steps for wall in plain)
    print(
        f"a step takes {step.middle * 1e3:.0f} ms ({step.low * 1e3:.0f} to {step.high * 1e3:.0f}); windows of {steps}\n"
    )
    print("milliseconds: median (quartiles)")
    shares = {}
    for kind in (BACKGROUND, WAITED):
        delays = [one - other for one, other in zip(slowest(found, kind, "wall"), plain, strict=True)]
        shares[kind] = Spread.of(delay / step.middle for delay in delays)
        used = [
            one - other
            for rank in found
            for one, other in zip(rank[0][kind].processor, rank[0][PLAIN].processor, strict=True)
        ]
        print(f"\na save {kind}")
        print(f"  delays training by            {milliseconds(delays)}")
        print(f"  as a share of a step          {shares[kind]}")
        print(f"  the call takes                {milliseconds(slowest(found, kind, 'call'))}")
        print(f"  it is complete after at most  {milliseconds(slowest(found, kind, 'complete'))}")
        print(f"  processor time on a rank      {milliseconds(used)}")
    return shares[BACKGROUND].middle


def main() -> None:
    """Measure and print; exit with 1 if the goal is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=6, help="transformer blocks per rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=112, help="tokens of a microbatch")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="of a window")
    parser.add_argument("--folder", type=Path, help="where to save; by default a temporary folder")
    given = parser.parse_args()
    folder = tempfile.mkdtemp(dir=given.folder)
    try:
        size = (given.blocks, given.width, given.length)
        found = on_ranks(RANKS, measure, size, given.rounds, given.steps, folder)
    finally:
        shutil.rmtree(folder)
    print(
        f"{RANKS} ranks, {given.blocks} blocks of width {given.width} each, {MICROBATCHES} microbatches of "
        f"{given.length} tokens; the state is {found[0][2] / 1e6:.0f} MB per rank"
    )
    share = show(found, given.steps)
    finish([Goal("delay by a save in the background, as a share of a step", share, LIMIT)], given.goals)


if __name__ == "__main__":
    main()
