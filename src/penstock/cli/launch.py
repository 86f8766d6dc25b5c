"""Starts local processes, one per rank, reads their output line by line, and terminates them together.

It does not import torch, so the launcher starts fast and takes little memory next to its processes.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

#: Called with a rank, whether it wrote to stderr, and a whole line.
OnLine = Callable[[int, bool, str], None]

#: How long the other ranks may continue after one has failed, to report what they know about it, in seconds.
REPORT_GRACE: Final = 5.0
#: How long processes have to end after SIGINT, and after SIGTERM, in seconds.
TERMINATE_AFTER: Final = 4.0
#: How long they have to save and end when this process is sent SIGTERM, in seconds: as long as torchrun gives them.
GRACE: Final = 30.0
#: How long to read what is still in the pipes after all processes have ended.
_REST: Final = 1.0
#: How often to check whether a process has ended.
_TICK: Final = 0.05

TIMED_OUT: Final = 124

#: The signals that terminate the ranks, and then this process.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM)

#: A line and its ending. Progress bars end their lines with a bare carriage return.
_LINE: Final = re.compile(rb"([^\r\n]*)(\r?\n|\r(?!\n)(?!\Z))")

#: Reads process groups, and kills them if the process that started them disappears before it writes "done".
_GUARD: Final = """
while read -r group; do [ "$group" = done ] && exit; groups="$groups -$group"; done
[ -n "$groups" ] && kill -9 $groups
"""


class RankExit(NamedTuple):
    """How a rank failed on its own, before the launcher terminated it.

    Attributes:
        rank: the rank.
        status: its exit code; if a signal killed it, the negative number of the signal.
    """

    rank: int
    status: int

    @property
    def code(self) -> int:
        """Its exit code as in a shell: 128 plus the signal, if one killed it."""
        return self.status if self.status > 0 else 128 - self.status

    @property
    def weight(self) -> int:
        """How likely it is a consequence of another failure, lowest first: ranks that lose a peer exit with code 1."""
        return 0 if self.status < 0 else 1 if self.status != 1 else 2


class Outcome(NamedTuple):
    """How the ranks ended.

    Attributes:
        failures: the failed ranks: killed ones, then exit codes other than 1, then 1; otherwise in order of time.
        timed_out: whether they took too long.
        ended: the ranks that the launcher terminated.
    """

    failures: tuple[RankExit, ...] = ()
    timed_out: bool = False
    ended: tuple[int, ...] = ()

    @property
    def code(self) -> int:
        """The exit code of the first failure, or 0."""
        if self.failures:
            return self.failures[0].code
        return TIMED_OUT if self.timed_out else 0

    @property
    def summary(self) -> str:
        """A short description; empty if all went well."""
        if self.timed_out and not self.failures:
            return "timed out (--timeout); all processes were terminated"
        ranks: dict[int, list[int]] = {}
        for rank, status in self.failures:
            ranks.setdefault(status, []).append(rank)
        summary, before = [], 0
        for status, numbers in ranks.items():
            if status < 0:
                summary.append(f"{_were(numbers)} killed by {_signal_name(-status)}")
            else:
                summary.append(f"{_named(numbers)} {'' if before > 0 else 'failed '}with exit code {status}")
            before = status
        rest = f"; {_were(self.ended)} then terminated" if summary and self.ended else ""
        return ", ".join(summary) + rest


def _named(ranks: Sequence[int]) -> str:
    """Name some ranks."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _were(ranks: Sequence[int]) -> str:
    return f"{_named(ranks)} {'was' if len(ranks) == 1 else 'were'}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    on_line: OnLine | None = None,
    timeout: float | None = None,
    interrupt: signal.Signals = signal.SIGINT,
    grace: float = TERMINATE_AFTER,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command once for each rank, and return when all have ended.

    When a rank fails, the others are terminated after a moment. SIGTERM is passed on to all ranks, which are killed
    if they have not ended after `grace` seconds; if all of them end with exit code 0, that is the outcome. Ctrl-C
    terminates all ranks: with SIGINT, then SIGTERM, then SIGKILL; a second Ctrl-C kills them at once. If this process
    is killed, so are the ranks and their children.

    Args:
        command: the command, e.g. ``[sys.executable, "train.py"]``.
        ranks: the number of ranks.
        on_line: called with every line that they write; by default they write where this process does.
        timeout: the number of seconds that they may take.
        interrupt: the first signal they get on Ctrl-C; SIGTERM for processes with nothing to save or report.
        grace: how many seconds they have to end after a signal.
        environment: the base environment; by default that of this process.
    """
    given = os.environ if environment is None else environment
    with reserved_port() as port, _Signals() as signals, _Guard() as guard:
        job = _Job(on_line, timeout, interrupt, grace, signals)
        try:
            for rank in range(ranks):
                job.start(command, environment_of(rank, ranks, port, given), guard)
            with signals.raised():
                outcome = job.finish()
        finally:
            job.kill()
            guard.is_needed = False
    if signals.came and not (signals.came[0] == signal.SIGTERM and job.has_succeeded):
        raise _end_by(signals.came[0])
    return outcome


def environment_of(rank: int, ranks: int, port: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: what torchrun sets, and defaults for several ranks on one machine."""
    chosen = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # when a rank exits, torch warns the others with a page of C++ frames
    }
    of_the_rank = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    # Without the variables of an outer torchrun, which would make the ranks use its store.
    kept = {name: value for name, value in given.items() if not name.startswith("TORCHELASTIC_")}
    return {**chosen, **kept, **{name: str(value) for name, value in of_the_rank.items()}}


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port of this machine until the ranks listen on it seconds later.

    It is bound here without listening: no other process is assigned it, but the store of the ranks can bind it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Signals:
    """Records SIGINT and SIGTERM; only a second one raises, and only while the output of the ranks is read.

    An exception may be raised anywhere, even between reading a line and recording that it was read, so that a line
    would be repeated or lost. The second signal must raise nevertheless: ``on_line`` may be blocked, writing into a
    pipe that is not read.

    After the first signal, this process is about to end, and ignores further ones when it leaves.

    Attributes:
        came: the numbers of the signals received.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._are_raised = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # A signal that is ignored, as in the background of a script, stays ignored; and a handler that was not
            # installed by Python cannot be restored.
            heeded = [one for one in _ENDING if signal.getsignal(one) not in (signal.SIG_IGN, None)]
            self._before = {one: signal.signal(one, self._note) for one in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.came else handler)

    def _note(self, number: int, _: object) -> None:
        self.came.append(number)
        self._raise_second()

    def _raise_second(self) -> None:
        if self._are_raised and len(self.came) > 1:
            self._are_raised = False  # terminating the ranks must not be interrupted
            raise _end_by(self.came[0])

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise on a second signal within this block, even if both came before it."""
        self._are_raised = True
        try:
            self._raise_second()
            yield
        finally:
            self._are_raised = False


