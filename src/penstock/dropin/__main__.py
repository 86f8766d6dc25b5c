"""Runs a program with the drop-in, as ``python`` would run it: a script, or ``-m`` and a module.

The process is replaced by that program, so signals, exit codes and ``__main__`` are those of the program.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from penstock.dropin.environment import environment

_USAGE: Final = """usage: python -m penstock.dropin SCRIPT [ARGUMENTS]
       python -m penstock.dropin -m MODULE [ARGUMENTS]
       torchrun --nproc-per-node 4 -m penstock.dropin SCRIPT [ARGUMENTS]
"""


def main() -> None:
    """Replace this process by the program."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write(_USAGE)
        sys.exit(0 if arguments else 2)
    sys.stdout.flush()
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    options = before[: before.index("-m")] if "-m" in before else []  # those of the interpreter, such as -u
    os.execve(sys.executable, [sys.executable, *options, *arguments], environment(os.environ))


if __name__ == "__main__":
    main()
