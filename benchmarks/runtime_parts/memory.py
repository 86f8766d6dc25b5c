"""(d) Measures the memory that a step holds, and what it leaves."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

import penstock as ps
from goals import Goal
from penstock.execution.split_backward.split import SplitBackward
from runtime_parts.allocations import Block, Trace, between, freed, level, mark, peak, traced
from runtime_parts.contestants import SCHEDULES, SINGLE, Case, Contestant, Kind, Loop, Penstock, Torch, clear
from runtime_parts.models import Model, linear, transformer
from runtime_parts.processes import on_ranks
from runtime_parts.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    #: Runs F, I and W of a stage, with the marks F and I between them.
    Way = Callable[[nn.Module, torch.Tensor], None]

RANKS = 2
FEW, MANY = 8, 32
OF_TORCH = 0.65
FREED_AFTER_INPUT = 0.35
STEPS = 4
#: Schedules that need what all microbatches received for the backward, or almost none of it.
HOLDING_ALL = (*SINGLE, "LoopedBFS")
CONTESTANTS: dict[str, Kind] = {"torch": Torch, "loop": Loop, "ours": Penstock}
#: A size that no other tensor of the model has.
MARKED = 1009
RECEIVED = "received "


class Marked(nn.Module):
    """A linear layer that keeps one more tensor, of a unique size, for the gradient of a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.table = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        kept = torch.zeros(MARKED, dtype=torch.int64)
        return self.linear(x) + functional.embedding(kept, self.table).mean()


def marked() -> Model:
    """Stages whose live activations can be counted."""
    return Model("marked", lambda _index, _stages: Marked(8), (2, 8))


class Held(NamedTuple):
    """The memory of one contestant on one rank: bytes, except for the last."""

    peak: int
    kept: int
    buffers: int


class Left(NamedTuple):
    """What several steps leave: additional tensors, and objects that only the garbage collector can free."""

    tensors: int
    collected: int


Found = dict[tuple[str, str, str], Any]


def report(*, repeats: int, quick: bool, ours: Kind = Penstock, our_halves: Way | None = None) -> Report:  # noqa: ARG001
    """Measure peaks, buffers, live activations and leftovers: torch's, the loop's, ours."""
    schedules = ("1F1B", "ZBVZeroBubble") if quick else SCHEDULES
    found = on_ranks(RANKS, measure, schedules, ours)
    (halves,) = on_ranks(1, measure_halves, our_halves or _our_halves)
    made = Report(
        "d",
        f"memory, {RANKS} ranks",
        [
            "bytes are those of the blocks that torch's allocator allocates and frees, as its profiler reports them,",
            "from before the pipeline is created: what is kept between steps counts. Includes gradients, not weights",
            "LoopedBFS runs all forwards first: with blocks, its own activations are almost all of the memory",
            "receive buffers: the most blocks in use at a time that were received into, on the rank with the most",
        ],
    )
    for name in schedules:
        _peaks(made, name, found)
    for name in schedules:
        _buffers(made, name, found)
    for name in schedules:
        _live(made, name, found)
    for name in schedules:
        _left(made, name, found)
    _halves(made, halves)
    return made


def measure(rank: int, tell: Callable[[str], None], schedules: tuple[str, ...], ours: Kind) -> Found:
    """On one rank."""
    found: Found = {}
    blocks = transformer(4, 64, 2, 64)
    for name in schedules:
        tell(f"(d) {name}")
        for who, kind in (CONTESTANTS | {"ours": ours}).items():
            for model, of in ((blocks, "blocks"), (linear(64, 32), "linear")):
                found[name, who, of] = held(kind, Case(name, MANY, model, rank))
            found[name, who, "few"] = held(kind, Case(name, FEW, linear(64, 32), rank))
            found[name, who, "live"] = live(kind, Case(name, MANY, marked(), rank))
            found[name, who, "left"] = left(kind, Case(name, FEW, linear(), rank))
    return found


