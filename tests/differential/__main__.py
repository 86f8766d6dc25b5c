"""Run cases again: ``cd tests && python -m differential SEED...``."""

import sys

from differential import native, processes
from differential.cases import THREADS, draw
from differential.outcomes import judge, known_warnings
from runtime.workers import Workers


def main() -> int:
    """Show each case and what is wrong with it; 1 if something is."""
    failed = False
    with Workers(3) as workers, known_warnings():
        for case in map(draw, map(int, sys.argv[1:])):
            in_threads = case.place == THREADS
            results = native.run_threads(case) if in_threads else processes.run_cases(workers, [case])[case.seed]
            problems = judge(case, results)
            refusals = [result.raised.message for result in results if result.raised is not None]
            print(case, *(problems or refusals[:1] or ["right"]), sep="\n")  # noqa: T201
            failed = failed or bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
