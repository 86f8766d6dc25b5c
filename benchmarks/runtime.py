"""Running: ours against the installed torch.distributed.pipelining and a loop written by hand, on local processes.

(a) what an action costs, with a model that costs nothing; (b) the time of a step of a transformer; (c) the two halves
of a backward against a whole one; (d) memory. All contestants run in turn, for (b) torch in processes of its own, on
gloo's loopback with a thread and a core each. Wall time depends on who else uses the machine; CPU time less so.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from runtime_parts import memory, overhead, splitting, steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime_parts.report import Report

PARTS: dict[str, Callable[..., Report]] = {
    "a": overhead.report,
    "b": steps.report,
    "c": splitting.report,
    "d": memory.report,
}


def main(parts: dict[str, Callable[..., Report]] = PARTS, description: str | None = __doc__) -> None:
    """Print the tables and every goal; exit with 1 if one is missed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and schedules")
    parser.add_argument("--only", choices=parts, action="append", help="only this part; may be repeated")
    parser.add_argument("--json", action="store_true", help="for machines")
    arguments = parser.parse_args()
    reports = []
    for name in arguments.only or parts:
        reports.append(parts[name](repeats=arguments.repeats, quick=arguments.quick))
        if not arguments.json:
            print(reports[-1], end="\n\n", flush=True)
    goals = [goal for report in reports for goal in report.goals]
    missed = [goal for goal in goals if not goal.met]
    if arguments.json:
        print(json.dumps([report.as_data() for report in reports], indent=1))
    else:
        print(f"{len(goals) - len(missed)} of {len(goals)} goals met", *missed, sep="\n")
    sys.exit(bool(missed))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