def held(kind: Callable[[Case], Contestant], case: Case) -> Held:
    """Return the peak bytes of the third step, the bytes before it, and the most blocks that were received into."""
    trace: Trace = []
    assert len(case.batch)  # before the trace begins: it belongs to the user
    gc.collect()
    dist.barrier()
    with traced(trace), receives():
        contestant = kind(case)
        own = sum(parameter.nbytes for module in contestant.modules.values() for parameter in module.parameters())
        for _ in range(2):
            contestant.step()
            clear(contestant)
            contestant.release()
            contestant.losses = []
        mark("begin")
        contestant.step()
        mark("end")
    contestant.close()
    before = level(trace[: trace.index("begin")]) - own
    return Held(before + peak(between(trace, "begin", "end")), before, received(trace))


@contextmanager
def receives() -> Iterator[None]:
    """Mark in the trace where tensors are received, for every contestant."""
    kinds = [dist.ProcessGroup, Backend]
    originals = [vars(kind)["recv"] for kind in kinds]

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def receive(group: Any, tensors: list[torch.Tensor], *rest: Any) -> Any:
            for tensor in tensors:
                mark(f"{RECEIVED}{tensor.data_ptr()}")
            return original.__get__(group)(tensors, *rest)

        return receive

    for kind, original in zip(kinds, originals, strict=True):
        kind.recv = noting(original)
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.recv = original


def received(trace: Trace) -> int:
    """Return the most blocks in use at a time that were received into: buffers, and inputs that a backward needs."""
    now: set[int] = set()
    most = 0
    for entry in trace:
        if isinstance(entry, str) and entry.startswith(RECEIVED):
            now.add(int(entry.removeprefix(RECEIVED)))
            most = max(most, len(now))
        elif isinstance(entry, Block) and entry.size < 0:
            now.discard(entry.address)
    return most


def live(kind: Callable[[Case], Contestant], case: Case) -> tuple[float, float]:
    """Return the most activations in use at a time, and the number that the schedule implies."""
    trace: Trace = []
    contestant = kind(case)
    contestant.step()
    dist.barrier()
    with traced(trace):
        contestant.step()
    contestant.close()
    size = MARKED * torch.int64.itemsize
    return peak(trace, size) / size, ps.simulate(case.lowered, ps.Costs(activation=1)).peak_memory[case.rank]


def left(kind: Callable[[Case], Contestant], case: Case) -> Left:
    """Return what is left after some steps with the garbage collector off, and what the collector then finds."""
    contestant = kind(case)
    for _ in range(3):
        contestant.step()
        clear(contestant)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for _ in range(STEPS):
            contestant.step()
            clear(contestant)
            contestant.losses = []
        return Left(tensors() - before, gc.collect())
    finally:
        gc.enable()
        contestant.close()


def tensors() -> int:
    """How many there are."""
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def measure_halves(_rank: int, tell: Callable[[str], None], ours: Way) -> dict[str, tuple[int, int, int]]:
    """Return bytes held after F, those of them that I frees, and bytes held after I, for torch and for us."""
    tell("(d) what I gives back")
    stage = transformer(2, 64, 4, 128).stage(0, 1)
    x = torch.randn(4, 128, 64)
    return {name: _halves_of(way, stage, x) for name, way in (("torch", _torch_halves), ("ours", ours))}


def _halves_of(way: Callable[..., None], stage: nn.Module, x: torch.Tensor) -> tuple[int, int, int]:
    for _ in range(2):
        trace: Trace = []
        x = x.detach().requires_grad_()
        with traced(trace):
            mark("begin")
            way(stage, x)
            mark("end")
    forward, input_half = between(trace, "begin", "F"), between(trace, "F", "I")
    return level(forward), freed(forward, input_half), level(forward) + level(input_half)


def _torch_halves(stage: nn.Module, x: torch.Tensor) -> None:
    y = stage(x)
    mark("F")
    _, groups = stage_backward_input([y], [x.detach()], [x], stage.parameters())
    x.grad = None
    del _, y
    mark("I")
    stage_backward_weight(stage.parameters(), groups)


def _our_halves(stage: nn.Module, x: torch.Tensor) -> None:
    y = stage(x)
    root = get_gradient_edge(y)
    mark("F")
    del y
    _, weight_backward = SplitBackward(adds_in_place=True).input_backward([root], [x.detach()], [x])
    del root, _
    mark("I")
    weight_backward()


