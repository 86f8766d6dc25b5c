"""(c) Measures the two halves of a backward against a full one."""

from __future__ import annotations

import gc
from collections import defaultdict
from statistics import median
from time import thread_time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from goals import Goal
from penstock.execution.split_backward.split import SplitBackward
from penstock.graph.heap import keep_all_freed_memory
from runtime_parts.models import transformer
from runtime_parts.processes import on_ranks
from runtime_parts.racing import Spread, ratios
from runtime_parts.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Way = Callable[[nn.Module, torch.Tensor, torch.Tensor], "Halves"]

AT_MOST = {256: 1.05, 32: 1.3}
BLOCKS = (6, 48)
#: Rows and length of a microbatch. Only the first has enough compute at every width; with the second, at width 32,
#: torch's halves cost several times a full backward.
MICROBATCHES = ((4, 128), (1, 32))
JUDGED = {(256, MICROBATCHES[0]), (32, MICROBATCHES[0]), (32, MICROBATCHES[1])}
#: The ratio with many blocks over that with few: more than this is growth, less is noise.
GROWTH = 1.1
#: Seconds.
SHORTEST_TURN = 0.2


class Size(NamedTuple):
    """A stage and its microbatch."""

    width: int
    blocks: int
    rows: int
    length: int

    def __str__(self) -> str:
        return f"width {self.width}, {self.blocks} blocks, {self.rows} x {self.length}"


class Halves(NamedTuple):
    """Seconds of the forward, and of I and W or of a full backward."""

    forward: float
    first: float
    second: float

    @property
    def backward(self) -> float:
        """Both halves."""
        return self.first + self.second


class Turn(NamedTuple):
    """A way to split, and the full backwards between."""

    way: Halves
    whole: Halves

    @property
    def backward(self) -> float:
        """The ratio of the split backward to the full one."""
        return self.way.backward / self.whole.backward

    @property
    def all(self) -> float:
        """The same ratio including the forwards."""
        return (self.way.forward + self.way.backward) / (self.whole.forward + self.whole.backward)


def report(*, repeats: int, quick: bool, ways: dict[str, Callable[[], Way]] | None = None) -> Report:
    """Measure CPU time of I + W over that of a full backward: torch's, the simple way, ours.

    By default, the ways are those without a stage around them.
    """
    sizes = [
        Size(width, blocks, *microbatch)
        for microbatch in MICROBATCHES
        for width in AT_MOST
        for blocks in BLOCKS
        if not quick or (width, blocks) != (256, 48)
    ]
    (found,) = on_ranks(1, measure, repeats, sizes, ways or {})
    made = Report(
        "c",
        f"I + W of transformer blocks over a whole backward, CPU time, one thread, median of {repeats}",
        [
            "whole: milliseconds of a whole backward; gradients are added to those that are there, as in a step",
            "plain: as in the loop, the gradient of the input with the graph retained, then a backward for the weights",
            *(["bare: ours over a whole backward with no stage around it"] if "bare" in (ways or {}) else []),
            "all: forward + I + W over forward + whole backward",
            "a way alternates with whole backwards, call by call, so each finds the caches as the other left them;",
            "then the next way has its turn; ratios turn by turn, with quartiles",
        ],
    )
    for size in sizes:
        _row(made, size, found[size])
    for width, microbatch in sorted(JUDGED):
        _growth(made, width, microbatch, found)
    return made


def measure(
    _rank: int, tell: Callable[[str], None], repeats: int, sizes: list[Size], makers: dict[str, Callable[[], Way]]
) -> dict[Size, dict[str, list[Turn]]]:
    """In one process."""
    found = {}
    for size in sizes:
        tell(f"(c) {size}")
        stage = transformer(size.blocks, size.width, size.rows, size.length).stage(0, 1)
        x = torch.randn(size.rows, size.length, size.width)
        ways = {name: make() for name, make in (_BARE | makers).items()}
        _same(ways, stage, x)
        reference = ways.pop("whole")
        count = max(2, int(SHORTEST_TURN / max(1e-4, reference(stage, x, x).backward)))
        turns: dict[str, list[Turn]] = defaultdict(list)
        gc.collect()
        gc.freeze()  # exclude existing objects from garbage collection
        for _ in range(repeats):
            for name, way in ways.items():
                gc.collect()
                turns[name].append(_turn(way, reference, stage, x, count))
        gc.unfreeze()
        found[size] = dict(turns)
    return found


