"""A step that leaves parameters untrained is an error; unless it is meant."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from penstock.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleavedZeroBubble, ScheduleLoopedBFS

pytestmark = [
    pytest.mark.usefixtures("one_gloo_rank", "operations"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


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


EXAMPLE = {"input_args": torch.empty(2, 4), "output_args": torch.empty(2, 4)}


def pipeline(kind: type, *modules: nn.Module, loss_fn: Any = mse_loss, **given: Any) -> Any:
    stages = [
        PipelineStage(module, index, len(modules), torch.device("cpu"), **given) for index, module in enumerate(modules)
    ]
    return kind(stages[0] if kind is ScheduleGPipe else stages, 2, loss_fn=loss_fn)


def step(kind: type, *modules: nn.Module, **options: Any) -> None:
    pipeline(kind, *modules, **options).step(torch.ones(4, 4), target=torch.zeros(4, 4))


@pytest.fixture(name="shapes", params=["inferred", "given"])
def _shapes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return EXAMPLE if request.param == "given" else {}


class Detached(nn.Module):
    """Has no parameters, and detaches its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


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
def test_a_model_in_which_all_is_frozen_is_refused(kind: type, shapes: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"stage 1: the loss does not require grad, so the step trains nothing"):
        step(kind, frozen(), frozen(), **shapes)


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_loss_with_parameters_is_trained(kind: type, shapes: dict[str, Any]) -> None:
    scale = torch.ones(1, requires_grad=True)
    step(kind, frozen(), frozen(), loss_fn=lambda output, target: mse_loss(output * scale, target), **shapes)
    assert scale.grad is not None


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("first", [Cut, Checkpointed])
def test_an_earlier_stage_that_is_not_trained_is_refused(
    kind: type, first: Callable[[], nn.Module], shapes: dict[str, Any]
) -> None:
    with pytest.raises(RuntimeError, match=r"stage 0 has parameters that require grad, but its output does not"):
        step(kind, first(), layer(), **shapes)


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_stage_without_parameters_that_cuts_off_those_before_is_refused(kind: type, shapes: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"stage 1 has inputs that require grad, but .* stages before it are not"):
        step(kind, layer(), Detached(), layer(), **shapes)


@pytest.mark.parametrize("kind", SEVERAL)
def test_what_is_meant_is_accepted(kind: type, shapes: dict[str, Any]) -> None:
    for modules in ((frozen(), frozen()), (Cut(), layer()), (layer(), Detached(), layer()), (layer(), Cut())):
        schedule = pipeline(kind, *modules, **shapes)
        schedule.allow_untrained = True
        schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))


class Skipped(nn.Module):
    """Leaves out its layer in some calls."""

    def __init__(self, skips: set[int]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.skips = skips
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x if self.calls - 1 in self.skips else self.layer(x)


@pytest.mark.parametrize("skips", [{1}, {2, 3}])
def test_a_stage_may_leave_out_its_layer_in_a_microbatch_or_a_later_step(skips: set[int]) -> None:
    modules = Skipped(skips), layer()
    schedule = pipeline(ScheduleLoopedBFS, *modules, **EXAMPLE)
    for _ in range(2):
        schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    assert modules[0].calls == 4
    assert modules[0].layer.weight.grad is not None


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize(
    "modules",
    [
        (frozen, layer),
        (layer, frozen),
        (nn.Identity, layer),
        (layer, Checkpointed),
        (frozen, Detached, layer),
    ],
)
def test_frozen_and_checkpointed_stages_that_are_no_mistake(
    kind: type, modules: tuple[Callable[[], nn.Module]], shapes: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(kind, *(make() for make in modules), **shapes)