def _most(found: list[Found], name: str, of: str, what: str) -> dict[str, float]:
    return {who: max(getattr(rank[name, who, of], what) for rank in found) for who in CONTESTANTS}


def _peaks(made: Report, name: str, found: list[Found]) -> None:
    for of, text in (("blocks", "4 blocks of width 64, 2 x 64"), ("linear", "Linear(64, 64) a stage, 32 x 64")):
        peaks, kept = (_most(found, name, of, what) for what in ("peak", "kept"))
        judged = name not in SINGLE and not (name == "LoopedBFS" and of == "blocks")
        made.rows.append(
            {
                "allocation peak of a step": f"{name}, {MANY} microbatches, {text}",
                **{f"{who} KiB": value / 1024 for who, value in peaks.items()},
                "ours/torch": peaks["ours"] / peaks["torch"],
                "goal": OF_TORCH if judged else None,
                **{f"kept {who} KiB": value / 1024 for who, value in kept.items()},
            }
        )
        if judged:
            made.goals.append(
                Goal(f"{name}, allocation peak of torch's, {text}", peaks["ours"] / peaks["torch"], OF_TORCH)
            )


def _buffers(made: Report, name: str, found: list[Found]) -> None:
    few, many = (_most(found, name, of, "buffers") for of in ("few", "linear"))
    kept_few, kept_many = (_most(found, name, of, "kept") for of in ("few", "linear"))
    made.rows.append(
        {
            "receive buffers": name,
            **{f"{who}, {FEW} / {MANY} microbatches": f"{few[who]} / {many[who]}" for who in CONTESTANTS},
        }
    )
    made.goals.append(
        Goal(f"{name}, KiB kept more with {MANY} microbatches", (kept_many["ours"] - kept_few["ours"]) / 1024, 1)
    )
    if name not in HOLDING_ALL or name == "1F1B":  # the others need the inputs of all microbatches for the backward
        made.goals.append(Goal(f"{name}, receive buffers more with {MANY} microbatches", many["ours"] - few["ours"], 0))


def _live(made: Report, name: str, found: list[Found]) -> None:
    rows = {who: [rank[name, who, "live"] for rank in found] for who in CONTESTANTS}
    made.rows.append(
        {
            "live activations by rank": name,
            "schedule": " ".join(f"{said:g}" for _, said in rows["ours"]),
            **{who: " ".join(f"{seen:g}" for seen, _ in rows[who]) for who in CONTESTANTS},
        }
    )
    # Fewer is also right: where W only adds up what I computed, I releases what the schedule releases with W.
    more = max(seen - said for seen, said in rows["ours"])
    made.goals.append(Goal(f"{name}, live activations that the schedule does not count", more, 0))


def _left(made: Report, name: str, found: list[Found]) -> None:
    rows = {
        who: Left(*(max(values) for values in zip(*(rank[name, who, "left"] for rank in found), strict=True)))
        for who in CONTESTANTS
    }
    made.rows.append(
        {
            f"left of {STEPS} steps": name,
            **{f"{who} tensors": rows[who].tensors for who in rows},
            **{f"{who} objects for the collector": rows[who].collected for who in rows},
        }
    )
    made.goals += [
        Goal(f"{name}, tensors left of {STEPS} steps", rows["ours"].tensors, 0),
        Goal(f"{name}, objects of {STEPS} steps that need the collector", rows["ours"].collected, 0),
    ]


def _halves(made: Report, halves: dict[str, tuple[int, int, int]]) -> None:
    for who, (saved, given, after) in halves.items():
        made.rows.append(
            {
                "what I gives back, 2 blocks of width 64": who,
                "held after F, KiB": saved / 1024,
                "of it given back by I": given / saved,
                "goal": FREED_AFTER_INPUT if who == "ours" else None,
                "held after I, KiB": after / 1024,
                "after I / after F": after / saved,
            }
        )
    saved, given, _ = halves["ours"]
    made.goals.append(Goal("share of what F holds that I gives back", given / saved, FREED_AFTER_INPUT, at_least=True))
