"""What is known of torch's autograd beyond its documentation: these fail when torch changes it."""

import pytest
import torch

from penstock.execution.autograd import is_inplace_on_leaf


def leaf():
    return torch.ones(2, requires_grad=True)


def modified_before_backward():
    x = leaf()
    y = x.exp()
    y.add_(1)
    y.sum().backward()


@pytest.mark.parametrize(
    ("provoke", "expected"),
    [
        (lambda: leaf().add_(1), True),
        (lambda: torch.nn.ReLU(inplace=True)(leaf()), True),
        (lambda: leaf()[:1].mul_(2), True),
        (modified_before_backward, False),
        (lambda: leaf().expand(3, 2).detach().add_(1), False),
        (lambda: leaf() @ torch.ones(3), False),
    ],
)
def test_an_error_for_a_leaf_modified_in_place_is_recognized(provoke, expected):
    with pytest.raises(RuntimeError) as error:
        provoke()
    assert is_inplace_on_leaf(error.value) is expected
