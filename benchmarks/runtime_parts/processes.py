"""Runs ranks as local processes, each on its own core, on gloo's loopback; none outlives the benchmark.

Contestants may run on several sides: groups of ranks in separate processes, of which one works at a time.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

LONGEST_WAIT = timedelta(minutes=5)


class RankError(Exception):
    """A rank failed; its traceback is the message."""


class Side:
    """One of several groups of ranks that take turns.

    Attributes:
        number: its index.
    """

    def __init__(self, number: int, rank: int, port: int) -> None:
        self.number = number
        self._rank = rank
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONGEST_WAIT)
        self._turn = 0

    def end_turn(self) -> None:
        """End the turn of this side, once all its ranks are done, and begin the next side's."""
        dist.barrier()
        if self._rank == 0:
            self._store.set(f"turn {self._turn}", b"")
        self._turn += 1

    def wait(self) -> None:
        """Wait until the turn of another side is over."""
        self._store.wait([f"turn {self._turn}"])
        self._turn += 1


def on_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``work(rank, tell, *arguments)`` on each rank and return the results; ``tell(text)`` shows progress."""
    return _run(ranks, [work], arguments)[0]


def on_sides(sides: int, ranks: int, work: Callable[..., Any], *arguments: Any) -> list[list[Any]]:
    """Run ``work(rank, tell, side, *arguments)`` on each rank of each side, and return the results."""
    turns = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return _run(ranks, [partial(_on_side, number, turns.port, work) for number in range(sides)], arguments)


def _on_side(
    number: int, port: int, work: Callable[..., Any], rank: int, tell: Callable[[str], None], *arguments: Any
) -> Any:
    said = tell if number == 0 else lambda _: None
    return work(rank, said, Side(number, rank, port), *arguments)


def _run(ranks: int, works: Sequence[Callable[..., Any]], arguments: tuple[Any, ...]) -> list[list[Any]]:
    """Return the results of each kind of work, each in a separate group of ranks."""
    context = multiprocessing.get_context("spawn")
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in works]
    processes, connections = [], []
    try:
        for work, store in zip(works, stores, strict=True):
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(rank, ranks, store.port, sender, work, arguments), daemon=True
                )
                process.start()
                sender.close()
                processes.append(process)
                connections.append(receiver)
        results = _collect(connections)
        return [results[first : first + ranks] for first in range(0, len(results), ranks)]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _collect(connections: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        for connection in wait([each for rank, each in enumerate(connections) if rank not in results]):
            rank = connections.index(connection)
            try:
                kind, value = connection.recv()
            except EOFError:
                raise RankError(f"rank {rank} ended without a result") from None
            if kind == "error":
                raise RankError(f"rank {rank}: {value}")
            if kind == "result":
                results[rank] = value
            else:
                print(value, file=sys.stderr, flush=True)
    return [results[rank] for rank in range(len(connections))]


def _rank(
    rank: int, ranks: int, port: int, sender: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark terminates its ranks itself
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # two ranks on one core would slow each other down
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LONGEST_WAIT)
        result = work(rank, lambda text: sender.send(("progress", text)) if rank == 0 else None, *arguments)
        dist.barrier()
        sender.send(("result", result))
        gc.collect()
        dist.destroy_process_group()
    except Exception:
        sender.send(("error", traceback.format_exc()))
