"""I and W together are a whole backward: the same gradients, the same calls of hooks, less memory in between."""

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from penstock.errors import StageError
from penstock.execution.split_backward import leaf_gradients as leaf_module
from penstock.execution.split_backward import split as split_backward
from penstock.execution.split_backward import weight_gradients as products
from penstock.execution.split_backward.split import SplitBackward, WeightBackward

Tensors = Sequence[torch.Tensor]

#: Whether gradients may be added where nobody looks on. Everything here holds with and without.
alone = False


@pytest.fixture(autouse=True, params=[False, True], ids=["by the engine", "alone"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "alone", request.param)


def splitter() -> SplitBackward:
    return SplitBackward(adds_in_place=alone)


def tensors_of(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(output)


def seeds_of(outputs: Tensors) -> list[torch.Tensor]:
    """A gradient for each output, always the same."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(one.shape, dtype=one.dtype, generator=generator) for one in outputs]


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that needs a gradient if it can have one, and the tensor is not marked as one that does not."""
    copied = tensor.detach().clone(memory_format=torch.preserve_format)
    return copied.requires_grad_(tensor.requires_grad)


def x_of(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def whole(module: nn.Module, args: Tensors) -> list[torch.Tensor | None]:
    """Gradients of the inputs; those of the parameters are in ``.grad``."""
    args = [leaf(arg) for arg in args]
    outputs = [one for one in tensors_of(module(*args)) if one.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, seeds_of(outputs))
    return [arg.grad for arg in args if arg.requires_grad]


def first_half(split: SplitBackward, module: nn.Module, args: Tensors) -> tuple[list[Any], WeightBackward]:
    args = [leaf(arg) for arg in args]
    outputs = [one for one in tensors_of(module(*args)) if one.requires_grad]
    return split.input_backward(
        [get_gradient_edge(one) for one in outputs], seeds_of(outputs), [arg for arg in args if arg.requires_grad]
    )


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def equal(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    assert_close = torch.testing.assert_close
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            one, other = (value.to_dense() if value.is_sparse else value for value in (one, other))
            assert_close(one, other, rtol=tolerance, atol=tolerance)


def check(
    module: nn.Module, *args: torch.Tensor, early: bool = False, tolerance: float = 1e-12, times: int = 3
) -> SplitBackward:
    """Compare I + W with a whole backward, several times over: the first time the graph is cut, then it is known.

    After I no parameter has a gradient, unless `early` says that one may.
    """
    other = copy.deepcopy(module)
    split = splitter()
    for _ in range(times):
        before = {name: None if one is None else one.clone() for name, one in gradients(module).items()}
        found, weights = first_half(split, module, args)
        if not early:
            equal(gradients(module), before, 0)
        weights()
        equal(found, whole(other, args), tolerance)
        equal(gradients(module), gradients(other), tolerance)
    return split


def check_by_turns(module: nn.Module) -> SplitBackward:
    """Compare them for a module whose second argument says which of two ways it goes, for microbatches by turns."""
    other = copy.deepcopy(module)
    split = splitter()
    for number in (0, 1, 0, 1, 1, 0):
        args = [x_of(5, 4, seed=number), torch.tensor([number])]
        found, weights = first_half(split, module, args)
        weights()
        equal(found, whole(other, args))
        equal(gradients(module), gradients(other))
    return split


class Calling(nn.Module):
    """Parameters, and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Any], **parameters: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            else:
                shape = value if isinstance(value, tuple) else (value,)
                self.register_parameter(name, nn.Parameter(x_of(*shape, seed=len(name) + sum(shape)).detach()))

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(self, *args)


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


LAYERS = {
    "linear": lambda: (nn.Linear(4, 3), x_of(5, 4)),
    "linear of one row": lambda: (nn.Linear(4, 3), x_of(1, 4)),
    "linear of a vector": lambda: (nn.Linear(4, 3), x_of(4)),
    "linear of three dimensions": lambda: (nn.Linear(4, 3), x_of(2, 5, 4)),
    "linear of four dimensions": lambda: (nn.Linear(4, 3), x_of(2, 2, 5, 4)),
    "linear without a bias": lambda: (nn.Linear(4, 3, bias=False), x_of(5, 4)),
    "linear of three dimensions without a bias": lambda: (nn.Linear(4, 3, bias=False), x_of(2, 5, 4)),
    "linear of a transposed input": lambda: (nn.Linear(4, 3), x_of(4, 5).detach().t().requires_grad_()),
    "linear of a strided input": lambda: (nn.Linear(4, 3), x_of(2, 5, 8).detach()[..., ::2].requires_grad_()),
    "linear of an expanded input": lambda: (
        Calling(lambda self, x: self.layer(x.expand(5, 4)), layer=nn.Linear(4, 3)),
        x_of(1, 4),
    ),
    "linear of no rows": lambda: (nn.Linear(4, 3), x_of(0, 4)),
    "bilinear": lambda: (Calling(lambda self, x: self.layer(x, x * 2), layer=nn.Bilinear(4, 4, 3)), x_of(5, 4)),
    "convolution in 1 dimension": lambda: (nn.Conv1d(4, 6, 3, padding=1), x_of(2, 4, 7)),
    "convolution in 2 dimensions": lambda: (nn.Conv2d(4, 6, 3, stride=2, dilation=2), x_of(2, 4, 9, 9)),
    "convolution without a bias": lambda: (nn.Conv2d(4, 6, 3, bias=False), x_of(2, 4, 5, 5)),
    "convolution in 3 dimensions": lambda: (nn.Conv3d(2, 3, 2), x_of(1, 2, 3, 3, 3)),
    "transposed convolution": lambda: (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), x_of(2, 4, 5, 5)),
    "grouped convolution": lambda: (nn.Conv2d(4, 6, 3, groups=2), x_of(2, 4, 5, 5)),
    "depthwise convolution": lambda: (nn.Conv1d(4, 4, 3, groups=4, bias=False), x_of(2, 4, 7)),
    "padded convolution": lambda: (nn.Conv1d(4, 4, 3, padding="same", padding_mode="circular"), x_of(2, 4, 7)),
    "layer norm": lambda: (nn.LayerNorm(4), x_of(5, 4)),
    "batch norm": lambda: (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), x_of(5, 4)),
    "batch norm when evaluated": lambda: (nn.BatchNorm1d(4).eval(), x_of(5, 4)),
    "group norm": lambda: (nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4)), x_of(5, 4, 3)),
    "root mean square norm": lambda: (nn.RMSNorm(4), x_of(5, 4)),
    "activation with a parameter": lambda: (nn.PReLU(4), x_of(5, 4)),
    "recurrent": lambda: (Calling(lambda self, x: self.layer(x)[0], layer=nn.LSTM(4, 3)), x_of(5, 2, 4)),
    "recurrent cell": lambda: (nn.GRUCell(4, 3), x_of(5, 4)),
    "attention": lambda: (
        Calling(lambda self, x: self.layer(x, x, x)[0], layer=nn.MultiheadAttention(8, 2, batch_first=True)),
        x_of(2, 5, 8),
    ),
    "attention with its weights": lambda: (
        Calling(lambda self, x: self.layer(x, x.flip(0), x), layer=nn.MultiheadAttention(8, 2, add_bias_kv=True)),
        x_of(5, 2, 8),
    ),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), x_of(5, 2, 8)),
    "decoder layer": lambda: (nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0), x_of(5, 2, 8), x_of(4, 2, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    module, *args = LAYERS[name]()
    check(module, *args)


WEIGHTS = {
    "x @ W": (lambda self, x: x @ self.w, {"w": (4, 4)}),
    "W @ x": (lambda self, x: self.w @ x, {"w": (3, 4)}),
    "W.t() @ x": (lambda self, x: self.w.t() @ x, {"w": (4, 3)}),
    "x @ W of many": (lambda self, x: (x.expand(3, 4, 4) * 2) @ self.w, {"w": (3, 4, 2)}),
    "W of many @ x": (lambda self, x: self.w @ (x.expand(3, 4, 4) * 2), {"w": (3, 2, 4)}),
    "W broadcast @ x": (lambda self, x: self.w @ (x.expand(3, 4, 4) * 2), {"w": (2, 4)}),
    "matrix and vector": (lambda self, x: x @ self.v, {"v": (4,)}),
    "vector and matrix": (lambda self, x: self.v @ x, {"v": (4,)}),
    "outer": (lambda self, x: torch.outer(x[0], self.v), {"v": (4,)}),
    "einsum": (lambda self, x: torch.einsum("ij,hjk->hik", x, self.w), {"w": (3, 4, 2)}),
    "einsum that contracts all": (lambda self, x: torch.einsum("ij,ij->", x, self.w), {"w": (4, 4)}),
    "tensordot": (lambda self, x: torch.tensordot(x, self.w, dims=2), {"w": (4, 4, 3)}),
    "bmm": (lambda self, x: torch.bmm(x.expand(2, 4, 4), self.w), {"w": (2, 4, 3)}),
    "baddbmm": (lambda self, x: torch.baddbmm(self.b, x.expand(2, 4, 4), self.w), {"w": (2, 4, 3), "b": (3,)}),
    "addmm with factors": (lambda self, x: torch.addmm(self.b, x, self.w, beta=2, alpha=3), {"w": (4, 3), "b": (3,)}),
    "addmm onto a matrix": (lambda self, x: torch.addmm(self.b, x, self.w), {"w": (4, 3), "b": (4, 3)}),
    "addmm onto a column": (lambda self, x: torch.addmm(self.b, x, self.w), {"w": (4, 3), "b": (4, 1)}),
    "addmm onto a scalar": (lambda self, x: torch.addmm(self.b, x, self.w), {"w": (4, 3), "b": ()}),
    "addmm onto an input": (lambda self, x: torch.addmm(x, x, self.w), {"w": (4, 4)}),
    "addmm of a weight, onto one": (lambda self, x: torch.addmm(self.b, self.w, x), {"w": (3, 4), "b": (4,)}),
    "addmm of weights onto an input": (lambda self, x: torch.addmm(x, self.v, self.w), {"v": (4, 2), "w": (2, 4)}),
    "low rank": (
        lambda self, x: functional.linear(x, self.w + self.a @ self.b),
        {"w": (3, 4), "a": (3, 2), "b": (2, 4)},
    ),
    "low rank beside": (lambda self, x: x @ self.w + x @ self.a @ self.b, {"w": (4, 3), "a": (4, 2), "b": (2, 3)}),
    "low rank used twice": (
        lambda self, x: (lambda w: functional.linear(functional.linear(x, w).relu(), w))(self.a @ self.b),
        {"a": (4, 2), "b": (2, 4)},
    ),
    "the product of a weight with itself": (lambda self, x: x @ (self.w @ self.w.t()), {"w": (4, 4)}),
    "where": (lambda self, x: torch.where(x > 0, self.a, x * self.b), {"a": (4,), "b": (4,)}),
    "index": (lambda self, x: x @ self.w[[2, 0]].t() + self.w[1, 0], {"w": (3, 4)}),
    "gather": (lambda self, x: x * self.w.gather(0, torch.zeros(4, 4, dtype=torch.long)), {"w": (4, 4)}),
    "scalars": (lambda self, x: self.scale * x + self.shift, {"scale": (), "shift": ()}),
    "a scalar times a product": (lambda self, x: self.scale * (x @ self.w), {"scale": (), "w": (4, 3)}),
    "softplus, in I and in W": (
        lambda self, x: (lambda s: x * s + functional.linear(x, s))(functional.softplus(self.w)),
        {"w": (4, 4)},
    ),
    "concatenated": (lambda self, x: functional.linear(x, torch.cat([self.a, self.b])), {"a": (1, 4), "b": (2, 4)}),
    "embedding": (lambda self, x: x + functional.embedding(torch.tensor([0, 2, 2, 1]), self.w), {"w": (3, 4)}),
    "embedding tied with a linear": (
        lambda self, x: functional.linear(x + functional.embedding(torch.tensor([0, 2, 2, 1]), self.w), self.w),
        {"w": (3, 4)},
    ),
    "sparse embedding": (
        lambda self, x: x + functional.embedding(torch.tensor([0, 2, 2, 1]), self.w, sparse=True),
        {"w": (3, 4)},
    ),
    "one weight, two linears": (lambda self, x: functional.linear(functional.linear(x, self.w), self.w), {"w": (4, 4)}),
    "one weight, turned": (lambda self, x: (x @ self.w).relu() @ self.w.t(), {"w": (4, 4)}),
    "one weight on both sides": (lambda self, x: self.w @ x @ self.w, {"w": (4, 4)}),
    "a weight made of the input": (lambda self, x: functional.linear(x, self.w * x.sum()), {"w": (4, 4)}),
    "a weight made of the input alone": (lambda self, x: functional.linear(x, x) * self.s, {"s": (1,)}),
    "a parameter that is not used": (lambda self, x: x @ self.w, {"w": (4, 4), "spare": (2,)}),
    "in place on the output": (lambda self, x: functional.linear(x, self.w).relu_(), {"w": (3, 4)}),
    "in place on a view": (
        lambda self, x: (lambda y: (y[:, :2].add_(self.b), y)[1])(functional.linear(x, self.w)),
        {"w": (3, 4), "b": (2,)},
    ),
    "a product in place on a view": (
        lambda self, x: (lambda y: (y[:, :2].addmm_(x, self.v), y)[1])(functional.linear(x, self.w)),
        {"w": (3, 4), "v": (4, 2)},
    ),
    "into a buffer": (
        lambda self, x: (lambda y: (y.__setitem__((slice(None), slice(0, 3)), x @ self.w), y)[1])(torch.zeros(4, 5)),
        {"w": (4, 3)},
    ),
    "add_ to a product": (lambda self, x: (x @ self.w).add_(self.b).mul_(2), {"w": (4, 3), "b": (3,)}),
    "sparse times dense": (lambda self, x: torch.sparse.mm(torch.eye(4).to_sparse(), x @ self.w), {"w": (4, 3)}),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str) -> None:
    function, parameters = WEIGHTS[name]
    check(Calling(function, **parameters), x_of(4, 4))


@pytest.mark.parametrize("name", ["weight norm", "spectral norm", "orthogonal", "own"])
def test_parametrizations(name: str) -> None:
    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w + w.t()

    layer = nn.Linear(4, 4)
    if name == "own":
        parametrize.register_parametrization(layer, "weight", Symmetric())
    else:
        {
            "weight norm": parametrizations.weight_norm,
            "spectral norm": lambda one: parametrizations.spectral_norm(one).eval(),
            "orthogonal": parametrizations.orthogonal,
        }[name](layer)
    check(nn.Sequential(layer, nn.ReLU(), layer), x_of(5, 4))


def test_layers_that_share() -> None:
    layer = nn.Linear(4, 4)
    check(nn.Sequential(layer, nn.GELU(), layer), x_of(5, 4))
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    check(nn.Sequential(one, nn.GELU(), other, nn.LayerNorm(4)), x_of(5, 4))


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets every gradient of W as soon as it may, as if all were large."""
    monkeypatch.setattr(split_backward, "_FLUSH_BYTES", 0)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize(
    "name", ["low rank used twice", "one weight, two linears", "one weight on both sides", "index"]
)
def test_shared_weights_get_their_gradient_at_once(name: str) -> None:
    """However large: a node of W is passed once."""
    function, parameters = WEIGHTS[name]
    check(Calling(function, **parameters), x_of(4, 4))


@pytest.mark.usefixtures("one_by_one")
def test_an_output_of_weights_gets_its_gradient_with_them() -> None:
    def run(self: Any, x: torch.Tensor) -> Any:
        w = self.a @ self.b
        return self.last(functional.linear(self.between(functional.linear(x, w)), w)), w * 2, self.a

    module = Calling(run, a=(4, 2), b=(2, 4), between=nn.Linear(4, 4), last=nn.Linear(4, 4))
    check(module, x_of(4, 4))


# Functions of the user's own.


class Scale(torch.autograd.Function):
    """An input times a parameter, with tensors on the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.w = w.detach()
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * ctx.w, (gradient * x).sum(0)


class Half(torch.autograd.Function):
    """A value whose gradient is not its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / 2


class Several(torch.autograd.Function):
    """Two outputs of an input and a weight, one of them without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.save_for_backward(x, w)
        largest = x.argmax()
        ctx.mark_non_differentiable(largest)
        return x @ w, largest, x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any, other: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient @ w.t() + other, x.t() @ gradient


FUNCTIONS = {
    "with a parameter": lambda self, x: Scale.apply(x, self.b) @ self.w,
    "on a weight": lambda self, x: functional.linear(x, Half.apply(self.w)),
    "on a weight, and on what is made of it": lambda self, x: functional.linear(x, Half.apply(Half.apply(self.w) * 2)),
    "on a bias": lambda self, x: functional.linear(x, self.w, Half.apply(self.b)),
    "on the bias of a sum": lambda self, x: x @ self.w + Half.apply(self.b),
    "on an input": lambda self, x: Half.apply(x) @ self.w,
    "between": lambda self, x: Half.apply(x @ self.w) @ self.w,
    "last": lambda self, x: Half.apply(x @ self.w),
    "with several outputs": lambda self, x: Several.apply(x, self.w)[::2],
    "with several outputs, one used": lambda self, x: Several.apply(x, self.w)[2],
    "of weights alone, as an output": lambda self, x: (x @ self.w, Half.apply(self.b)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_ones_own(name: str) -> None:
    check(Calling(FUNCTIONS[name], w=(4, 4), b=(4,)), x_of(4, 4))


class Ending(torch.autograd.Function):
    """A value that passes no gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None


@pytest.mark.parametrize("ended", range(8))
def test_layers_that_get_no_gradient(ended: int) -> None:
    """They come at any place among others, of which each gets its own."""

    def run(self: Calling, x: torch.Tensor) -> torch.Tensor:
        parts = [self.a(x), self.b(x), self.c(x)]
        return sum([Ending.apply(part) if ended >> index & 1 else part for index, part in enumerate(parts)])

    check(Calling(run, a=nn.Linear(4, 3), b=nn.Linear(4, 3), c=nn.Linear(4, 3, bias=False)), x_of(4, 4))


# What needs a gradient, and what is there to need it.


def test_parameters_without_gradient() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4))
    for frozen in ("0.weight", "0.bias", "2.weight", "3.bias"):
        module.get_parameter(frozen).requires_grad_(False)
    check(module, x_of(5, 4))
    assert module[0].weight.grad is None
    assert module[3].weight.grad is not None


def test_a_frozen_stage_passes_gradients_on() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).requires_grad_(False)
    check(module, x_of(5, 4))


def test_a_stage_whose_inputs_need_none() -> None:
    check(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), x_of(5, 4).detach())


