"""I and W where less is saved: checkpoints, saved tensors elsewhere, sparse weights, autocast."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, save_on_cpu
from torch.utils.checkpoint import checkpoint

from execution.split_backward.halves import (
    Calling,
    block,
    check,
    check_by_turns,
    equal,
    first_half,
    gradients,
    splitter,
    whole,
    x_of,
)


def test_checkpointing() -> None:
    """The recomputed graph is inside of its nodes; what it gives for weights is made in I, and added in W."""
    run = lambda self, x: self.last(checkpoint(self.block, self.first(x), use_reentrant=False))  # noqa: E731
    check(Calling(run, first=nn.Linear(4, 4), block=block(), last=nn.Linear(4, 4)), x_of(5, 4))


def test_checkpointing_with_a_backward_inside() -> None:
    """It reaches parameters by itself, and cannot run when only some gradients are asked for."""
    run = lambda self, x: self.last(checkpoint(self.block, self.first(x), use_reentrant=True))  # noqa: E731
    check(Calling(run, first=nn.Linear(4, 4), block=block(), last=nn.Linear(4, 4)), x_of(5, 4), early=True)
    alone = lambda self, x: checkpoint(self.block, x, use_reentrant=True)  # noqa: E731
    check(Calling(alone, block=block()), x_of(5, 4), early=True)


def test_saved_tensors_elsewhere() -> None:
    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with save_on_cpu():
                return self.inner(x)

    check(nn.Sequential(nn.Linear(4, 4), Elsewhere(), nn.Linear(4, 4)), x_of(5, 4))


def test_saved_tensors_elsewhere_for_some_microbatches() -> None:
    module = block()
    other = copy.deepcopy(module)
    split = splitter()
    for number in range(6):
        args = [x_of(5, 4, seed=number)]
        if number % 2:
            with save_on_cpu():
                found, weights = first_half(split, module, args)
        else:
            found, weights = first_half(split, module, args)
        weights()
        equal(found, whole(other, args))
        equal(gradients(module), gradients(other))
    assert [len(cut.points.places) for cut in split._cuts] == [2, 0]


def test_an_output_less_in_some_microbatches() -> None:
    """Of the one that is left, places that are known in the larger graph are not there."""

    def run(self: Any, x: torch.Tensor, both: torch.Tensor) -> Any:
        h = self.first(x)
        return (h * h, self.last(h)) if both.any() else h * h

    check_by_turns(Calling(run, first=nn.Linear(4, 4), last=nn.Linear(4, 4)))


@pytest.mark.parametrize("second", [(1, 3), (5, 3), (5, 1)])
def test_a_bias_of_other_dimensions_in_some_microbatches(second) -> None:
    """The graph has the same form: which bias it is, a module may choose."""

    def run(self: Any, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.other if which.any() else self.vector, x, self.weight.t())

    split = check_by_turns(Calling(run, weight=(3, 4), vector=3, other=second))
    assert [len(cut.points.places) for cut in split._cuts] == [1, 1]


@pytest.mark.parametrize("attribute", [7, torch.ones(3)])
def test_a_function_with_an_attribute_of_a_leaf(attribute) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.variable = attribute
            return value * 2

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    run = lambda self, x: torch.addmm(Doubled.apply(self.bias), x, self.weight.t())  # noqa: E731
    check(Calling(run, weight=(3, 4), bias=(1, 3)), x_of(5, 4))


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_weight(sparse) -> None:
    weight = sparse(torch.eye(4, dtype=torch.float64)).requires_grad_()
    x = x_of(5, 4)
    root = get_gradient_edge(torch.mm(x, weight))
    found, weights = splitter().input_backward([root], [torch.ones(5, 4, dtype=torch.float64)], [x])
    weights()
    equal(found, [torch.ones(5, 4, dtype=torch.float64)])
    assert weight.grad is not None
    expected = x.detach().sum(0, keepdim=True).T * torch.ones(4, 4, dtype=torch.float64)
    there = torch.eye(4, dtype=torch.bool)
    equal([weight.grad.to_dense()[there]], [expected[there]])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("product", [torch.mm, lambda x, weight: torch.mm(x, weight.t())], ids=["as it is", "turned"])
@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_weight_that_is_sparse_in_some_microbatches(product, sparse) -> None:
    """The graph has the same form; the gradient of a sparse weight is not that of a dense one."""
    dense, x = torch.eye(4, dtype=torch.float64), x_of(5, 4)
    weights = [dense.clone().requires_grad_(), sparse(dense).requires_grad_()]
    seed = torch.ones(5, 4, dtype=torch.float64)
    split = splitter()
    for weight in weights * 2:
        _, weight_backward = split.input_backward([get_gradient_edge(product(x, weight))], [seed], [x])
        weight_backward()
        found, weight.grad = weight.grad, None
        torch.autograd.backward(product(x.detach(), weight), seed)
        expected, weight.grad = weight.grad, None
        assert found is not None and expected is not None  # noqa: PT018
        assert found.layout is expected.layout
        equal([found.to_dense()], [expected.to_dense()])
    assert [len(cut.points.places) for cut in split._cuts] == [1, 0]


def test_autocast() -> None:
    """Casts of weights are kept for the whole forward, so that two layers with one weight share a node."""
    torch.set_default_dtype(torch.float32)

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(block(), block())
            self.twice = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.twice(self.inner(self.twice(x)))

    module = Casting()
    split = check(module, x_of(5, 4, dtype=torch.float32), tolerance=1e-2)
    assert len(split._cuts[0].points.places) == 6, "every linear layer is split"
