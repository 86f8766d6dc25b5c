"""Processes for tests on several ranks: started once, used by many tests.

``workers.run(function, *args)`` calls ``function(rank, ranks, *args)`` in every process and returns what each has
returned. The function is one of a test module, which the processes load from its file. It may ask for ``group``:

    def total(rank, ranks, start, *, group):
        number = torch.tensor(start + rank)
        dist.all_reduce(number, group=group)
        return number.item()

    def test_total(workers):
        assert workers.run(total, 10, ranks=2) == [21, 21]

A run that fails or takes too long ends the processes, and the next run starts new ones. They are forks of one process
that has imported torch, so that takes a moment only.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
START_LIMIT = 60.0
GRACE = 5.0
"""How long the others may go on when one has failed."""
PATIENCE = timedelta(seconds=120)
"""How long a collective waits: longer than any run should take."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["pytest", "hypothesis", "numba", "torch", "torch.nn.attention.flex_attention", "torch.distributed.pipelining"]
)


class WorkerError(Exception):
    """A function has failed on some rank, or has not ended in time.

    Attributes:
        rank: the rank that reported it first; for a run without an end, the lowest that has not answered.
        error: the exception itself, if it could be sent.
    """

    def __init__(self, message: str, *, rank: int, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


@dataclass(frozen=True)
class Ended:
    """In place of a result: the process has ended, which ``run(..., deaths=True)`` allows."""

    rank: int
    exit_code: int | None


@dataclass(frozen=True)
class _Result:
    data: bytes


@dataclass(frozen=True)
class _Raised:
    summary: str
    trace: str
    data: bytes | None


@dataclass(frozen=True)
class _Call:
    module: str
    file: str
    name: str
    ranks: int
    fresh: bool
    arguments: bytes


@dataclass
class _Worker:
    rank: int
    process: ForkServerProcess
    pipe: Connection
    log: Path
    printed: int = 0

    def output(self) -> str:
        """What it has printed in this run, and where it is if it was asked."""
        return self.log.read_bytes()[self.printed :].decode(errors="replace")[-8000:]


class Workers:
    """Processes with gloo between them. They start when they are first needed."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def process_ids(self) -> list[int | None]:
        return [worker.process.pid for worker in self._workers]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        limit: float = 60.0,
        fresh: bool = False,
        deaths: bool = False,
    ) -> list[Any]:
        """What the function returns on each rank.

        Args:
            function: a function of a test module; called as ``function(rank, ranks, *args)``.
            args: sent to every rank.
            ranks: how many of the processes take part, from rank 0 on; all by default.
            limit: seconds after which the processes are ended, and where they were is shown.
            fresh: make a new group for this run alone, e.g. because it leaves messages behind.
            deaths: let processes end; the result of such a rank is ``Ended``.
        """
        call = _call(function, args, ranks or self.ranks, fresh)
        if not 1 <= call.ranks <= self.ranks:
            raise ValueError(f"ranks is {call.ranks}; there are {self.ranks} processes")
        if not self._workers:
            self._start()
        try:
            answers = self._answers(pickle.dumps(call), limit, deaths)
        except BaseException:
            self.close()
            raise
        if any(isinstance(answer, Ended) for answer in answers):
            self.close()
        given = answers[: call.ranks]
        return [pickle.loads(answer.data) if isinstance(answer, _Result) else answer for answer in given]

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.pipe.close()  # which ends an idle one, and one at work as well
        for worker in self._workers:
            worker.process.join(1.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # As with torchrun: the store is in none of the ranks, and outlives each of them.
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        for rank in range(self.ranks):
            log = Path(self._folder.name) / f"rank{rank}.log"
            log.touch()
            here, there = CONTEXT.Pipe()
            arguments = (there, rank, self.ranks, self._store.port, str(log))
            process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._workers.append(_Worker(rank, process, here, log))
        try:
            self._collect(START_LIMIT, deaths=False)
        except BaseException:
            self.close()
            raise

    def _answers(self, call: bytes, limit: float, deaths: bool) -> list[_Result | Ended]:
        for worker in self._workers:
            worker.printed = worker.log.stat().st_size
            with suppress(BrokenPipeError):  # a process that has ended: its pipe says so in a moment
                worker.pipe.send_bytes(call)
        return self._collect(limit, deaths)

    def _collect(self, limit: float, deaths: bool) -> list[_Result | Ended]:
        """The answer of every process; an error if one fails, or if they are not there in time."""
        answers: dict[int, _Result | Ended] = {}
        failed: dict[int, _Raised | Ended] = {}
        end = time.monotonic() + limit
        while len(answers) + len(failed) < self.ranks:
            pending = {worker.pipe: worker for worker in self._workers if worker.rank not in answers | failed}
            ready = wait(list(pending), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                answer = _answer(pending[pipe])
                bad = isinstance(answer, _Raised) or (isinstance(answer, Ended) and not deaths)
                (failed if bad else answers)[pending[pipe].rank] = answer
                end = min(end, time.monotonic() + GRACE) if bad else end
        missing = [worker for worker in self._workers if worker.rank not in answers | failed]
        if failed or missing:
            raise self._error(failed, missing, limit)
        return [answers[rank] for rank in range(self.ranks)]

    def _error(self, failed: dict[int, _Raised | Ended], missing: list[_Worker], limit: float) -> WorkerError:
        parts = [_describe(rank, failure) for rank, failure in failed.items()]
        if missing:
            waited = f"{GRACE:g} s after that" if failed else f"{limit:g} s"
            parts.append(f"no answer within {waited} from {', '.join(f'rank {worker.rank}' for worker in missing)}")
            _dump_stacks(self._workers)
        for worker in self._workers:
            if output := worker.output().strip():
                parts.append(f"--- output of rank {worker.rank} ---\n{output}")
        rank, first = next(iter(failed.items()), (missing[0].rank if missing else 0, None))
        error = _loaded(first.data) if isinstance(first, _Raised) else None
        return WorkerError("\n".join(parts), rank=rank, error=error)


def _call(function: Callable[..., Any], args: tuple[Any, ...], ranks: int, fresh: bool) -> _Call:
    if "<" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is not at the top of its module, where other processes could find it")
    file = str(Path(inspect.getfile(function)).resolve())
    return _Call(function.__module__, file, function.__qualname__, ranks, fresh, pickle.dumps(args))


def _answer(worker: _Worker) -> _Result | _Raised | Ended:
    try:
        answer: _Result | _Raised = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, OSError):
        worker.process.join(1.0)
        return Ended(worker.rank, worker.process.exitcode)
    return answer


def _describe(rank: int, failure: _Raised | Ended) -> str:
    if isinstance(failure, Ended):
        return f"rank {rank}: the process has ended with exit code {failure.exit_code}"
    return f"rank {rank}: {failure.summary}\n{failure.trace}"


def _loaded(data: bytes | None) -> BaseException | None:
    with suppress(Exception):
        return None if data is None else pickle.loads(data)
    return None


def _dump_stacks(workers: list[_Worker]) -> None:
    """Have every process write where it is into its log."""
    for worker in workers:
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.5)


# From here on, in the processes.


def _serve(pipe: Connection, rank: int, ranks: int, port: int, log: str) -> None:
    """Answer calls until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests are interrupted; this process is ended by them
    gc.freeze()  # what was imported stays: a collection that a test asks for looks at what the test has made
    _write_into(log)
    calls: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(pipe, calls), daemon=True).start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    groups: dict[int, Any] = {}
    pipe.send_bytes(pickle.dumps(_attempt(functools.partial(_connect, rank, ranks, port))))
    while True:
        call: _Call = pickle.loads(calls.get())
        pipe.send_bytes(pickle.dumps(_attempt(functools.partial(_execute, call, rank, groups))))


