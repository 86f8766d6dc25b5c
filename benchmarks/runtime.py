"""Measures the runtime against the installed torch.distributed.pipelining and a hand-written loop, on local processes.

(a) the overhead per action, with a trivial model; (b) the step time of a transformer; (c) the two halves of a backward
against a full one; (d) memory. All contestants run alternately, for (b) torch in separate processes, on gloo's loopback
with one thread and one core each. Wall time depends on the load of the machine; CPU time less so.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from goals import finish, parser_of
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
    parser = parser_of(description)
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
    if arguments.json:
        print(json.dumps([report.as_data() for report in reports], indent=1))
    finish(goals, arguments.goals, quiet=arguments.json)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
