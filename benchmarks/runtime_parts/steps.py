"""(b) Measures the step time of a transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from goals import Goal
from runtime_parts.contestants import (
    SCHEDULES,
    SPLITTING,
    ZERO_BUBBLE,
    Alone,
    AloneInHalves,
    AloneInTorchHalves,
    Case,
    Kind,
    Loop,
    Penstock,
    Torch,
    same_gradients,
)
from runtime_parts.models import Model, transformer
from runtime_parts.processes import on_sides
from runtime_parts.racing import Spread, Turns, race, ratios
from runtime_parts.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime_parts.processes import Side

RANKS = 2
#: The contestants in the processes of torch's side.
THEIRS = ("torch", "loop", "in torch's halves")
NEVER_ABOVE = 1.0
OF_COMPUTE = 1.05
OF_ZERO_BUBBLE = 0.65


class Size(NamedTuple):
    """A model of 8 layers and its batch."""

    name: str
    width: int
    rows: int
    length: int
    microbatches: int
    schedules: tuple[str, ...]
    #: A factor for the number of repeats: short steps are noisier.
    often: int = 1

    @property
    def model(self) -> Model:
        """The transformer, with its microbatches."""
        return transformer(8, self.width, self.rows // self.microbatches, self.length)


SMALL = Size("small", 256, 32, 128, 8, SCHEDULES, often=6)
MIDDLE = Size("mid-size", 64, 32, 128, 16, SCHEDULES, often=8)
#: The size where torch's ZBV takes more than twice the compute of the ranks, which the zero-bubble goal is about.
SHORT = Size("mid-size, short", 64, 16, 32, 16, SCHEDULES, often=24)


def report(*, repeats: int, quick: bool, ours: Kind = Penstock) -> Report:
    """Measure the wall time of a step: torch's, ours, and that of compute without communication."""
    sizes = [SMALL, MIDDLE, SHORT]
    if quick:
        sizes = [size._replace(schedules=("1F1B", "ZBVZeroBubble")) for size in sizes]
    found = on_sides(2, RANKS, measure, repeats, sizes, ours)
    made = Report(
        "b",
        f"milliseconds of a step, {RANKS} ranks, 8 transformer blocks, median of {repeats * SMALL.often}; of width "
        f"64 of {repeats * MIDDLE.often}, and of {repeats * SHORT.often} with a short sequence",
        [
            "the slower rank's wall time; ratios turn by turn, with quartiles",
            "torch and the loop run in separate processes, in turn with ours and compute alone: ours makes the heap",
            "keep freed memory, from which everything in the same process benefits",
            "alone: forwards and whole backwards of the rank in the order of the schedule, nothing sent or received,",
            "both ranks at once, the slower of the two; in halves: the same with I and W, where the schedule has them,",
            "so it includes the cost of splitting, see (c); torch's halves are its own. The goal for",
            "ZBV is relative to whole backwards: the cost of splitting counts",
            "a microbatch: rows x length of the sequence; the mid-size model with a long one is bound by its compute",
            "DualPipeV is not a zero-bubble schedule and splits few backwards (torch takes 1.3 to 1.7 of compute alone",
            "with a short sequence, not 2.2), so its goal is 1.0, as for other schedules",
            "the loop computes twice what I and W need, and is omitted where that takes long",
            "CPU: time of the main threads of both ranks, which depends less on the load of the machine",
        ],
    )
    for size in sizes:
        for name in size.schedules:
            case = size.name, name
            _row(made, size, name, [one[case] | other[case] for one, other in zip(*found, strict=True)])
    return made


def measure(
    rank: int, tell: Callable[[str], None], side: Side, repeats: int, sizes: list[Size], ours: Kind
) -> dict[tuple[str, str], dict[str, Turns]]:
    """Run on one rank of torch's side or of ours."""
    found = {}
    for size in sizes:
        for name in size.schedules:
            tell(f"(b) {size.name}, {name}")
            case = Case(name, size.microbatches, size.model, rank)
            kinds = _kinds(size, name, ours)
            contestants = {who: kind(case) for who, kind in kinds.items() if (who in THEIRS) == (side.number == 0)}
            if "ours" in contestants:
                same_gradients(Torch(case), contestants["ours"])
            turns = race(contestants, repeats=repeats * size.often, steps=1, names=list(kinds), side=side)
            found[size.name, name] = turns
    return found


def _kinds(size: Size, name: str, ours: Kind) -> dict[str, Kind]:
    """Who takes part."""
    kinds: dict[str, Kind] = {"torch": Torch, "ours": ours, "alone": Alone}
    if size.width != SMALL.width:
        kinds["loop"] = Loop
    if name in SPLITTING:
        kinds["in halves"] = AloneInHalves
        kinds["in torch's halves"] = AloneInTorchHalves
    return kinds


def _row(made: Report, size: Size, name: str, ranks: list[dict[str, Turns]]) -> None:
    wall, thread = (
        {
            who: [
                combine(figures) * 1e3 for figures in zip(*(getattr(turns[who], clock) for turns in ranks), strict=True)
            ]
            for who in ranks[0]
        }
        for clock, combine in (("wall", max), ("thread", sum))
    )
    of_torch, of_alone = ratios(wall["ours"], wall["torch"]), ratios(wall["ours"], wall["alone"])
    in_torch_halves, in_halves = (
        ratios(wall[who], wall[alone]) if alone in wall else None
        for who, alone in (("torch", "in torch's halves"), ("ours", "in halves"))
    )
    limit = OF_ZERO_BUBBLE if size.name == SHORT.name and name in ZERO_BUBBLE else NEVER_ABOVE
    tokens = f"{size.rows // size.microbatches} x {size.length}"
    made.rows.append(
        {
            "schedule": f"width {size.width}, {size.microbatches} microbatches of {tokens}, {name}",
            "torch": Spread.of(wall["torch"]).middle,
            "loop": Spread.of(wall["loop"]).middle if "loop" in wall else None,
            "ours": Spread.of(wall["ours"]).middle,
            "alone": Spread.of(wall["alone"]).middle,
            "ours/torch": of_torch,
            "goal": limit,
            "torch/alone": ratios(wall["torch"], wall["alone"]),
            "ours/alone": of_alone,
            "torch/in its halves": in_torch_halves,
            "ours/in halves": in_halves,
            "CPU ours/torch": ratios(thread["ours"], thread["torch"]),
            "CPU ours/alone": ratios(thread["ours"], thread["alone"]),
        }
    )
    made.goals.append(Goal(f"{size.name}, {name}, step time of torch's", of_torch.middle, limit))
    if size.name == SMALL.name and name == "ZBVZeroBubble":
        made.goals.append(Goal(f"{size.name}, {name}, step time of compute alone", of_alone.middle, OF_COMPUTE))
