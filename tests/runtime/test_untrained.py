"""A step that leaves parameters untrained is an error, as it is for the unsplit model; unless it is meant."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.errors import StageError, StepError
from penstock.runtime import Pipeline, Stage, run_in_threads


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool = True) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant, preserve_rng_state=False)


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


pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

#: The stages, the one that is named, and why.
UNTRAINED = {
    "reentrant checkpointing in the first stage": ([Checkpointed, layer], 0, "parameters that require a gradient"),
    "the same, and the rest is frozen": ([Checkpointed, frozen], 0, "parameters that require a gradient"),
    "a first stage that detaches": ([Cut, layer], 0, "parameters that require a gradient"),
    "a last stage that detaches": ([layer, Cut], 1, "parameters that require a gradient"),
    "a frozen last stage that detaches": ([layer, lambda: frozen(Cut)], 1, "inputs that require a gradient"),
    "nothing to train": ([frozen, frozen], 1, "the step trains nothing: neither the parameters of stage 1"),
}


def modules_of(case: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make() for make in UNTRAINED[case][0]]


def run(modules: list[nn.Module], name: str, ranks: int, **options: Any) -> list[Exception | None]:
    """What two steps raise on each rank."""
    several = {"stages_per_rank": 2} if ranks == 1 else {}
    schedule = ps.build(name, ranks=ranks, microbatches=4, **several)

    def worker(transport: Any) -> Exception | None:
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        try:
            with Pipeline(mine, schedule, loss_fn=mse_loss, transport=transport, **options) as pipe:
                for _ in range(2):  # ranks that wait for nothing in a step learn of its failure at their next call
                    pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))
        except (StageError, StepError) as error:
            return error
        return None

    return run_in_threads(worker, ranks, timeout=60)


def is_left_untrained(modules: list[nn.Module]) -> bool:
    """Whether the unsplit model raises, or leaves a parameter that requires a gradient without one."""
    whole = nn.Sequential(*modules)
    try:
        mse_loss(whole(torch.ones(8, 4)), torch.zeros(8, 4)).backward()
    except RuntimeError as error:
        return "does not require grad" in str(error)
    without = any(one.requires_grad and one.grad is None for one in whole.parameters())
    whole.zero_grad()
    return without


@pytest.mark.parametrize(("name", "ranks"), [("LoopedBFS", 1), ("GPipe", 2), ("1F1B", 2), ("ZB-H1", 2)])
@pytest.mark.parametrize("case", UNTRAINED)
def test_every_rank_raises_and_names_the_stage(case: str, name: str, ranks: int) -> None:
    modules = modules_of(case)
    assert is_left_untrained(modules)
    _, stage, why = UNTRAINED[case]
    for error in run(modules, name, ranks):
        assert f"stage {stage}" in str(error)
        assert why in str(error)
        assert "allow_untrained=True" in str(error)


@pytest.mark.parametrize("case", UNTRAINED)
def test_shapes_that_vary(case: str) -> None:
    _, stage, why = UNTRAINED[case]
    for error in run(modules_of(case), "1F1B", 2, shapes="per_microbatch"):
        assert f"stage {stage}" in str(error)
        assert why in str(error)


@pytest.mark.parametrize("case", UNTRAINED)
def test_it_can_be_meant(case: str) -> None:
    assert run(modules_of(case), "1F1B", 2, allow_untrained=True) == [None, None]


TRAINED = {
    "a frozen first stage": [frozen, layer],
    "a frozen last stage": [layer, frozen],
    "a first stage without parameters that detaches": [nn.Identity, layer],
    "checkpointing that is not reentrant": [lambda: Checkpointed(reentrant=False), layer],
    "reentrant checkpointing in a later stage": [layer, Checkpointed],
}


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
@pytest.mark.parametrize("case", TRAINED)
def test_frozen_and_checkpointed_stages_that_are_no_mistake(case: str, shapes: str) -> None:
    modules = [make() for make in TRAINED[case]]
    assert run(modules, "1F1B", 2, shapes=shapes) == [None, None]
    for parameter in nn.Sequential(*modules).parameters():
        assert (parameter.grad is not None) is parameter.requires_grad


class Sometimes(nn.Module):
    """Leaves out its layer for some microbatches, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x) if self.count == 2 else x


def test_a_stage_that_is_trained_by_some_microbatches() -> None:
    first = Sometimes()
    assert run([first, layer()], "LoopedBFS", 1) == [None]
    assert first.layer.weight.grad is not None


def test_a_stage_that_computes_its_own_gradients() -> None:
    class Own(nn.Module):
        """Its output has no history; ``add`` makes the gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.detach()

        def add(self) -> None:
            self.weight.grad = torch.ones(4)

    own = Own()
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=4, stages_per_rank=2)
    with Pipeline([Stage(0, own, dw_builder=lambda: own.add), Stage(1, layer())], schedule, loss_fn=mse_loss) as pipe:
        pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))
    assert own.weight.grad is not None


def test_reentrant_checkpointing_of_an_input_that_requires_a_gradient() -> None:
    module = Checkpointed()
    with Pipeline({0: module}, ps.build("GPipe", ranks=1, microbatches=4), loss_fn=mse_loss) as pipe:
        pipe.step(torch.ones(8, 4, requires_grad=True), target=torch.zeros(8, 4))
    assert module.layer.weight.grad is not None


def test_a_model_that_is_frozen_between_steps() -> None:
    """As the unsplit model, it has no backward from then on."""
    module = layer()
    with Pipeline({0: module}, ps.build("GPipe", ranks=1, microbatches=4), loss_fn=mse_loss) as pipe:
        pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))
        module.requires_grad_(False)
        with pytest.raises(StepError, match=r"trains nothing: neither the parameters of stage 0"):
            pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))


def test_a_schedule_without_backwards_and_an_evaluation_train_nothing() -> None:
    schedule = ps.build("ForwardOnly", ranks=1, microbatches=4)
    with Pipeline({0: frozen()}, schedule) as pipe:
        assert pipe.step(torch.ones(8, 4)).shape == (8, 4)
    with Pipeline({0: frozen()}, ps.build("GPipe", ranks=1, microbatches=4), loss_fn=mse_loss) as pipe:
        losses: list[torch.Tensor] = []
        pipe.eval(torch.ones(8, 4), target=torch.zeros(8, 4), losses=losses)
        assert len(losses) == 4


def test_check_parity_raises_too() -> None:
    with (
        Pipeline({0: Checkpointed()}, ps.build("GPipe", ranks=1, microbatches=4), loss_fn=mse_loss) as pipe,
        pytest.raises((StageError, StepError), match=r"stage 0 .*parameters that require a gradient"),
    ):
        pipe.check_parity(torch.ones(8, 4), target=torch.zeros(8, 4))
