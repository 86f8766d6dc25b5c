"""Runs the ``penstock`` command, and reports errors in one line with exit code 2."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from penstock.errors import PenstockError, VerificationError

FOUND = 1
BAD_INPUT = 2
INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `penstock show ... | head` ends quietly
    interrupted: list[int] = []

    def interrupt(number: int, _: object) -> NoReturn:
        interrupted.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in the background of a script
        signal.signal(signal.SIGINT, interrupt)
    try:
        from penstock.cli.app import app  # takes a moment, and may be interrupted as well

        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except VerificationError as error:
        _end(f"{error}", FOUND)
    except (PenstockError, OSError) as error:
        _end(f"{error}", BAD_INPUT)
    except MemoryError:
        _end("not enough memory for a schedule of this size", BAD_INPUT)
    except Exception:
        if interrupted:  # interrupted code may raise something else, as the compiler does
            sys.exit(INTERRUPTED)
        raise


def _end(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"penstock: {message}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
