"""Batches of the form of the one before are cut without looking at specs again; nothing else may differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import MicrobatchError
from penstock.execution.microbatches.specs import Replicate, TensorChunkSpec, register_splitter, unregister_splitter
from penstock.runtime.batches import Batch, Batches

NO_SPECS = {"args_spec": None, "kwargs_spec": None, "target_spec": None}


def batches(microbatches: int = 3, *, first: bool = True, last: bool = True, **specs: Any) -> Batches:
    return Batches(0, first=first, last=last, microbatches=microbatches, specs=NO_SPECS | specs)


def equal(one: Batch, other: Batch) -> None:
    assert one.counts == other.counts
    assert one.kwargs == other.kwargs
    torch.testing.assert_close(one.args, other.args, rtol=0, atol=0)
    torch.testing.assert_close(
        [[] if target is None else target for target in one.targets],
        [[] if target is None else target for target in other.targets],
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("varying", [True, False])
@pytest.mark.parametrize(
    ("specs", "shapes", "target"),
    [
        ({}, [(7, 2)], (7,)),
        ({}, [(7, 2), (7,)], None),
        ({"args_spec": (TensorChunkSpec(1), Replicate)}, [(2, 7), (5,)], (7,)),
        ({"target_spec": TensorChunkSpec(1)}, [(7,)], (2, 7)),
        ({"target_spec": Replicate}, [(7,)], (2,)),
    ],
)
def test_the_second_of_a_form_is_cut_as_the_first(specs, shapes, target, varying) -> None:
    def made() -> tuple[Any, ...]:
        return tuple(torch.randn(shape) for shape in shapes), {}, None if target is None else torch.randn(target)

    several = batches(**specs)
    several.of_step(*made(), varying=varying)
    assert several._known is not None
    second = made()
    equal(several.of_step(*second, varying=varying), batches(**specs).of_step(*second, varying=varying))


def test_parts_of_the_second_need_gradients_as_it_does() -> None:
    several = batches(2)
    several.of_step((torch.ones(4),), {}, None, varying=False)
    batch = several.of_step((torch.ones(4, requires_grad=True),), {}, None, varying=False)
    assert [args[0].requires_grad for args in batch.args] == [True, True]


@pytest.mark.parametrize(
    "other",
    [torch.ones(6, 2), torch.ones(7, 3), torch.ones(7, 2, dtype=torch.float64), torch.nn.Parameter(torch.ones(7, 2))],
)
def test_another_form_is_looked_at_again(other) -> None:
    several = batches()
    for x in (torch.ones(7, 2), other, torch.ones(7, 2)):
        equal(several.of_step((x,), {}, None, varying=True), batches().of_step((x,), {}, None, varying=True))


def test_the_form_knows_arguments_from_target() -> None:
    several = batches()
    several.of_step((torch.ones(6), torch.ones(6)), {}, None, varying=True)
    batch = several.of_step((torch.ones(6),), {}, torch.ones(6), varying=True)
    assert len(batch.args[0]) == 1
    assert batch.counts.targets == [2, 2, 2]


def test_a_batch_that_was_refused_is_refused_again() -> None:
    several = batches()
    several.of_step((torch.ones(6),), {}, torch.ones(6), varying=True)
    for _ in range(2):
        with pytest.raises(MicrobatchError, match="have 6 and 5 samples"):
            several.of_step((torch.ones(6),), {}, torch.ones(5), varying=True)


def test_a_splitter_for_tensors_is_asked_each_time() -> None:
    several = batches(2)
    several.of_step((torch.arange(4),), {}, None, varying=True)
    register_splitter(torch.Tensor, lambda tensor, count: [tensor + index for index in range(count)])
    try:
        batch = several.of_step((torch.arange(4),), {}, None, varying=True)
    finally:
        unregister_splitter(torch.Tensor)
    assert batch.args[1][0].tolist() == [1, 2, 3, 4]


def test_a_rank_in_the_middle_needs_nothing() -> None:
    several = batches(2, first=False, last=False)
    for _ in range(2):
        batch = several.of_step((torch.ones(4),), {}, torch.ones(4), varying=True)
        assert batch[:3] == ([(), ()], [{}, {}], [None, None])
        assert batch.counts == (None, None, None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_that_is_replicated_is_not_looked_into() -> None:
    several = batches(2, args_spec=(None, Replicate))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for _ in range(2):
        batch = several.of_step((torch.ones(4), nested), {}, None, varying=True)
        assert [args[1] is nested for args in batch.args] == [True, True]


def test_specs_are_those_that_were_given() -> None:
    given: list[Any] = [TensorChunkSpec(0)]
    several = batches(2, args_spec=given)
    several.of_step((torch.ones(4, 6),), {}, None, varying=True)
    given[0] = TensorChunkSpec(1)
    for shape in ((4, 6), (8, 6)):
        batch = several.of_step((torch.ones(shape),), {}, None, varying=True)
        assert batch.args[0][0].shape == (shape[0] // 2, 6)
