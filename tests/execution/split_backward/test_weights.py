"""I and W of layers, and of weights that are computed: together they give what a whole backward gives."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from execution.split_backward.halves import Calling, check, x_of

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


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex_numbers() -> None:
    kind = torch.complex128
    for name in ("x @ W", "W @ x", "low rank", "einsum", "addmm onto a matrix", "bmm", "one weight on both sides"):
        function, parameters = WEIGHTS[name]
        check(Calling(function, **parameters).to(kind), x_of(4, 4, dtype=kind))
    check(nn.Sequential(nn.Linear(4, 4, dtype=kind), nn.Linear(4, 4, bias=False, dtype=kind)), x_of(5, 4, dtype=kind))
    check(nn.Conv1d(4, 6, 3, groups=2, dtype=kind), x_of(2, 4, 7, dtype=kind))