def _end_by(number: int) -> BaseException:
    """Return what this process raises after a signal has terminated the ranks."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


class _Guard:
    """A process that kills the ranks if this process dies before them.

    Attributes:
        is_needed: whether any rank may still run.
    """

    is_needed = True

    def __enter__(self) -> Self:
        reading, self._writing = os.pipe()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(reading)
        return self

    def watch_me(self) -> None:
        """Register a process that has just been forked, from within, so that it is guarded from the start."""
        os.write(self._writing, b"%d\n" % os.getpid())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_needed:
            with suppress(BrokenPipeError):
                os.write(self._writing, b"done\n")
        os.close(self._writing)
        self._process.wait()


class _Job:
    """The processes of all ranks, and the signals to send them."""

    def __init__(
        self,
        on_line: OnLine | None,
        timeout: float | None,
        interrupt: signal.Signals,
        grace: float,
        signals: _Signals,
    ) -> None:
        self._on_line = on_line
        self._interrupt = interrupt
        self._grace = grace
        #: The signals that this process receives, and whether the first was passed on.
        self._signals = signals
        self._passed_on = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: set[int] = set()
        self._pipes = selectors.DefaultSelector()
        self._failures: list[RankExit] = []
        self._timed_out = False
        #: Whether a signal was sent to the ranks; from then on, their exit is not a failure.
        self._ended = False
        #: The ranks that the signal was sent to.
        self._ended_ranks: set[int] = set()
        self._codes: list[int] = []
        #: The signals to send, and when.
        self._orders: deque[tuple[float, signal.Signals]] = deque()
        self._deadline = None if timeout is None else time.monotonic() + timeout

    @property
    def has_succeeded(self) -> bool:
        """Whether all ranks have ended with exit code 0."""
        return len(self._codes) == len(self._processes) and not any(self._codes)

    def start(self, command: Sequence[str], environment: Mapping[str, str], guard: _Guard) -> None:
        """Start the next rank."""
        rank = len(self._processes)
        written = None if self._on_line is None else subprocess.PIPE
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            env=environment,
            process_group=0,  # so that Ctrl-C in the terminal reaches only the launcher, which passes it on once
            preexec_fn=guard.watch_me,
        )
        self._processes.append(process)
        self._running.add(rank)
        for pipe, is_error in ((process.stdout, False), (process.stderr, True)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._pipes.register(pipe, selectors.EVENT_READ, _Lines(rank, is_error))

    def finish(self) -> Outcome:
        """Wait until all ranks have ended."""
        rest = None
        while self._running or (self._pipes.get_map() and (rest is None or time.monotonic() < rest)):
            self._turn()
            if not self._running and rest is None:
                rest = time.monotonic() + _REST
        failures = sorted(self._failures, key=lambda failure: failure.weight)
        return Outcome(tuple(failures), self._timed_out, tuple(sorted(self._ended_ranks)))

    def kill(self) -> None:
        """Kill the ranks that still run."""
        for rank in sorted(self._running):
            _send(self._processes[rank], signal.SIGKILL)
            self._processes[rank].wait()
        self._running.clear()
        for key in list(self._pipes.get_map().values()):
            self._pipes.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]  # it is a pipe
        self._pipes.close()

    def _turn(self) -> None:
        if not self._pipes.get_map():
            time.sleep(_TICK)
        for key, _ in self._pipes.select(_TICK) if self._pipes.get_map() else ():
            lines: _Lines = key.data
            piece = os.read(key.fd, 65536)
            if not piece:
                self._pipes.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]  # it is a pipe
            if self._on_line is not None:
                for line in lines.more(piece):
                    self._on_line(lines.rank, lines.is_error, line)
        for rank in sorted(self._running):
            self._look_after(rank)
        if self._deadline is not None and time.monotonic() > self._deadline and self._running:
            self._deadline = None
            self._timed_out = True
            self._end_after(0.0)
        if self._signals.came and not self._passed_on:
            self._pass_on(self._signals.came[0])
        self._carry_out()

    def _look_after(self, rank: int) -> None:
        """Record whether a rank has ended, and kill the processes that it left."""
        process = self._processes[rank]
        if not _has_ended(process):
            return
        _send(process, signal.SIGKILL)
        code = process.wait()
        self._running.discard(rank)
        self._codes.append(code)
        if code != 0 and not self._ended:
            self._failures.append(RankExit(rank, code))
            if not self._orders:
                self._end_after(REPORT_GRACE)

    def _pass_on(self, number: int) -> None:
        self._passed_on = True
        if number == signal.SIGINT:
            self._orders = deque([(time.monotonic(), self._interrupt)])
            self._end_after(TERMINATE_AFTER, grace=max(TERMINATE_AFTER, self._grace - TERMINATE_AFTER))
        else:
            self._end_after(0.0, grace=self._grace)

    def _end_after(self, seconds: float, *, grace: float = TERMINATE_AFTER) -> None:
        begin = time.monotonic() + seconds
        self._orders.extend([(begin, signal.SIGTERM), (begin + grace, signal.SIGKILL)])

    def _carry_out(self) -> None:
        while self._orders and time.monotonic() >= self._orders[0][0]:
            _, number = self._orders.popleft()
            self._ended = True
            self._ended_ranks |= self._running
            for rank in self._running:
                _send(self._processes[rank], number)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended, without reaping it, so that its id stays valid."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and its children, while its id is still valid."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


class _Lines:
    """Splits the output of a pipe into lines."""

    def __init__(self, rank: int, is_error: bool) -> None:
        self.rank = rank
        self.is_error = is_error
        self._rest = b""

    def more(self, piece: bytes) -> Iterator[str]:
        """Yield the lines that this piece completes; an empty piece is the end."""
        text, end = self._rest + piece, 0
        for found in _LINE.finditer(text):
            end = found.end()
            if found[1] or found[2] != b"\r":
                yield found[1].decode(errors="replace")
        self._rest = text[end:]
        if not piece and self._rest:
            yield self._rest.strip(b"\r\n").decode(errors="replace")
            self._rest = b""
