"""I and W call the hooks of a whole backward, as often and with the same gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn import functional

from execution.split_backward import halves
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
from penstock.execution.split_backward import leaf_gradients as leaf_module
from penstock.execution.split_backward import weight_gradients as products


class Calls:
    """What hooks saw: the numbers of a whole backward and of the two halves must be the same."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def __call__(self, name: str) -> Callable[..., None]:
        def hook(*values: Any) -> None:
            flat = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
            self.seen.append((name, [one.detach().clone() for one in flat if isinstance(one, torch.Tensor)]))

        return hook

    def by_name(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for name, values in sorted(self.seen, key=lambda pair: pair[0]):
            found.setdefault(name, []).append(values)
        return found


def hooked(register: Callable[[nn.Module, Calls], Any], module: nn.Module, *args: torch.Tensor) -> list[list[str]]:
    """Compare what hooks see; returns the names of those called in I and in W."""
    other = copy.deepcopy(module)
    ours, theirs = Calls(), Calls()
    kept = register(module, ours), register(other, theirs)
    split = splitter()
    halves: list[list[str]] = [[], []]
    for _ in range(2):
        del ours.seen[:], theirs.seen[:]
        found, weights = first_half(split, module, args)
        halves[0] = [name for name, _ in ours.seen]
        weights()
        halves[1] = [name for name, _ in ours.seen[len(halves[0]) :]]
        equal(found, whole(other, args))
        equal(gradients(module), gradients(other))
        expected = theirs.by_name()
        assert {name: len(calls) for name, calls in ours.by_name().items()} == {
            name: len(calls) for name, calls in expected.items()
        }
        for name, calls in ours.by_name().items():
            for call, wanted in zip(calls, expected[name], strict=True):
                equal(call, wanted)
    del kept
    return halves


def stack() -> nn.Module:
    """With a layer that is used twice, and another in between."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(nn.LayerNorm(4), layer, nn.Linear(4, 4), layer)


@pytest.mark.usefixtures("one_by_one")
def test_hooks_of_parameters() -> None:
    """Each sees the gradient of the microbatch once, whole, and in W."""

    def register(module: nn.Module, calls: Calls) -> None:
        for name, parameter in module.named_parameters():
            parameter.register_hook(calls(name))

    first, second = hooked(register, stack(), x_of(3, 4))
    assert first == []
    assert sorted(second) == ["0.bias", "0.weight", "1.bias", "1.weight", "2.bias", "2.weight"]


@pytest.mark.usefixtures("one_by_one")
def test_hooks_of_parameters_that_change_the_gradient() -> None:
    def register(module: nn.Module, calls: Calls) -> None:
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * 2 + 1)

    module = stack()
    plain = copy.deepcopy(module)
    hooked(register, module, x_of(3, 4))
    for _ in range(2):
        whole(plain, [x_of(3, 4)])
    for name, gradient in gradients(plain).items():
        assert gradient is not None
        equal([module.get_parameter(name).grad], [gradient * 2 + 2])


@pytest.mark.usefixtures("one_by_one")
def test_hooks_after_accumulation() -> None:
    def register(module: nn.Module, calls: Calls) -> None:
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda one, name=name: calls(name)(one.grad))

    first, second = hooked(register, stack(), x_of(3, 4))
    assert first == []
    assert len(second) == len(set(second)) == 6


@pytest.mark.usefixtures("one_by_one")
def test_hooks_of_the_nodes_of_leaves() -> None:
    """As data parallel modules have them."""

    def register(module: nn.Module, calls: Calls) -> list[Any]:
        nodes = [(name, get_gradient_edge(one).node) for name, one in module.named_parameters()]
        for name, node in nodes:
            node.register_hook(calls(name + " after"))
            node.register_prehook(calls(name + " before"))
        return nodes

    first, second = hooked(register, stack(), x_of(3, 4))
    assert first == []
    assert len(second) == len(set(second)) == 12


def test_hooks_of_tensors_in_between() -> None:
    """Also of the output of a product, and of what is made of weights; also if they change the gradient."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        def watched(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if self.calls is not None:
                tensor.register_hook(self.calls(name))
            tensor.register_hook(lambda gradient: gradient * 3)
            return tensor

        x = watched("input", x)
        h = watched("product", functional.linear(x, watched("weight", self.w * 2), watched("bias", self.b * 2)))
        h = watched("scaled", h.relu() * watched("scale", self.s.exp()))
        return watched("output", h @ self.w)

    module = Calling(run, w=(4, 4), b=(4,), s=(4,))
    module.calls = None

    def register(module: Any, calls: Calls) -> None:
        module.calls = calls

    first, second = hooked(register, module, x_of(4, 4))
    assert sorted(first) == ["input", "output", "product", "scale", "scaled"]
    assert sorted(second) == ["bias", "weight"]


@pytest.mark.parametrize("with_bias", [False, True])
def test_hooks_of_a_transposed_weight(with_bias: bool) -> None:
    """For some microbatches only. Without them the gradient goes to the weight itself."""

    def run(self: Any, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        turned = self.w.t()
        h = torch.addmm(self.b, x, turned) if with_bias else x @ turned
        if which.any():
            turned.register_hook(lambda gradient: gradient * 3)
        return h

    split = check_by_turns(Calling(run, w=(4, 4), b=(4,)))
    assert {type(one.points.targets[-1]) for one in split._cuts} == {int, tuple}, "to a leaf, along an edge"


def test_the_first_gradient_of_a_large_weight_is_not_copied(monkeypatch) -> None:
    made: list[torch.Tensor] = []

    def mm(*operands: torch.Tensor) -> torch.Tensor:
        made.append(torch.mm(*operands))
        return made[-1]

    for module in (products, leaf_module):
        monkeypatch.setattr(module, "mm", mm)
    for width, shared in ((2, halves.alone), (512, True)):
        module = nn.Linear(width, width, dtype=torch.float32)
        first_half(splitter(), module, [x_of(2, width, dtype=torch.float32)])[1]()
        assert module.weight.grad is not None
        assert (module.weight.grad.data_ptr() == made[-1].data_ptr()) is shared
    assert len(made) == 2


def test_a_retained_gradient_of_a_transposed_weight() -> None:
    kept: list[torch.Tensor] = []

    def run(self: Any, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        turned = self.w.t()
        if which.any():
            turned.retain_grad()
            kept.append(turned)
        return x @ turned

    check_by_turns(Calling(run, w=(4, 4)))
    assert len(kept) == 6
    for ours, theirs in zip(kept[::2], kept[1::2], strict=True):
        assert ours.grad is not None
        equal([ours.grad], [theirs.grad])


def test_hooks_of_the_nodes_of_leaves_that_only_the_graph_holds() -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(functional.layer_norm(x, (4,), self.scale, self.shift), self.w, self.b)
        product = y.grad_fn
        norm = product.next_functions[1][0]
        leaves = {
            "b": product.next_functions[0][0],
            "w": product.next_functions[2][0].next_functions[0][0],
            "scale": norm.next_functions[1][0],
            "shift": norm.next_functions[2][0],
        }
        for name, node in leaves.items():
            node.register_hook(self.calls(name))
        return y

    module = Calling(run, w=(3, 4), b=(3,), scale=(4,), shift=(4,))
    module.calls = None

    def register(module: Any, calls: Calls) -> None:
        module.calls = calls

    first, second = hooked(register, module, x_of(5, 4))
    assert (first, sorted(second)) == ([], ["b", "scale", "shift", "w"])


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4, bias=False), block])
def test_hooks_of_several_tensors(make) -> None:
    """One of them is enough to ask the engine which nodes run."""

    def register(module: nn.Module, calls: Calls) -> None:
        for name, parameter in module.named_parameters():
            register_multi_grad_hook([parameter], lambda found, name=name: calls(name)(*found))

    first, second = hooked(register, make(), x_of(5, 4))
    assert first == []
    assert len(second) == len(list(make().parameters()))


