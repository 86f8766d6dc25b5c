"""Edges over which one tensor goes, and where graphs begin."""

import torch
from torch.autograd.graph import get_gradient_edge

from penstock.execution.autograd import gradient_edge
from penstock.execution.links.single_tensor import is_single
from penstock.execution.value_spec import describe


def test_a_link_is_single_if_that_holds_for_every_microbatch():
    one, plain = describe(torch.ones(2, requires_grad=True)), describe(torch.ones(2))
    several = describe((torch.ones(2, requires_grad=True),))
    assert is_single([one, one])
    assert not is_single([one, plain])
    assert not is_single([one, several])


class Twice(torch.autograd.Function):
    """Its node is owned by Python."""

    @staticmethod
    def forward(_ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(_ctx, first, second):
        return first * 2 + second * 3


def test_graphs_begin_where_torch_says():
    x = torch.ones(3, requires_grad=True)
    for tensor in (x, x * 2, x.unbind()[2], Twice.apply(x)[1]):
        assert gradient_edge(tensor)[:2] == get_gradient_edge(tensor)[:2]


def test_a_graph_that_python_owns_lives_by_its_edge():
    x = torch.ones(3, requires_grad=True)
    edge = gradient_edge(Twice.apply(x)[1])
    (found,) = torch.autograd.grad(edge, x, torch.ones(3))
    assert found.tolist() == [3, 3, 3]
