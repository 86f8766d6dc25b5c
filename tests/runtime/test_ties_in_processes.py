"""Tied parameters on ranks that are processes: training, stages under DDP and FSDP2, and failures."""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PenstockError
from penstock.runtime import DistributedTransport, Pipeline
from runtime.tied_models import (
    TIE,
    apart,
    batch,
    build,
    loss_fn,
    model,
    parameters,
    stages_of,
    step,
    train,
    unsplit_step,
)
from runtime.workers import Ended, Workers

CASES = [
    ("1F1B", 2, {}, 0),
    ("1F1B", 4, {}, 0),
    ("1F1B", 4, {}, 1),
    ("Interleaved1F1B", 2, {"stages_per_rank": 2}, 1),
    ("Interleaved1F1B", 4, {"stages_per_rank": 2}, 0),
    ("ZBVZeroBubble", 2, {}, 0),
    ("ZBVZeroBubble", 4, {}, 2),
    ("DualPipeV", 2, {}, 1),
]


def train_in_process(rank: int, ranks: int, case: tuple[str, int, dict[str, int], int], *, group: Any) -> Any:
    name, _, options, readers = case
    transport = DistributedTransport(group, timeout=60.0)
    return train(transport, build(name, ranks, options, microbatches=2 * ranks), readers)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_those_of_the_unsplit_model(workers: Workers, case: Any) -> None:
    for found in workers.run(train_in_process, case, ranks=case[1]):
        assert len(found) >= 4
        assert max(found.values()) < 1e-12, found


# Data parallel stages -------------------------------------------------------------------------------------------------


@cache
def mesh() -> DeviceMesh:
    """Replicas by ranks of the pipeline; made once in a process."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))


def with_ddp(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh()["replica"].get_group())


def with_fsdp(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=mesh()["replica"])


WRAPPERS = {"ddp": with_ddp, "fsdp": with_fsdp}


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def gaps(mine: dict[int, nn.Module], whole: list[nn.Module], *, gradients: bool) -> dict[str, float]:
    found = {}
    for stage, module in mine.items():
        theirs = dict(whole[stage].named_parameters())
        for name, one in module.named_parameters():
            other = theirs[name.removeprefix("module.")]
            pair = (one.grad, other.grad) if gradients else (one, other)
            found[f"{stage} {name}"] = float((full(pair[0]) - full(pair[1])).abs().max())
    return found


def train_replicas(rank: int, ranks: int, wrapper: str, name: str) -> tuple[dict[str, float], list[float]]:
    """Three steps of two replicas, with gradients of two batches each, clipped; and what is different from unsplit."""
    replica, here = mesh().get_coordinate()
    schedule = build(name, 2, microbatches=2)
    whole = model(schedule.stages)
    mine = {stage: WRAPPERS[wrapper](module) for stage, module in stages_of(apart(whole), schedule, here).items()}
    pipe = Pipeline(mine, schedule, loss_fn=loss_fn, group=mesh().get_group("pipeline"), ties=[TIE], check_ties_every=1)
    ours, theirs = (torch.optim.AdamW(parameters(one), lr=0.05) for one in (mine, whole))
    found: dict[str, float] = {}
    norms = []
    for number in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        for part in range(2):
            words, target = (one.chunk(2)[replica] for one in batch(10 * number + part))
            pipe.step(*((words,) if pipe.has_first else ()), target=target if pipe.has_last else None)
            unsplit_step(whole, 10 * number + part)
        norm = float(pipe.clip_grad_norm_(0.1))
        norms.append(abs(norm - float(nn.utils.clip_grad_norm_(parameters(whole), 0.1))))
        found |= {f"grad {number} {key}": gap for key, gap in gaps(mine, whole, gradients=True).items()}
        ours.step()
        theirs.step()
    pipe.close()
    return found | gaps(mine, whole, gradients=False), norms


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_stages_with_replicas(workers: Workers, wrapper: str, name: str) -> None:
    """On a V placement both ends are on one rank, but each wrapper has its own tensor."""
    for found, norms in workers.run(train_replicas, wrapper, name):
        assert max(found.values()) < 1e-12, found
        assert max(norms) < 1e-12


def mix_wrappers(rank: int, ranks: int, wrapper: str) -> str:
    """Wrap one end only."""
    _, here = mesh().get_coordinate()
    schedule = build("1F1B", 2)
    mine = stages_of(apart(model(2)), schedule, here)
    if here == 0:
        mine = {0: WRAPPERS[wrapper](mine[0])}
    try:
        Pipeline(mine, schedule, loss_fn=loss_fn, group=mesh().get_group("pipeline"), ties=[TIE])
    except PenstockError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("wrapper", "message"), [("ddp", "averaged over replicas"), ("fsdp", "shard both stages alike")]
)
def test_both_ends_must_be_wrapped_alike(workers: Workers, wrapper: str, message: str) -> None:
    for said in workers.run(mix_wrappers, wrapper, fresh=True):
        assert "wte.weight of stage 0" in said
        assert "head.weight of stage 1" in said
        assert message in said


# Failures -------------------------------------------------------------------------------------------------------------


def fail_in_exchange(rank: int, ranks: int, how: str, *, group: Any) -> tuple[float, str, bool]:
    """Fail on the last rank, when it would send its gradient in the second step; returns what the others see."""
    schedule = build("1F1B", ranks)
    mine = stages_of(apart(model(ranks)), schedule, rank)
    transport = DistributedTransport(group, timeout=20.0)
    pipe = Pipeline(mine, schedule, loss_fn=loss_fn, transport=transport, ties=[TIE])
    step(pipe, 0)
    if rank == ranks - 1:
        in_exchange = "send_bytes" if how == "raises" else "send"
        original = pipe._engine.ties.finish_step

        def finish(used: Any) -> None:
            def end(*_: object) -> None:
                if how == "raises":
                    raise RuntimeError("no gradients today")
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(used, in_exchange, end)
            original(used)

        pipe._engine.ties.finish_step = finish  # type: ignore[method-assign]
    began = time.monotonic()
    said = ""
    for number in (1, 2):
        try:
            step(pipe, number)
        except PenstockError as error:
            said = str(error)
            break
        time.sleep(0.2)
    pipe.close()
    return time.monotonic() - began, said, all(one.grad is None for one in parameters(mine))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_fails_in_the_exchange_ends_the_step_of_all(workers: Workers, ranks: int) -> None:
    for seconds, said, dropped in workers.run(fail_in_exchange, "raises", ranks=ranks, fresh=True):
        assert seconds < 5
        assert f"rank {ranks - 1} failed" in said
        assert "no gradients today" in said
        assert dropped


def test_a_rank_that_is_killed_in_the_exchange(workers: Workers) -> None:
    first, last = workers.run(fail_in_exchange, "killed", ranks=2, fresh=True, deaths=True)
    assert isinstance(last, Ended)
    seconds, said, dropped = first
    assert seconds < 10
    assert "rank 1" in said
    assert dropped
