"""``pipe.check_parity`` with a parameter that two stages have: as one object, or as copies that train apart."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.errors import StageError
from penstock.runtime import Pipeline, run_in_threads
from penstock.runtime.parity import Parity

WORDS, WIDTH = 7, 4
SCHEDULES = [("1F1B", 2), ("1F1B", 3), ("ZB-H1", 2), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)]


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class Doubled(torch.autograd.Function):
    """The same values, with a wrong gradient where the engine is asked for certain gradients, as for halves."""

    @staticmethod
    def forward(_ctx: Any, w: torch.Tensor) -> torch.Tensor:
        return w.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 if torch.autograd._is_checkpoint_valid() else 2)


class Wrong(Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[..., None] * Doubled.apply(self.weight).t()).sum(-2)


def modules_of(stages: int, head: type[Head] = Head) -> list[nn.Module]:
    torch.manual_seed(0)
    embedding = nn.Embedding(WORDS, WIDTH)
    between = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(stages - 2)]
    return [embedding, *between, head(embedding.weight)]


def probe(modules: list[nn.Module], schedule: ps.Schedule, **options: Any) -> list[Parity | StageError]:
    """What each rank gets from the probe, in threads."""
    words = torch.arange(12).reshape(6, 2) % WORDS

    def run(transport: Any) -> Parity | StageError:
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        loss_fn = lambda output, target: cross_entropy(output.flatten(0, 1), target.flatten())  # noqa: E731
        with Pipeline(mine, schedule, loss_fn=loss_fn, transport=transport, **options) as pipe:
            try:
                return pipe.check_parity(words, target=words.flip(1))
            except StageError as error:
                return error

    return run_in_threads(run, schedule.ranks, timeout=60)


@pytest.mark.parametrize(("name", "ranks"), SCHEDULES)
def test_a_parameter_that_is_one_object_on_two_ranks_is_compared_once(name: str, ranks: int) -> None:
    schedule = ps.build(name, ranks=ranks, microbatches=3)
    modules = modules_of(schedule.stages)
    kept = modules[0].weight.grad = torch.ones(WORDS, WIDTH)
    for found in probe(modules, schedule):
        assert isinstance(found, Parity), found
        weights = [one for one in found.differences if (one.stage, one.name) == (0, "weight") and one.size]
        assert {one.way for one in weights} == {"in halves", "scheduled"}
        assert not [one for one in found.differences if one.stage == schedule.stages - 1 and one.name == "weight"]
        assert not found.copies
    assert modules[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(WORDS, WIDTH))


def test_what_is_compared_is_the_gradient_of_both_uses() -> None:
    schedule = ps.build("1F1B", ranks=2, microbatches=3)
    modules = modules_of(2)
    found = probe(modules, schedule)[0]
    assert isinstance(found, Parity)
    words = torch.arange(12).reshape(6, 2) % WORDS
    loss = cross_entropy(nn.Sequential(*modules)(words).flatten(0, 1), words.flip(1).flatten())
    (gradient,) = torch.autograd.grad(loss, [modules[0].weight])
    size = next(one.size for one in found.differences if one.name == "weight" and one.way == "scheduled")
    assert size == pytest.approx(float(gradient.abs().max()), rel=1e-5)


def test_what_is_wrong_with_one_of_both_uses_is_found() -> None:
    schedule = ps.build("ZB-H1", ranks=2, microbatches=3)
    for error in probe(modules_of(2, Wrong), schedule):
        assert isinstance(error, StageError)
        assert "stage 0, weight of Embedding: when its backward runs in two halves" in str(error)


@pytest.mark.parametrize(("name", "ranks"), SCHEDULES)
def test_copies_that_train_apart_are_named(name: str, ranks: int) -> None:
    """An embedding and something else with its values are hardly two parameters: the report says what to write."""
    schedule = ps.build(name, ranks=ranks, microbatches=3)
    last = schedule.stages - 1
    modules = modules_of(schedule.stages)
    modules[-1] = copy.deepcopy(modules[-1])
    said = f"weight of stage 0 and weight of stage {last} have equal values but no tie"
    with pytest.warns(UserWarning, match=said):
        results = probe(modules, schedule)
    for found in results:
        assert isinstance(found, Parity), found
        assert found.copies == (("weight of stage 0", f"weight of stage {last}"),)
        assert found.untied == (ps.Tie(((0, "weight"), (last, "weight"))),)
        assert "match those of the stages run one after the other" in str(found)
        assert said in str(found)
        assert f"pass ties=[Tie(((0, 'weight'), ({last}, 'weight')))]" in str(found)


@pytest.mark.parametrize(("name", "ranks"), SCHEDULES)
def test_declared_copies_are_compared_with_the_one_parameter(name: str, ranks: int) -> None:
    """Each holder has the gradient of both uses; what the report said is what to declare."""
    schedule = ps.build(name, ranks=ranks, microbatches=3)
    last = schedule.stages - 1
    modules = modules_of(schedule.stages)
    words = torch.arange(12).reshape(6, 2) % WORDS
    loss = cross_entropy(nn.Sequential(*modules)(words).flatten(0, 1), words.flip(1).flatten())
    (gradient,) = torch.autograd.grad(loss, [modules[0].weight])
    modules[-1] = copy.deepcopy(modules[-1])
    for found in probe(modules, schedule, ties=[ps.Tie(((0, "weight"), (last, "weight")))]):
        assert isinstance(found, Parity), found
        assert (found.copies, found.untied) == ((), ())
        sizes = {one.stage: one.size for one in found.differences if one.name == "weight" and one.way == "scheduled"}
        is_local = schedule.placement.rank_of[0] == schedule.placement.rank_of[last]
        assert sizes.keys() == ({0} if is_local else {0, last})
        assert sizes == dict.fromkeys(sizes, pytest.approx(float(gradient.abs().max()), rel=1e-5))


def test_wrong_halves_of_a_tied_parameter_are_found_at_every_holder() -> None:
    schedule = ps.build("ZB-H1", ranks=2, microbatches=3)
    modules = modules_of(2, Wrong)
    modules[-1] = copy.deepcopy(modules[-1])
    for error in probe(modules, schedule, ties=["weight"]):
        assert isinstance(error, StageError)
        assert "stage 0, weight of Embedding: when its backward runs in two halves" in str(error)
        assert "stage 1, weight of Wrong: when its backward runs in two halves" in str(error)


def test_layers_that_begin_alike_are_reported_without_a_warning() -> None:
    """As those of ``nn.TransformerEncoder`` do, which are copies of one."""
    modules = modules_of(4)
    modules[2] = copy.deepcopy(modules[1])
    for found in probe(modules, ps.build("1F1B", ranks=4, microbatches=3)):
        assert isinstance(found, Parity), found
        assert ("0.weight of stage 1", "0.weight of stage 2") in found.copies
        assert found.untied == ()
        assert "0.weight of stage 1, 0.weight of stage 2 have equal values" in str(found)


def test_parameters_that_begin_with_the_same_number_are_no_copies() -> None:
    """As scales of 1 and biases of 0 do."""
    modules = [nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, WORDS)]
    modules.insert(1, nn.LayerNorm(WIDTH))
    found = probe(modules, ps.build("1F1B", ranks=3, microbatches=3))[0]
    assert isinstance(found, Parity)
    assert found.copies == ()
    assert "equal values" not in str(found)
