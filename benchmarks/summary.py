"""Runs every benchmark, and prints one table: each goal, the figure measured, and whether it is met.

The table is also written to docs/benchmarks.md, with the machine and the date. With --quick each benchmark measures
its smaller sizes only.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import torch

from goals import Goal, finish, parser_of, read_goals
from penstock.version import __version__

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
#: The benchmarks with what --quick means to each.
QUICK: dict[str, tuple[str, ...]] = {
    "build": ("--repeats", "5"),
    "lowering": ("--quick", "--repeats", "5"),
    "simulate": ("--quick", "--repeats", "5"),
    "plan": ("--quick",),
    "runtime": ("--quick", "--repeats", "3"),
    "dropin": ("--quick", "--repeats", "3"),
    "tracing": ("--pairs", "100"),
    "skips": (),
    "generation": ("--ranks", "2", "--rounds", "5"),
    "prediction": ("--runs", "3"),
    "checkpoints": ("--rounds", "4"),
    "planned": ("--ranks", "2", "--rounds", "15"),
    "optimizer": ("--turns", "7"),
}


@dataclass(frozen=True)
class Outcome:
    """What one benchmark measured."""

    name: str
    goals: list[Goal]
    seconds: float
    failure: str = ""


def main() -> None:
    """Run all benchmarks, print and write the table; exit with 1 if a goal is missed or a benchmark failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
    parser.add_argument("--only", choices=QUICK, action="append", help="only this benchmark; may be repeated")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    given = parser.parse_args()
    outcomes = []
    for name in given.only or QUICK:
        print(f"{name} ...", file=sys.stderr, flush=True)
        outcomes.append(run(name, quick=given.quick))
    print(*(line for outcome in outcomes for line in lines_of(outcome)), sep="\n")
    given.page.write_text(page_of(outcomes, quick=given.quick))
    failed = [Goal(f"{one.name} could not be measured", 1, 0) for one in outcomes if one.failure]
    finish([*(goal for outcome in outcomes for goal in outcome.goals), *failed], given.goals)


def run(name: str, *, quick: bool) -> Outcome:
    """Run one benchmark in a process of its own; its tables go to the error stream."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "goals.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--goals", str(path), *(QUICK[name] if quick else ())]
        begin = perf_counter()
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        seconds = perf_counter() - begin
        if code not in (0, 1) or not path.exists():
            return Outcome(name, [], seconds, f"it ended with exit code {code}")
        return Outcome(name, read_goals(path), seconds)


def lines_of(outcome: Outcome) -> list[str]:
    """Return the rows of a benchmark for a terminal."""
    if outcome.failure:
        return [f"{outcome.name:12} FAILED: {outcome.failure}"]
    return [f"{outcome.name:12} {goal}" for goal in outcome.goals]


def page_of(outcomes: list[Outcome], *, quick: bool) -> str:
    """Return the page: what was measured where and when, and a table for each benchmark."""
    met = sum(goal.met for outcome in outcomes for goal in outcome.goals)
    count = sum(len(outcome.goals) for outcome in outcomes)
    option = " QUICK=1" if quick else ""
    lines = [
        "# Benchmarks",
        "",
        "Every goal with the figure measured last. Ratios compare contestants that alternate in one run; each figure",
        "is a median. Times depend on the machine and its load, ratios less so. Run them on yours:",
        "",
        "```text",
        f"$ make bench{option}",
        "```",
        "",
        f"{datetime.now(tz=UTC):%Y-%m-%d}, penstock {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {machine()}"
        f"{'; smaller sizes and fewer repeats (`QUICK=1`)' if quick else ''}.",
        "",
        f"**{met} of {count} goals met.**",
    ]
    for outcome in outcomes:
        lines += ["", f"## {outcome.name}", "", f"`python benchmarks/{outcome.name}.py`, {outcome.seconds:.0f} s", ""]
        if outcome.failure:
            lines.append(f"Not measured: {outcome.failure}.")
            continue
        lines += ["| goal | measured | limit | |", "|---|---:|---:|---|"]
        for goal in outcome.goals:
            limit = f"{'≥' if goal.at_least else '≤'} {goal.limit:g} {goal.unit}".rstrip()
            lines.append(f"| {goal.name} | {goal.figure:.3g} | {limit} | {'met' if goal.met else '**missed**'} |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Return the machine in words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {cores} cores, {platform.system()}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