def test_weights_that_are_frozen_between_the_halves() -> None:
    """They get no gradient, and the others do."""
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight"):
        module, other, split = block(), block(), splitter()
        other.load_state_dict(module.state_dict())
        x = x_of(5, 4)
        _, weights = first_half(split, module, [x])
        module.get_parameter(name).requires_grad_(False)
        weights()
        assert module.get_parameter(name).grad is None
        whole(other, [x])
        other.get_parameter(name).grad = None
        equal(gradients(module), gradients(other))


def test_retained_gradients() -> None:
    kept: list[torch.Tensor] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.w
        h.retain_grad()
        kept.append(h)
        return h @ self.w

    check(Calling(run, w=(4, 4)), x_of(4, 4), times=1)
    equal([kept[0].grad], [kept[1].grad])


def test_hooks_of_modules() -> None:
    def register(module: nn.Module, calls: Calls) -> None:
        module[1].register_full_backward_hook(lambda _, inputs, outputs: calls("after")(*inputs, *outputs))
        module[1].register_full_backward_pre_hook(lambda _, outputs: calls("before")(*outputs))

    assert hooked(register, block(), x_of(5, 4)) == [["before", "after"], []]


def test_hooks_stay_when_a_backward_fails() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            raise ValueError("no")

    module = Calling(lambda self, x: Failing.apply(x) * self.b, b=(4,))
    seen: list[torch.Tensor] = []
    module.b.register_hook(seen.append)
    with pytest.raises(ValueError, match="no"):
        first_half(splitter(), module, [x_of(4, 4)])
    (module.b * 2).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize(
    "product",
    [
        lambda self, h: h @ self.w,
        lambda self, h: self.w @ h,
        lambda self, h: torch.addmm(self.b, h, self.w),
        lambda self, h: torch.addmm(self.b, self.w, h),
        lambda self, h: torch.bmm(h.view(1, 4, 4), self.w.view(1, 4, 4)),
        lambda self, h: torch.conv1d(h.view(1, 4, 4), self.w.view(4, 4, 1)),
    ],
)
def test_a_tensor_that_was_changed_is_reported(product: Any) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        y = product(self, h)
        h.add_(1)
        return y

    module, split = Calling(run, w=(4, 4), b=(4,)), splitter()
    for half in (lambda: first_half(split, module, [x_of(4, 4)]), lambda: whole(module, [x_of(4, 4)])):
        for _ in range(2):  # also when the form of the graph is known
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                half()
