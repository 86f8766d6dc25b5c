"""A stage that returns memory which it uses again: no microbatch gets the values of another one unnoticed."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PenstockError, StageError, StepError
from penstock.runtime import DistributedTransport, Pipeline, run_in_threads

PLACES = [("LoopedBFS", 1), ("GPipe", 2), ("1F1B", 2)]
CHANGED = r"modified a tensor \(.*\) in place after returning it"


class Preallocated(nn.Module):
    """Writes every output into the same tensor, alone or in a tuple."""

    def __init__(self, *, alone=True):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("out", torch.empty(2, 3))
        self.adds_in_place = alone

    def forward(self, x):
        with torch.no_grad():
            self.out.copy_(self.layer(x))
        return self.out if self.adds_in_place else (self.out, x)


class Lazy(nn.Module):
    """The same with memory that it takes when it is first called: in inference mode, nobody counts changes of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.out = None

    def forward(self, x):
        if self.out is None:
            self.out = torch.empty(2, 3)
        self.out.copy_(self.layer(x))
        return self.out


class Second(nn.Module):
    def forward(self, x, *_):
        return x + 1


class AddInPlace(nn.Module):
    """Returns its input, modified in place."""

    def forward(self, x):
        return x.add_(1)


def run(modules, name, ranks, use, **options):
    schedule = ps.build(name, ranks=ranks, microbatches=4, **({"stages_per_rank": 2} if ranks == 1 else {}))

    def worker(transport):
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        with Pipeline(mine, schedule, loss_fn=functional.mse_loss, transport=transport, **options) as pipe:
            return use(pipe)

    return run_in_threads(worker, ranks, timeout=60)


def numbers(seed=0):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "ranks"), PLACES)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_evaluation_of_a_stage_that_returns_the_same_tensor(name, ranks, alone, mode):
    def evaluate(pipe):
        with mode():
            return pipe.eval(numbers())

    with pytest.raises((StepError, StageError), match=CHANGED):
        run([Preallocated(alone=alone), Second()], name, ranks, evaluate)


@pytest.mark.parametrize(("name", "ranks"), PLACES)
def test_evaluation_in_inference_mode_of_a_stage_that_keeps_memory_of_its_own(name, ranks):
    def evaluate(pipe):
        with torch.inference_mode():
            return pipe.eval(numbers())

    first = Lazy()
    output = run([first, Second()], name, ranks, evaluate)[-1]
    torch.testing.assert_close(output, first.layer(numbers()) + 1)


@pytest.mark.parametrize(("name", "ranks"), PLACES)
@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_a_first_stage_may_change_its_input_in_place(name, ranks, needed, mode):
    """Microbatches are parts of one tensor; a change of one is none of the others."""
    x = numbers().requires_grad_(needed)

    def evaluate(pipe):
        with mode():
            return pipe.eval(x)

    output = run([AddInPlace(), Second()], name, ranks, evaluate)[-1]
    torch.testing.assert_close(output, numbers() + 2)


class Counting(nn.Module):
    """Returns a buffer that it changes for every microbatch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return self.layer(x), self.count


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, count):
        return self.layer(x) * count


LATE = """
0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
"""


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
def test_a_tensor_that_is_changed_before_it_is_sent(shapes):
    """Where the schedule sends a microbatch after the forward of the next one."""
    modules = [Counting(), Scaled()]

    def worker(transport):
        mine = {transport.rank: modules[transport.rank]}
        schedule = ps.Schedule.from_text(LATE)
        with Pipeline(mine, schedule, loss_fn=functional.mse_loss, transport=transport, shapes=shapes) as pipe:
            return pipe.step(numbers(), target=numbers(1))

    with pytest.raises(StepError, match=CHANGED):
        run_in_threads(worker, 2, timeout=60)


def in_process(rank, ranks, mode, *, group):
    torch.set_num_threads(1)
    schedule = ps.build("GPipe", ranks=ranks, microbatches=4)
    module = Preallocated() if rank == 0 else Second()
    transport = DistributedTransport(group, timeout=60)
    try:
        with Pipeline({rank: module}, schedule, loss_fn=functional.mse_loss, transport=transport) as pipe, mode():
            pipe.eval(numbers())
    except PenstockError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_evaluation_in_processes(workers, mode):
    """The other rank may have all that it needs, and learn of it later."""
    assert "after returning it" in workers.run(in_process, mode, ranks=2)[0]
