"""Nothing is left of a step: neither tensors nor memory, and without the help of the garbage collector."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline, Replicate

WARM_UP, STEPS, EVERY = 20, 200, 20
PAGE = os.sysconf("SC_PAGE_SIZE")
WIDTH, SAMPLES = 256, 128
ROOM = 3 << 19
"""Bytes by which memory may grow: what an allocator does. An activation of each step would be twice that."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, skip=None, *, scale):
        y = torch.tanh(self.layer(self.norm(x))) * scale
        return y, (x if skip is None else skip + x)


class Last(Block):
    def forward(self, x, skip=None, *, scale):
        y, skip = super().forward(x, skip, scale=scale)
        return y + skip


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def live() -> Counter:
    """The tensors that there are, by their shapes."""
    # By type: some objects of torch warn when they are asked for their class.
    return Counter(str(tuple(one.shape)) for one in gc.get_objects() if issubclass(type(one), torch.Tensor))


def measured(rank, ranks, name, options, *, group):
    """Live tensors and resident bytes after every few steps; in each are a step, an evaluation and an optimizer's."""
    schedule = ps.build(name, ranks=ranks, microbatches=4)
    last = schedule.stages - 1
    modules = {index: (Last if index == last else Block)() for index in schedule.placement.stages_of(rank)}
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    x, target, scale = (
        torch.randn(SAMPLES, WIDTH, requires_grad=True),
        torch.randn(SAMPLES, WIDTH),
        torch.ones(1, requires_grad=True),
    )
    with Pipeline(
        modules, schedule, loss_fn=functional.mse_loss, group=group, kwargs_spec={"scale": Replicate}, **options
    ) as pipe:

        def once():
            args = (x * 2,) if pipe.has_first else ()
            y = target if pipe.has_last else None
            losses = []
            output = pipe.step(*args, target=y, losses=losses, scale=scale)
            assert (output is not None) == pipe.has_last
            optimizer.step()
            optimizer.zero_grad()
            x.grad = scale.grad = None
            pipe.eval(*[arg[:3] for arg in args], target=None if y is None else y[:3], scale=scale)

        for _ in range(WARM_UP):
            once()
        gc.collect()
        gc.disable()
        try:
            tensors, memory = [], []
            for number in range(STEPS + 1):
                if number % EVERY == 0:
                    tensors.append(live())
                    memory.append(resident())
                once()
        finally:
            gc.enable()
    return tensors, memory


CASES = [
    ("ZBVZeroBubble", {}),
    ("1F1B", {"shapes": "per_microbatch"}),
    pytest.param("Interleaved1F1B", {}, marks=pytest.mark.full),
    pytest.param("DualPipeV", {"shapes": "per_microbatch"}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_nothing_is_left_of_a_step(workers, name, options):
    for rank, (tensors, memory) in enumerate(workers.run(measured, name, options, ranks=2, limit=120)):
        assert len(tensors) == STEPS // EVERY + 1
        for later in tensors[1:]:
            assert later == tensors[0], f"rank {rank}: {later - tensors[0]} are more than before"
        # The first half of the steps may still fill the pools of the allocator.
        grown = memory[-1] - memory[len(memory) // 2]
        assert grown <= ROOM, f"rank {rank}: {grown} bytes more; {memory}"


def between(rank, ranks, *, group):
    """What is alive after steps, and after an evaluation, that was not before."""
    schedule = ps.build("ZBVZeroBubble", ranks=ranks, microbatches=6)
    modules = {index: nn.Linear(WIDTH, WIDTH) for index in schedule.placement.stages_of(rank)}
    x, target = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    with Pipeline(modules, schedule, loss_fn=functional.mse_loss, group=group) as pipe:
        gc.collect()
        gc.disable()
        try:
            before = live()
            for _ in range(2):
                pipe.step(*[x] * pipe.has_first, target=target if pipe.has_last else None, return_outputs=False)
            kept = [parameter.grad for module in modules.values() for parameter in module.parameters()]
            after = live()
            pipe.eval(*[x] * pipe.has_first)
            evaluated = live()
        finally:
            gc.enable()
    return dict(after - before), dict(evaluated - after), len(kept)


def test_only_gradients_and_the_loss_are_there_between_steps(workers):
    first, last = workers.run(between, ranks=2)
    for rank, (more, after_evaluation, parameters) in enumerate((first, last)):
        loss = {"()": 1} if rank == 0 else {}  # pipe.loss, where the last stage of the V is
        assert more == {f"({WIDTH}, {WIDTH})": parameters / 2, f"({WIDTH},)": parameters / 2} | loss
        assert after_evaluation == {}
