"""Parameters that a step leaves untrained: an error where nothing else can be meant, else a warning."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from penstock.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleavedZeroBubble, ScheduleLoopedBFS

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


@pytest.fixture(name="one_rank")
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=True)


class Cut(nn.Module):
    """Detaches its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).detach()


def layer() -> nn.Module:
    return nn.Linear(4, 4)


def frozen(make: Callable[[], nn.Module] = layer) -> nn.Module:
    return make().requires_grad_(False)


def step(kind: type, *modules: nn.Module) -> None:
    stages = [PipelineStage(module, index, len(modules), torch.device("cpu")) for index, module in enumerate(modules)]
    schedule = kind(stages[0] if kind is ScheduleGPipe else stages, 2, loss_fn=mse_loss)
    schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))


SEVERAL = [ScheduleLoopedBFS, ScheduleInterleavedZeroBubble]


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("last", [Cut, lambda: frozen(Cut)])
def test_a_last_stage_that_detaches_is_refused(kind: type, last: Callable[[], nn.Module]) -> None:
    with pytest.raises(RuntimeError, match=r"stage 1: neither the output of the last stage nor the loss requires grad"):
        step(kind, layer(), last())


@pytest.mark.parametrize("module", [Cut, Checkpointed])
def test_a_single_stage_that_is_not_trained_is_refused(module: Callable[[], nn.Module]) -> None:
    with pytest.raises(RuntimeError, match=r"stage 0: neither .* although parameters of the stage do"):
        step(ScheduleGPipe, module())


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_model_in_which_all_is_frozen_is_warned_of(kind: type) -> None:
    with pytest.warns(UserWarning, match=r"stage 1: the loss does not require grad, so the step trains nothing"):
        step(kind, frozen(), frozen())


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("first", [Cut, Checkpointed])
def test_an_earlier_stage_that_is_not_trained_is_warned_of(kind: type, first: Callable[[], nn.Module]) -> None:
    last = layer()
    with pytest.warns(UserWarning, match=r"stage 0 has parameters that require grad, but its output does not"):
        step(kind, first(), last)
    assert last.weight.grad is not None


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("modules", [(frozen, layer), (layer, frozen), (nn.Identity, layer), (layer, Checkpointed)])
def test_frozen_and_checkpointed_stages_that_are_no_mistake(
    kind: type, modules: tuple[Callable[[], nn.Module]]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(kind, *(make() for make in modules))
