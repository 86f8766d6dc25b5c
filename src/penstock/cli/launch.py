"""Local processes, one for each rank: started together, heard line by line, and ended together.

It knows nothing of torch, so a launcher starts in no time and takes no memory beside what it starts.
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

#: Gets a whole line of a rank, and whether it was written to stderr.
OnLine = Callable[[int, bool, str], None]

#: How long the others may go on when a rank has failed, so that they can say what they know of it, in seconds.
REPORT_GRACE: Final = 5.0
#: How long processes have to end after SIGINT, and after SIGTERM.
TERMINATE_AFTER: Final = 4.0
#: How long to listen for what is still in the pipes when all processes have ended.
_REST: Final = 1.0
#: How often to look whether a process has ended.
_TICK: Final = 0.05

TIMED_OUT: Final = 124

#: What ends the ranks, and then this process.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM)

#: A line and its end. A progress bar ends its lines with a bare carriage return.
_LINE: Final = re.compile(rb"([^\r\n]*)(\r?\n|\r(?!\n)(?!\Z))")

#: Reads process groups, and kills them if whoever has started them is gone before it could say that all is done.
_GUARD: Final = """
while read -r group; do [ "$group" = done ] && exit; groups="$groups -$group"; done
[ -n "$groups" ] && kill -9 $groups
"""


class RankExit(NamedTuple):
    """How a rank has failed, before anyone ended it from here.

    Attributes:
        rank: which.
        status: its exit code; if a signal has killed it, the negative number of that.
    """

    rank: int
    status: int

    @property
    def code(self) -> int:
        """What a shell would say of it: 128 and the signal, if one has killed it."""
        return self.status if self.status > 0 else 128 - self.status

    @property
    def weight(self) -> int:
        """The less, the likelier it is that others have failed because of it: their errors are exceptions, code 1."""
        return 0 if self.status < 0 else 1 if self.status != 1 else 2


class Outcome(NamedTuple):
    """How it ended.

    Attributes:
        failures: of the ranks: killed ones, then exit codes other than 1, then 1; of the same kind as they ended.
        timed_out: whether it took too long.
        ended: the ranks that were ended from here.
    """

    failures: tuple[RankExit, ...] = ()
    timed_out: bool = False
    ended: tuple[int, ...] = ()

    @property
    def code(self) -> int:
        """0, or that of the first failure."""
        if self.failures:
            return self.failures[0].code
        return TIMED_OUT if self.timed_out else 0

    @property
    def summary(self) -> str:
        """In a few words; nothing if all went well."""
        if self.timed_out and not self.failures:
            return "it took longer than --timeout allows; every process was ended"
        ranks: dict[int, list[int]] = {}
        for rank, status in self.failures:
            ranks.setdefault(status, []).append(rank)
        summary, before = [], 0
        for status, numbers in ranks.items():
            if status < 0:
                summary.append(f"{_were(numbers)} ended by {_signal_name(-status)}")
            else:
                summary.append(f"{_named(numbers)} {'' if before > 0 else 'failed '}with exit code {status}")
            before = status
        rest = f"; {_were(self.ended)} ended after that" if summary and self.ended else ""
        return ", ".join(summary) + rest


def _named(ranks: Sequence[int]) -> str:
    """Some ranks in words."""
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
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command once for each rank, and return when all have ended.

    When a rank fails, the others are ended after a moment. Ctrl-C ends all: with SIGINT, then SIGTERM, then SIGKILL; a
    second one at once. If this process is killed itself, they are killed too, and so are processes of theirs.

    Args:
        command: what to run, e.g. ``[sys.executable, "train.py"]``.
        ranks: how many.
        on_line: gets what they write; by default they write where this process does.
        timeout: how many seconds it may take.
        interrupt: what they get first at Ctrl-C; SIGTERM for those that have nothing to save, and nothing to say.
        environment: what to start from; by default that of this process.
    """
    given = os.environ if environment is None else environment
    with reserved_port() as port, _Signals() as signals, _Guard() as guard:
        job = _Job(on_line, timeout, interrupt, signals)
        try:
            for rank in range(ranks):
                job.start(command, environment_of(rank, ranks, port, given), guard)
            with signals.raised():
                outcome = job.finish()
        finally:
            job.kill()
            guard.is_needed = False
    if signals.came:
        raise _end_by(signals.came[0])
    return outcome


