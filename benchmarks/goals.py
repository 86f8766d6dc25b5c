"""Goals of benchmarks: figures with limits, printed at the end of each benchmark, and collected in one table."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Goal:
    """A measured figure with an upper or a lower limit."""

    name: str
    figure: float
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the figure is within the limit."""
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    @property
    def relation(self) -> str:
        """How the figure should compare with the limit."""
        return ">=" if self.at_least else "<="

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return (
            f"{'met   ' if self.met else 'MISSED'} {self.name}: {self.figure:.3g} {self.relation} {self.limit:g}{unit}"
        )


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what all benchmarks have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goals", type=Path, metavar="FILE", help="also write every goal to this JSON file")
    return parser


def finish(goals: Sequence[Goal], path: Path | None, *, quiet: bool = False) -> NoReturn:
    """Print the goals, write them to a file if asked, and exit with 1 if one is missed."""
    missed = [goal for goal in goals if not goal.met]
    if not quiet:
        print(f"\n{len(goals) - len(missed)} of {len(goals)} goals met", *missed, sep="\n")
    if path is not None:
        path.write_text(json.dumps([asdict(goal) for goal in goals], indent=1))
    sys.exit(bool(missed))


def read_goals(path: Path) -> list[Goal]:
    """Read what ``finish`` wrote."""
    return [Goal(**goal) for goal in json.loads(path.read_text())]