def _turn(way: Way, reference: Way, stage: nn.Module, x: torch.Tensor, count: int) -> Turn:
    """Alternate a way with the reference, also alternating which goes first; return the means."""
    way(stage, x, x)
    several: tuple[list[Halves], list[Halves]] = ([], [])
    for number in range(count):
        for which in (number % 2, 1 - number % 2):
            several[which].append((way, reference)[which](stage, x, x))
    return Turn(*(Halves(*(sum(parts) / count for parts in zip(*each, strict=True))) for each in several))


def whole(stage: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Halves:
    """In one."""
    x = x.detach().requires_grad_()
    begin = thread_time()
    y = stage(x)
    forwarded = thread_time()
    torch.autograd.backward(y, gradient)
    del y  # each way ends when the graph is freed
    return Halves(forwarded - begin, thread_time() - forwarded, 0)


def plain(stage: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Halves:
    """As in the loop."""
    x = x.detach().requires_grad_()
    weights = tuple(stage.parameters())
    begin = thread_time()
    y = stage(x)
    forwarded = thread_time()
    torch.autograd.grad(y, x, gradient, retain_graph=True)
    halfway = thread_time()
    torch.autograd.backward(y, gradient, inputs=weights)
    del y
    return Halves(forwarded - begin, halfway - forwarded, thread_time() - halfway)


def torch_halves(stage: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Halves:
    """Torch's."""
    x = x.detach().requires_grad_()
    begin = thread_time()
    y = stage(x)
    forwarded = thread_time()
    _, groups = stage_backward_input([y], [gradient], [x], stage.parameters())
    halfway = thread_time()
    stage_backward_weight(stage.parameters(), groups)
    del y, groups
    return Halves(forwarded - begin, halfway - forwarded, thread_time() - halfway)


class OurHalves:
    """Ours, for one stage."""

    def __init__(self) -> None:
        self.split = SplitBackward(adds_in_place=True)
        keep_all_freed_memory()  # as stages do

    def __call__(self, stage: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Halves:
        """Run one microbatch."""
        x = x.detach().requires_grad_()
        begin = thread_time()
        y = stage(x)
        forwarded = thread_time()
        root = get_gradient_edge(y)
        del y
        _, weight_backward = self.split.input_backward([root], [gradient], [x])
        del root
        halfway = thread_time()
        weight_backward()
        return Halves(forwarded - begin, halfway - forwarded, thread_time() - halfway)


def bare() -> Way:
    """Return the full backward without a stage around it."""
    return whole


_BARE: dict[str, Callable[[], Way]] = {
    "whole": bare,
    "plain": lambda: plain,
    "torch": lambda: torch_halves,
    "ours": OurHalves,
}


def _same(ways: dict[str, Way], stage: nn.Module, x: torch.Tensor) -> None:
    """Raise if a way gives different gradients; this also runs each once."""
    expected: list[torch.Tensor] = []
    for name, way in ways.items():
        stage.zero_grad(set_to_none=True)
        way(stage, x, x)
        gradients = [parameter.grad for parameter in stage.parameters()]
        expected = expected or gradients
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-2, msg=lambda text, at=name: f"{at}: {text}")


def _ratio(turns: list[Turn]) -> Spread:
    return Spread.of(turn.backward for turn in turns)


def _row(made: Report, size: Size, turns: dict[str, list[Turn]]) -> None:
    ours = _ratio(turns["ours"])
    judged = (size.width, (size.rows, size.length)) in JUDGED
    made.rows.append(
        {
            "stage and microbatch": str(size),
            "whole": median(turn.whole.backward for turn in turns["ours"]) * 1e3,
            "torch": _ratio(turns["torch"]),
            "plain": _ratio(turns["plain"]),
            "ours": ours,
            "goal": AT_MOST[size.width] if judged else None,
            **({"bare": _over(turns["ours"], turns["bare"])} if "bare" in turns else {}),
            "ours/torch": _over(turns["ours"], turns["torch"]),
            "torch all": Spread.of(turn.all for turn in turns["torch"]),
            "ours all": Spread.of(turn.all for turn in turns["ours"]),
        }
    )
    if judged:
        made.goals.append(Goal(f"I + W of a whole backward, {size}", ours.middle, AT_MOST[size.width]))


def _over(ones: list[Turn], others: list[Turn]) -> Spread:
    """Return the ratio of two ways, each measured against full backwards."""
    return ratios([turn.backward for turn in ones], [turn.backward for turn in others])


def _growth(made: Report, width: int, microbatch: tuple[int, int], found: dict[Size, dict[str, list[Turn]]]) -> None:
    few, many = (Size(width, blocks, *microbatch) for blocks in BLOCKS)
    if few in found and many in found:
        price = [_ratio(found[size]["ours"]).middle for size in (few, many)]
        made.goals.append(Goal(f"growth from {few} to {many.blocks} blocks", price[1] / price[0], GROWTH))