def environment_of(rank: int, ranks: int, port: int, given: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set for a rank, and what makes several ranks on one machine behave."""
    chosen = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
        "PYTHONUNBUFFERED": "1",
    }
    of_the_rank = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    # Those of a torchrun around this one would send the ranks to its store.
    kept = {name: value for name, value in given.items() if not name.startswith("TORCHELASTIC_")}
    return {**chosen, **kept, **{name: str(value) for name, value in of_the_rank.items()}}


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine that nobody gets by chance, until the ranks listen at it seconds later.

    It is bound here, and not listened at; whoever asks for just this one, as the store of the ranks does, gets it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Signals:
    """SIGINT and SIGTERM as they come; only a second one is an exception, and only while the ranks are listened to.

    An exception may come up anywhere: between a line that was heard and the note that it was, so that it is heard again
    or the next is lost. The second one has to: whoever hears may be stuck, writing into a pipe that nobody reads.

    When one has come, this process is about to end, and ignores the rest.

    Attributes:
        came: the numbers of those that came.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._are_raised = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # One that is ignored, as in the background of a script, stays so; and one that is not Python's cannot be
            # given back.
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
            self._are_raised = False  # what follows ends the ranks, and must not be stopped
            raise _end_by(self.came[0])

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise a second one within, also if both have come before."""
        self._are_raised = True
        try:
            self._raise_second()
            yield
        finally:
            self._are_raised = False


def _end_by(number: int) -> BaseException:
    """What this process ends with when a signal has ended the ranks."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


class _Guard:
    """A process that outlives this one, if need be, and then kills what this one has started.

    Attributes:
        is_needed: whether anything may be left of that.
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
        """Called in a process that has just been forked: so that there is no moment in which it is not watched."""
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
    """The processes, and what is to become of them."""

    def __init__(
        self, on_line: OnLine | None, timeout: float | None, interrupt: signal.Signals, signals: _Signals
    ) -> None:
        self._on_line = on_line
        self._interrupt = interrupt
        #: Those that this process gets, and whether the first was passed on.
        self._signals = signals
        self._passed_on = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: set[int] = set()
        self._pipes = selectors.DefaultSelector()
        self._failures: list[RankExit] = []
        self._timed_out = False
        #: Whether a signal was sent from here: from then on, to end is no failure.
        self._ended = False
        #: The ranks that it was sent to.
        self._ended_ranks: set[int] = set()
        #: What to send when.
        self._orders: deque[tuple[float, signal.Signals]] = deque()
        self._deadline = None if timeout is None else time.monotonic() + timeout

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
            process_group=0,  # so that Ctrl-C in the terminal is for the launcher alone, which passes it on once
            preexec_fn=guard.watch_me,
        )
        self._processes.append(process)
        self._running.add(rank)
        for pipe, is_error in ((process.stdout, False), (process.stderr, True)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._pipes.register(pipe, selectors.EVENT_READ, _Lines(rank, is_error))

    def finish(self) -> Outcome:
        """Wait for the end of all."""
        rest = None
        while self._running or (self._pipes.get_map() and (rest is None or time.monotonic() < rest)):
            self._turn()
            if not self._running and rest is None:
                rest = time.monotonic() + _REST
        failures = sorted(self._failures, key=lambda failure: failure.weight)
        return Outcome(tuple(failures), self._timed_out, tuple(sorted(self._ended_ranks)))

    def kill(self) -> None:
        """Whatever still runs."""
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
        """Take note if a rank has ended; what it has left behind ends with it."""
        process = self._processes[rank]
        if not _has_ended(process):
            return
        _send(process, signal.SIGKILL)
        code = process.wait()
        self._running.discard(rank)
        if code != 0 and not self._ended:
            self._failures.append(RankExit(rank, code))
            if not self._orders:
                self._end_after(REPORT_GRACE)

    def _pass_on(self, number: int) -> None:
        self._passed_on = True
        if number == signal.SIGINT:
            self._orders = deque([(time.monotonic(), self._interrupt)])
            self._end_after(TERMINATE_AFTER)
        else:
            self._end_after(0.0)

    def _end_after(self, seconds: float) -> None:
        begin = time.monotonic() + seconds
        self._orders.extend([(begin, signal.SIGTERM), (begin + TERMINATE_AFTER, signal.SIGKILL)])

    def _carry_out(self) -> None:
        while self._orders and time.monotonic() >= self._orders[0][0]:
            _, number = self._orders.popleft()
            self._ended = True
            self._ended_ranks |= self._running
            for rank in self._running:
                _send(self._processes[rank], number)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has; it is not waited for, and so keeps its id."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and to those that it has started, as long as its id is its own."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


class _Lines:
    """What comes out of a pipe, line by line."""

    def __init__(self, rank: int, is_error: bool) -> None:
        self.rank = rank
        self.is_error = is_error
        self._rest = b""

    def more(self, piece: bytes) -> Iterator[str]:
        """The lines that this piece completes; an empty one is the end."""
        text, end = self._rest + piece, 0
        for found in _LINE.finditer(text):
            end = found.end()
            if found[1] or found[2] != b"\r":
                yield found[1].decode(errors="replace")
        self._rest = text[end:]
        if not piece and self._rest:
            yield self._rest.strip(b"\r\n").decode(errors="replace")
            self._rest = b""