def test_nothing_needs_a_gradient() -> None:
    found, weights = splitter().input_backward([], [], [])
    weights()
    assert found == []


SEVERAL = {
    "two outputs": lambda self, x, y: (x @ self.w, y @ self.w),
    "one output twice": lambda self, x, y: (lambda z: (z, z))(x @ self.w + y),
    "one product twice": lambda self, x, y: (lambda z: (z, z))(x @ self.w),
    "outputs of one node": lambda self, x, y: (x @ self.w + y).chunk(2),
    "one of the outputs of one node": lambda self, x, y: (x @ self.w + y).chunk(2)[1],
    "an output without gradient": lambda self, x, y: (x @ self.w, y.argmax(), y.detach()),
    "an input without effect": lambda self, x, y: x @ self.w,
    "an input that is an output": lambda self, x, y: (x @ self.w, y),
    "both inputs are outputs": lambda self, x, y: (y, x),
    "an input that is an output twice": lambda self, x, y: (x @ self.w, y, y),
    "a parameter as output": lambda self, x, y: (x @ self.w, self.b, y),
    "a parameter as output, used as well": lambda self, x, y: (x @ self.w + self.b, self.b),
    "an output of parameters alone": lambda self, x, y: (x @ self.w, self.b * 2, (self.w * 2).sum()),
    "an output of what is used inside": lambda self, x, y: (lambda s: (x * s, s * 2, y @ s))(self.w.exp()),
    "what is used inside as output": lambda self, x, y: (lambda s: (x * s, s))(self.w.exp()),
    "no output depends on an input": lambda self, x, y: (self.b * 2, self.w @ self.w),
    "an input and what is made of it": lambda self, x, y: (x, x @ self.w, x * 2),
    "an output in the middle": lambda self, x, y: (lambda z: (z, z.relu() @ self.w))(functional.linear(x, self.w) + y),
    "a product in the middle": lambda self, x, y: (lambda z: (z, z.relu() @ self.w + y))(functional.linear(x, self.w)),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_inputs_and_outputs(name: str) -> None:
    check(Calling(SEVERAL[name], w=(4, 4), b=(4,)), x_of(4, 4), x_of(4, 4, seed=2))


@pytest.mark.parametrize("name", SEVERAL)
def test_one_of_two_inputs_needs_a_gradient(name: str) -> None:
    check(Calling(SEVERAL[name], w=(4, 4), b=(4,)), x_of(4, 4), x_of(4, 4, seed=2).detach())


def test_a_graph_is_known_again() -> None:
    """Also where an input is not used, or an output comes twice: else every microbatch would be cut anew."""
    for name, function in SEVERAL.items():
        split = check(Calling(function, w=(4, 4), b=(4,)), x_of(4, 4), x_of(4, 4, seed=2), times=4)
        assert len(split._cuts) == 1, name


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex_numbers() -> None:
    kind = torch.complex128
    for name in ("x @ W", "W @ x", "low rank", "einsum", "addmm onto a matrix", "bmm", "one weight on both sides"):
        function, parameters = WEIGHTS[name]
        check(Calling(function, **parameters).to(kind), x_of(4, 4, dtype=kind))
    check(nn.Sequential(nn.Linear(4, 4, dtype=kind), nn.Linear(4, 4, bias=False, dtype=kind)), x_of(5, 4, dtype=kind))
    check(nn.Conv1d(4, 6, 3, groups=2, dtype=kind), x_of(2, 4, 7, dtype=kind))


# Ways to save less.


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


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


# Hooks.


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

    hooked(register, stack(), x_of(3, 4))


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
    for width, shared in ((2, alone), (512, True)):
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
def test_a_tensor_that_was_changed_is_told(product: Any) -> None:
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


# Graphs that differ from microbatch to microbatch.


class Dynamic(nn.Module):
    """What it does depends on the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.shared = nn.Linear(4, 4)
        self.form = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form < 3:  # equal in form, with other parameters
            return x + self.experts[self.form](self.norm(x))
        if self.form == 3:
            return self.shared(self.shared(x))
        if self.form == 4:  # as the one before, without sharing
            return self.shared(nn.functional.linear(x, self.experts[0][0].weight[:4], self.norm.bias))
        if self.form == 5:
            return torch.cat([x @ self.shared.weight, x])[:5] * torch.stack([self.norm.weight]).prod(0)
        if self.form == 6:
            return torch.cat([x @ self.shared.weight])[:5] * torch.stack([self.norm.weight, self.norm.bias]).prod(0)
        return torch.stack([self.experts[index](x) for index in range(self.form % 3)] + [x]).sum(0)


@settings(max_examples=60, deadline=None)
@given(
    forms=st.lists(st.integers(0, 8), min_size=1, max_size=12),
    choices=st.lists(st.integers(0, 11), min_size=24, max_size=24),
)
def test_microbatches_in_any_order(forms: list[int], choices: list[int]) -> None:
    """Forwards first; then I and W of any, W after its I; and more forms than are remembered."""
    torch.manual_seed(0)
    module, split = Dynamic(), splitter()
    other = copy.deepcopy(module)
    flights: dict[int, Any] = {}
    for number, form in enumerate(forms):
        module.form = form
        x = leaf(x_of(5, 4, seed=number))
        flights[number] = x, module(x)
    waiting: dict[int, WeightBackward] = {}
    found: dict[int, Any] = {}
    for choice in choices + [0] * 24:
        if flights and (choice % 2 == 0 or not waiting):
            number = sorted(flights)[choice % len(flights)]
            x, y = flights.pop(number)
            found[number], waiting[number] = split.input_backward([get_gradient_edge(y)], seeds_of([y]), [x])
        elif waiting:
            waiting.pop(sorted(waiting)[choice % len(waiting)])()
    assert not flights
    assert not waiting
    for number, form in enumerate(forms):
        other.form = form
        equal(found[number], whole(other, [x_of(5, 4, seed=number)]))
    equal(gradients(module), gradients(other), 1e-10)


def test_a_form_is_not_mistaken_for_another() -> None:
    module = Dynamic()
    other = copy.deepcopy(module)
    split = splitter()
    for number in range(30):
        module.form = other.form = number * 4 % 9
        found, weights = first_half(split, module, [x_of(5, 4, seed=number)])
        weights()
        equal(found, whole(other, [x_of(5, 4, seed=number)]))
        equal(gradients(module), gradients(other))


# Memory.


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


@pytest.fixture
def without_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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
    weights()
    equal([module.weight.grad], [before], 0)


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
