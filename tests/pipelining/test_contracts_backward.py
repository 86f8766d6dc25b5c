"""The backward of a stage as functions: whole, and in two halves."""

import copy

import pytest
import torch
from torch import nn

from pipelining.contracts import WIDTH, gradients, layers, no_tensors_in_cycles, numbers, summed


@pytest.fixture
def b(package):
    return package._backward


class Branches(nn.Module):
    """An operation with two outputs, each with a parameter of its own behind it."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(WIDTH // 2, WIDTH // 2)
        self.right = nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x):
        left, right = x.split(WIDTH // 2, dim=-1)
        return self.left(left) * self.right(right)


def problem(module):
    """A loss of the module, its input, and what autograd makes of the same."""
    torch.manual_seed(0)
    x, target = numbers(1, 6, WIDTH).requires_grad_(), numbers(2, 6, WIDTH)
    other, other_x = copy.deepcopy(module), x.detach().clone().requires_grad_()
    other(other_x).square().sum().backward()
    return x, module(x).square().sum(), other_x.grad, gradients(other), target


def assert_same(module, expected):
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(gradient, expected[name])


def test_the_whole(b):
    module = layers(1)[0]
    x, loss, input_gradient, expected, _ = problem(module)
    found = b.stage_backward(stage_output=loss, output_grads=None, input_values=(x,))
    assert isinstance(found, tuple)
    torch.testing.assert_close(found[0], input_gradient)
    assert_same(module, expected)


def test_the_gradients_of_inputs(b):
    """In the input as well as returned; the parameters have none yet."""
    module = layers(1)[0]
    x, loss, input_gradient, _, _ = problem(module)
    found, groups = b.stage_backward_input(
        stage_outputs_or_loss=(loss,), output_grads=None, input_values=[x], weights=module.parameters()
    )
    torch.testing.assert_close(found[0], input_gradient)
    torch.testing.assert_close(x.grad, input_gradient)
    assert isinstance(groups, list)
    assert all(isinstance(group, dict) for group in groups)
    assert set(gradients(module).values()) == {None}


@pytest.mark.parametrize("make", [lambda: layers(1)[0], Branches])
@pytest.mark.parametrize("retain", [False, True])
def test_both_halves(b, make, retain):
    module = make()
    x, loss, input_gradient, expected, _ = problem(module)
    found, groups = b.stage_backward_input([loss], None, [x], module.parameters())
    assert b.stage_backward_weight(module.parameters(), groups, retain_graph=retain) is not None
    torch.testing.assert_close(found[0], input_gradient)
    assert_same(module, expected)


def test_halves_add_up_over_microbatches(b):
    module = layers(1)[0]
    other = copy.deepcopy(module)
    with no_tensors_in_cycles():
        for seed in range(5):
            x = numbers(seed, 3, WIDTH).requires_grad_()
            _, groups = b.stage_backward_input([module(x).square().sum()], None, [x], module.parameters())
            b.stage_backward_weight(module.parameters(), groups)
            other(x.detach()).square().sum().backward()
    assert_same(module, gradients(other))


def test_halves_with_gradients_of_outputs(b):
    """As in the middle of a pipeline: a gradient comes for every output, and none for one that has none."""
    module = layers(1)[0]
    other = copy.deepcopy(module)
    x, gradient = numbers(1, 3, WIDTH).requires_grad_(), numbers(2, 3, WIDTH)
    outputs = (module(x), torch.ones(2))
    found, groups = b.stage_backward_input(outputs, (gradient, None), [x, torch.ones(2)], module.parameters())
    b.stage_backward_weight(module.parameters(), groups)
    other_x = x.detach().clone().requires_grad_()
    other(other_x).backward(gradient)
    torch.testing.assert_close(found[0], other_x.grad)
    assert found[1] is None
    assert_same(module, gradients(other))


def test_inputs_that_are_no_tensors_or_need_no_gradient(b):
    module = layers(1)[0]
    x, plain = numbers(1, 3, WIDTH).requires_grad_(), numbers(2, 3, WIDTH)
    output = module(x + plain)
    found = b.stage_backward((output,), (torch.ones_like(output),), [x, plain, 3, None])
    assert [type(gradient) for gradient in found] == [torch.Tensor, *[type(None)] * 3]


def test_outputs_in_a_structure(b):
    x = numbers(1, 3, WIDTH).requires_grad_()
    outputs = {"one": x * 2, "more": [x * 3, (x * 4,)]}
    ones = torch.ones(3, WIDTH)
    found = b.stage_backward(outputs, {"one": ones, "more": [ones, (ones,)]}, (x,))
    torch.testing.assert_close(found[0], 9 * ones)


def test_an_error_of_autograd_is_reported_with_the_stage(b):
    x = numbers(1, 3, WIDTH).requires_grad_()
    output = x * 2
    with pytest.raises(RuntimeError):
        b.stage_backward((output,), (torch.ones(7),), (x,))


def test_a_loss_without_a_graph(b):
    assert b.stage_backward(torch.ones(()), None, (numbers(1, 2),)) == (None,)


def test_halves_of_a_module_that_ignores_its_input(b):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return self.weight * 2 + x * 0

    module = Constant()
    x = numbers(1, WIDTH).requires_grad_()
    _, groups = b.stage_backward_input([summed(module(x), 0)], None, [x], module.parameters())
    b.stage_backward_weight(module.parameters(), groups)
    torch.testing.assert_close(module.weight.grad, torch.full((WIDTH,), 8.0))


def test_a_sum_over_losses_of_a_schedule(b):
    """A weight that is used twice gets both of its parts."""
    shared = nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(shared, nn.Tanh(), shared)
    x, loss, input_gradient, expected, _ = problem(module)
    found, groups = b.stage_backward_input([loss], None, [x], module.parameters())
    b.stage_backward_weight(module.parameters(), groups)
    torch.testing.assert_close(found[0], input_gradient)
    assert_same(module, expected)


@pytest.mark.parametrize("kept", [(True, True), (True, False), (False, True), (False, False)])
def test_what_is_saved_between_the_halves_can_be_changed(b, kept):
    """The gradients of a group are a list of tuples; where there is none, nothing flows."""
    module = Branches()
    x, loss, _, expected, _ = problem(module)
    _, groups = b.stage_backward_input([loss], None, [x], module.parameters())
    assert len(groups) == 2
    for group, keep in zip(sorted(groups, key=lambda group: len(group["grads"])), kept, strict=True):
        group["grads"] = [tuple(g if keep else None for g in saved) for saved in group["grads"]]
    b.stage_backward_weight(module.parameters(), groups)
    assert sum(gradient is not None for gradient in gradients(module).values()) == 2 * sum(kept)
    for name, gradient in gradients(module).items():
        if gradient is not None:
            torch.testing.assert_close(gradient, expected[name])
