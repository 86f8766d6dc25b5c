"""What a stage computes between unpacking and packing: pieces, each from a row per sample to a row per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from differential.forms import WIDTH

DOUBLE = {"dtype": torch.float64}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, **DOUBLE)

    def forward(self, h):
        return self.layer(h)


class Tanh(nn.Module):
    def forward(self, h):
        return torch.tanh(h)


class Residual(Linear):
    def forward(self, h):
        return h + torch.tanh(self.layer(h))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, **DOUBLE)

    def forward(self, h):
        return self.norm(h)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 2, 3, padding=1, **DOUBLE)

    def forward(self, h):
        return self.layer(h.unsqueeze(1)).sum(1)


class UsedTwice(Linear):
    """One weight, twice, and once more transposed."""

    def forward(self, h):
        return torch.tanh(self.layer(torch.tanh(self.layer(h)))) @ self.layer.weight


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(WIDTH, WIDTH, **DOUBLE) for _ in range(2))

    def forward(self, h):
        return self.one(h) * torch.sigmoid(self.two(h))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 2)

    def forward(self, h):
        z = h.to(torch.complex128) @ self.weight
        return z.real * z.imag


class Conjugated(Complex):
    """Its weight may get a gradient that is conjugated only when it is read."""

    def forward(self, h):
        z = h.to(torch.complex128) @ self.weight.conj()
        return (z * z.conj()).real + z.imag


class Checkpointed(nn.Module):
    # Without the random state: two threads that restore it at once can hang in torch.
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = Product()

    def forward(self, h):
        return checkpoint(self.inner, h, use_reentrant=self.reentrant, preserve_rng_state=False)


class Reentrant(Checkpointed):
    reentrant = True


class ReentrantLater(Reentrant):
    """Its input requires a gradient in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH, **DOUBLE)

    def forward(self, h):
        return super().forward(self.before(h))


class SavedElsewhere(Product):
    """What is saved for the backward goes through hooks."""

    def forward(self, h):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda packed: packed):
            return super().forward(h)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x, weight):
        context.save_for_backward(x, weight)
        return x**3 * weight

    @staticmethod
    def backward(context: Any, gradient):
        x, weight = context.saved_tensors
        return gradient * 3 * x**2 * weight, (gradient * x**3).sum(0)


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, **DOUBLE))

    def forward(self, h):
        return _Cube.apply(torch.tanh(h), self.weight)


class _Stacked(torch.autograd.Function):
    """Its gradients are views of one memory."""

    @staticmethod
    def forward(context: Any, x, weight):
        return x + weight

    @staticmethod
    def backward(context: Any, gradient):
        both = torch.stack([gradient, gradient])
        return both[0], both[1].sum(0)


class SharedGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, **DOUBLE))

    def forward(self, h):
        return _Stacked.apply(h, self.weight)


class TensorHook(Linear):
    """A hook of an activation changes its gradient."""

    def forward(self, h):
        y = self.layer(h)
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return torch.tanh(y)


class ParameterHooks(Linear):
    """A hook of a parameter changes its gradient; another counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layer.weight.register_hook(lambda gradient: 3 * gradient)
        self.layer.bias.register_post_accumulate_grad_hook(self.count)

    def count(self, _parameter: torch.Tensor) -> None:
        self.calls += 1


class ModuleHooks(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
        self.layer.register_forward_hook(lambda _module, _args, output: output + 1)
        self.layer.register_full_backward_hook(
            lambda _module, gradients, _outer: tuple(None if one is None else 2 * one for one in gradients)
        )


class InPlace(Linear):
    def forward(self, h):
        return torch.relu_(self.layer(h).add_(0.3)) + 0.1 * h


class ViewInPlace(Linear):
    """A change of a view, and of what it is a view of."""

    def forward(self, h):
        y = self.layer(h)
        y[:, 0].mul_(2)
        part = y[:, 1:3]
        part += h[:, :2]
        y.view(-1, 2)[:, 1] += 1
        return y


class Scatter(Linear):
    def forward(self, h):
        y = torch.zeros_like(h)
        y[:, torch.tensor([1, 0])] = self.layer(h)[:, :2]
        return y.index_add(1, torch.tensor([2, 3, 3]), h[:, :3])


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True, **DOUBLE)

    def forward(self, h):
        return h * self.table((h.detach() > 0).sum(1))


class Frozen(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, h):
        return torch.tanh(self.layer(h))


class Unused(Linear):
    """Has a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(WIDTH, **DOUBLE))

    def forward(self, h):
        return self.layer(h)


class Detached(Product):
    """A branch that gets no gradient."""

    def forward(self, h):
        return self.one(h) + self.two(h.detach())


class Counting(Linear):
    """Keeps a sum in a buffer, which a dry run must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH, **DOUBLE))

    def forward(self, h):
        self.total += h.detach().sum(0)
        return self.layer(h)


class Centered(nn.Module):
    """The samples of a microbatch depend on each other."""

    def forward(self, h):
        return h - h.mean(0)


class Normalized(nn.Module):
    """Weight normalization: the weight is computed in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, **DOUBLE))

    def forward(self, h):
        return self.layer(h)


class Single(nn.Module):
    """A layer in float32 among others in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return self.layer(h.float()).double()


class Half(nn.Module):
    """A layer in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float16)

    def forward(self, h):
        return h + self.layer(torch.tanh(h).half()).double()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH, **DOUBLE)

    def forward(self, h):
        query, key, value = self.inner(h).view(len(h), 2, 3, 2).permute(2, 0, 1, 3)
        return h + functional.scaled_dot_product_attention(query, key, value).reshape(len(h), WIDTH)


class ExpandedBuffer(nn.Module):
    """A buffer with stride 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, **DOUBLE)
        self.register_buffer("mask", torch.rand(1, **DOUBLE).expand(WIDTH))

    def forward(self, h):
        return self.layer(h) * self.mask


#: Pieces by name. A stage is made of some of them.
PIECES: dict[str, Callable[[], nn.Module]] = {
    piece.__name__: piece
    for piece in (
        Linear, Tanh, Residual, Norm, Convolution, UsedTwice, Product, Complex, Conjugated, Checkpointed, Reentrant,
        ReentrantLater, SavedElsewhere, OwnFunction, SharedGradients, TensorHook, ParameterHooks, ModuleHooks, InPlace,
        ViewInPlace, Scatter, Sparse, Frozen, Unused, Detached, Counting, Centered, Normalized, Single, Half, Attention,
        ExpandedBuffer,
    )
}  # fmt: skip
#: Pieces in which the samples of a microbatch depend on each other.
MIXING = frozenset({"Centered"})
#: Pieces that are less precise, and those that are much less so.
ROUGH, ROUGHEST = frozenset({"Single"}), frozenset({"Half"})