def _write_into(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    faulthandler.enable(file=2)


def _listen(pipe: Connection, calls: queue.Queue[bytes]) -> None:
    """Take calls; when the tests are gone, go as well, whatever this process is doing."""
    while True:
        try:
            calls.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _connect(rank: int, ranks: int, port: int) -> None:
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)


def _attempt(function: Callable[[], Any]) -> _Result | _Raised:
    """Call it with the warnings of the tests: each is an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.*")
            return _Result(pickle.dumps(function()))
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        return _Raised(summary, "".join(traceback.format_exception(error)), _dumped(error))


def _dumped(error: BaseException) -> bytes | None:
    with suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    return None


def _execute(call: _Call, rank: int, groups: dict[int, Any]) -> Any:
    group = dist.new_group(range(call.ranks)) if call.fresh else _group(call.ranks, groups)
    if rank >= call.ranks:
        return None
    function = _find(call)
    arguments = pickle.loads(call.arguments)
    named = {"group": group} if "group" in inspect.signature(function).parameters else {}
    torch.manual_seed(0)
    result = function(rank, call.ranks, *arguments, **named)
    if call.fresh:
        dist.destroy_process_group(group)
    return result


def _group(ranks: int, groups: dict[int, Any]) -> Any:
    """The group of the first ranks: made once, by all processes together."""
    if ranks not in groups:
        groups[ranks] = dist.new_group(range(ranks))
    return groups[ranks]


def _find(call: _Call) -> Callable[..., Any]:
    if call.module not in sys.modules:
        spec = importlib.util.spec_from_file_location(call.module, call.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        for parent in itertools.accumulate(call.module.split(".")[:-1], "{}.{}".format):
            with suppress(ImportError):  # a folder of the tests: what else is in it can be imported then
                importlib.import_module(parent)
            sys.modules.setdefault(parent, types.ModuleType(parent))
        sys.modules[call.module] = module  # before it runs: what it defines must be found by this name
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[call.module]
            raise
    return functools.reduce(getattr, call.name.split("."), sys.modules[call.module])
