"""What I leaves for W, and nothing else, lives between them."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from execution.split_backward.halves import (
    Calling,
    check,
    first_half,
    leaf,
    seeds_of,
    splitter,
    x_of,
)
from penstock.errors import StageError


class Transformer(nn.Module):
    """A block as models have them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.query_key_value(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.norms[1](x))))


class Storage:
    """The memory of a tensor, without keeping it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = StorageWeakRef(tensor.untyped_storage())
        self.size = tensor.untyped_storage().nbytes()

    @property
    def key(self) -> int:
        return self.reference.cdata

    @property
    def alive(self) -> bool:
        return not self.reference.expired()


def saved_by(y: torch.Tensor) -> dict[str, list["Storage"]]:
    """What every node of a graph has saved, by the name of the node."""
    found: dict[str, list[Storage]] = {}
    stack, seen = [y.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [child for child, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(value := getattr(node, name), torch.Tensor):
                found.setdefault(node.name(), []).append(Storage(value))
    return found


def test_what_w_does_not_need_is_free_after_i(without_collector: None) -> None:
    """And after W nothing is left, though nobody has collected garbage."""
    torch.set_default_dtype(torch.float32)
    width = 64
    module = nn.Sequential(Transformer(width, 4), Transformer(width, 4))
    split = splitter()
    for _ in range(2):
        first_half(split, module, [x_of(2, 32, width, dtype=torch.float32)])[1]()
    x = leaf(x_of(2, 32, width, dtype=torch.float32))
    y = module(x)
    own = {Storage(one).key for one in (*module.parameters(), x)}
    saved = {name: [one for one in values if one.key not in own] for name, values in saved_by(y).items()}
    everything = {one.key: one for values in saved.values() for one in values}
    root, seeds = get_gradient_edge(y), seeds_of([y])
    del y
    _, weights = split.input_backward([root], seeds, [x])
    del root
    assert not any(one.alive for one in saved["GeluBackward0"])
    left = sum(one.size for one in everything.values() if one.alive)
    freed = 1 - left / sum(one.size for one in everything.values())
    assert freed > 0.38, f"{freed:.0%} of the saved bytes are free after I"
    weights()
    assert not any(one.alive for one in everything.values())


def test_attributes_of_contexts_are_free_after_i(without_collector: None) -> None:
    """Nodes of the part of I do not live on, and so what they hold in other ways than by saving it does not."""
    held: list[weakref.ref[torch.Tensor]] = []

    class Holding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.kept = x * 2
            held.append(weakref.ref(ctx.kept))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * 2

    module = Calling(lambda self, x: Holding.apply(Holding.apply(x) @ self.w) @ self.w, w=(4, 4))
    split = splitter()
    for _ in range(2):
        held.clear()
        _, weights = first_half(split, module, [x_of(4, 4)])
        assert [one() for one in held] == [None, None]
        weights()


def test_what_w_needs_is_freed_by_it(without_collector: None) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    class OnWeight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            kept = w * 2
            ctx.save_for_backward(kept)
            held.append(weakref.ref(kept))
            return kept * w

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * ctx.saved_tensors[0] * 2

    module = Calling(lambda self, x: x @ OnWeight.apply(self.w), w=(4, 4))
    split = splitter()
    for _ in range(2):
        held.clear()
        _, weights = first_half(split, module, [x_of(4, 4)])
        weights()
        assert held[0]() is None


def test_called_once() -> None:
    module = nn.Linear(4, 4)
    _, weights = first_half(splitter(), module, [x_of(5, 4)])
    weights()
    before = module.weight.grad.clone()
    assert before.any()
    weights()
    assert torch.equal(module.weight.grad, before)


def test_a_left_operand_that_needs_no_gradient() -> None:
    """Then the node has not saved the right one, whose layout cannot be seen."""
    left = x_of(5, 3, seed=2).detach()
    check(Calling(lambda self, x: torch.addmm(x, left, self.w.t()), w=(4, 3)), x_of(5, 4))


@pytest.mark.parametrize(
    ("module", "shape"), [(nn.Linear(4, 3), (5, 4)), (nn.Conv1d(4, 3, 2), (5, 4, 6))], ids=["linear", "convolution"]
)
def test_what_gradients_are_made_of_is_not_changed_between_the_halves(module: nn.Module, shape: Any) -> None:
    module = copy.deepcopy(module).double()
    x = x_of(*shape)
    y = module(x)
    _, weights = splitter().input_backward([get_gradient_edge(y)], [torch.ones_like(y)], [x])
    with torch.no_grad():
        x.mul_(100)
    with pytest.raises(StageError, match=rf"shape \({', '.join(map(str, shape))}\) was modified in place between"):
        weights()
    assert all(parameter.grad is None for parameter in module.parameters())
