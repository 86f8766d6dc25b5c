"""(a) Measures the overhead per action, with a trivial model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goals import Goal
from runtime_parts.contestants import SINGLE, Case, Kind, Loop, Penstock, Torch, same_gradients
from runtime_parts.models import linear
from runtime_parts.processes import on_ranks
from runtime_parts.racing import Spread, Turns, race, ratios
from runtime_parts.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
MICROBATCHES = (8, 16, 32, 64)
RANKS = 2
OF_TORCH = {name: 0.8 if name in SINGLE else 0.55 for name in SCHEDULES}
OF_LOOP = 1.15
MICROBATCHES_A_TURN = 64

#: By schedule and microbatches: the actions of the rank, and the turns of each contestant.
Found = dict[tuple[str, int], tuple[int, dict[str, Turns]]]


def report(*, repeats: int, quick: bool, ours: Kind = Penstock, of_loop: float | None = OF_LOOP) -> Report:
    """Measure main-thread CPU time and wall time per action: torch's, the loop's, ours."""
    microbatches = (8, 64) if quick else MICROBATCHES
    found = on_ranks(RANKS, measure, repeats, microbatches, ours)
    made = Report(
        "a",
        f"microseconds of the main thread an action, {RANKS} ranks, {linear().name} on 2 rows, median of {repeats}",
        [
            "an action is a forward, a backward or a half of it, a send or a receive of the lowered schedule;",
            "the sum of both ranks over the actions of both; wall is the slower rank's step over its actions;",
            "process: all threads of a process, including gloo's; ratios turn by turn, with quartiles",
        ],
    )
    for case in found[0]:
        _row(made, case, [rank[case] for rank in found], of_loop)
    return made


def measure(rank: int, tell: Callable[[str], None], repeats: int, microbatches: tuple[int, ...], ours: Kind) -> Found:
    """On one rank."""
    found = {}
    for name in SCHEDULES:
        for count in microbatches:
            tell(f"(a) {name}, {count} microbatches")
            case = Case(name, count, linear(), rank)
            contestants = {"torch": Torch(case), "loop": Loop(case), "ours": ours(case)}
            for other in ("loop", "ours"):
                same_gradients(contestants["torch"], contestants[other])
            turns = race(contestants, repeats=repeats, steps=max(1, MICROBATCHES_A_TURN // count))
            found[name, count] = len(case.order), turns
    return found


def _row(
    made: Report, case: tuple[str, int], ranks: list[tuple[int, dict[str, Turns]]], loop_limit: float | None
) -> None:
    name, count = case
    actions = sum(of_rank for of_rank, _ in ranks)
    thread, process, wall = (
        {
            who: [
                combine(figures) * 1e6
                for figures in zip(*(getattr(turns[who], clock) for _, turns in ranks), strict=True)
            ]
            for who in ("torch", "loop", "ours")
        }
        for clock, combine in (
            ("thread", lambda seconds: sum(seconds) / actions),
            ("process", lambda seconds: sum(seconds) / actions),
            ("wall", lambda seconds: max(seconds) * len(ranks) / actions),
        )
    )
    of_torch, of_loop = ratios(thread["ours"], thread["torch"]), ratios(thread["ours"], thread["loop"])
    made.rows.append(
        {
            "schedule": f"{name}, {count}",
            "torch": Spread.of(thread["torch"]).middle,
            "loop": Spread.of(thread["loop"]).middle,
            "ours": Spread.of(thread["ours"]).middle,
            "loop/torch": ratios(thread["loop"], thread["torch"]),
            "ours/torch": of_torch,
            "goal": OF_TORCH[name],
            "ours/loop": of_loop,
            "goal ": loop_limit,
            **{f"wall {who}": Spread.of(wall[who]).middle for who in wall},
            **{f"process {who}": Spread.of(process[who]).middle for who in process},
        }
    )
    made.goals.append(Goal(f"{name}, {count} microbatches, CPU time of torch's", of_torch.middle, OF_TORCH[name]))
    if loop_limit is not None:
        made.goals.append(Goal(f"{name}, {count} microbatches, CPU time of the loop's", of_loop.middle, loop_limit))
