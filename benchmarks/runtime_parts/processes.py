"""Ranks as processes of this machine, on gloo's loopback; none outlives the benchmark."""

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
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

LONGEST_WAIT = timedelta(minutes=5)


class RankError(Exception):
    """A rank has failed; its traceback is the message."""


def on_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``work(rank, tell, *arguments)`` returns on each rank. ``tell(text)`` shows progress."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, connections = [], []
    try:
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, ranks, store.port, sender, work, arguments), daemon=True
            )
            process.start()
            sender.close()
            processes.append(process)
            connections.append(receiver)
        return _collect(connections)
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
                raise RankError(f"rank {rank} has ended without a result") from None
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends its ranks itself
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
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
