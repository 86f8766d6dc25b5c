"""The functions of a stage's backward, beside a plain backward and beside the installed torch."""

import copy
import gc
import weakref
from types import ModuleType

import pytest
import torch
import torch.distributed.pipelining._backward as upstream
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from penstock.errors import RunError
from penstock.pipelining import _backward as ours

BOTH = pytest.mark.parametrize("module", [ours, upstream], ids=["ours", "upstream"])


class Block(torch.nn.Module):
    """Products, a normalization, a nonlinearity."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.second = torch.nn.Linear(8, 6)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu())


class Tied(torch.nn.Module):
    """One weight in two places, after biases that are in one each."""

    def __init__(self, *, biases: bool):
        super().__init__()
        self.early, self.late = (torch.nn.Parameter(torch.randn(6)) if biases else None for _ in range(2))
        self.weight = torch.nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        for bias in (self.early, self.late):
            x = functional.linear(x.relu(), self.weight, bias)
        return x


class Pass(torch.autograd.Function):
    """Two in, two out: what is beside the way to the input meets it inside a node."""

    @staticmethod
    def forward(ctx, x, weight):
        return x.view_as(x), weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad_x, grad_weight):
        return grad_x, grad_weight


class Met(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        left, right = x.split(3, dim=1)
        left, weight = Pass.apply(left, self.weight)
        return torch.cat([(left @ weight) * right, right], dim=1)


class Product(torch.autograd.Function):
    """A product as a user writes it."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient @ b.mT, a.mT @ gradient


class OwnProduct(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6))
        self.scale = torch.nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return Product.apply(x, Product.apply(self.weight, self.scale))


class Beside(torch.nn.Module):
    """The second output depends on no input, and on a weight that the first depends on, too."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6))
        self.adds_in_place = torch.nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return x @ self.weight.exp(), self.weight.exp() @ self.adds_in_place.exp()


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


MODELS = {
    "block": Block,
    "tied": lambda: Tied(biases=False),
    "tied with biases": lambda: Tied(biases=True),
    "met": Met,
    "own product": OwnProduct,
    "beside": Beside,
}
#: Where the installed torch adds a gradient twice, or none.
WRONG = {"tied with biases", "beside"}


def split_backward(module: ModuleType, model, x, gradients, *, retain_graph=False):
    outputs = list(as_tuple(model(x)))
    found, groups = module.stage_backward_input(outputs, list(gradients), [x, "text"], model.parameters())
    before = [parameter.grad for parameter in model.parameters()]
    del outputs
    gc.collect()
    returned = module.stage_backward_weight(model.parameters(), groups, retain_graph=retain_graph)
    return found, before, returned


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


@pytest.mark.parametrize(
    ("module", "name"),
    [(ours, name) for name in MODELS] + [(upstream, name) for name in MODELS if name not in WRONG],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_two_halves_make_what_a_plain_backward_makes(module, name, steps):
    model = MODELS[name]()
    reference = copy.deepcopy(model)
    for step in range(steps):
        x = torch.randn(4, 6, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        outputs = as_tuple(reference(other))
        gradients = [torch.randn_like(output) for output in outputs]
        torch.autograd.backward(outputs, gradients)
        found, before, returned = split_backward(module, model, x, gradients)
        torch.testing.assert_close(found[0], other.grad)
        assert len(found) == 2
        assert found[1] is None
        assert x.grad is found[0]
        if step == 0:
            assert before == [None] * len(before)
        assert all(one is another for one, another in zip(returned, before, strict=True))
        for one, another in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, another.grad)


def test_torch_is_wrong_where_a_weight_is_shared_by_groups():
    model, x = Tied(biases=True), torch.randn(4, 6, requires_grad=True)
    reference = copy.deepcopy(model)
    reference(x.detach().requires_grad_()).sum().backward()
    split_backward(upstream, model, x, [torch.ones(4, 6)], retain_graph=True)
    assert not torch.allclose(model.weight.grad, reference.weight.grad)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - WRONG))
def test_groups_are_those_of_torch(name):
    model, x = MODELS[name](), torch.randn(4, 6, requires_grad=True)
    outputs = as_tuple(model(x))
    found = []
    for module in (ours, upstream):
        edges = module.construct_reverse_graph([output.grad_fn for output in outputs])
        params = [module._get_grad_fn_or_grad_acc(parameter) for parameter in model.parameters()]
        inputs = [module._get_grad_fn_or_grad_acc(x)]
        groups = module.get_param_groups(inputs, params, edges)
        closures = [module.reverse_closure([param], set(), edges) for param in params]
        rows = {node: list(above) for node, above in edges.items() if above}
        found.append((rows, closures, [(group["params"], group["intermediates"]) for group in groups]))
    assert found[0][:2] == found[1][:2]
    assert len(found[0][2]) == len(found[1][2])
    assert all(group in found[1][2] for group in found[0][2])


@BOTH
def test_a_closure_ends_at_its_targets(module):
    x = torch.ones(2, requires_grad=True)
    first = x * 2
    second = first * 3
    edges = module.construct_reverse_graph([second.grad_fn])
    leaf = module._get_grad_fn_or_grad_acc(x)
    assert module.reverse_closure([leaf], {second.grad_fn}, edges) == ({leaf, first.grad_fn}, {second.grad_fn})


@BOTH
def test_grads_of_a_group_can_be_replaced(module):
    model, x = Met(), torch.randn(4, 6, requires_grad=True)
    for grads in [(torch.ones(4, 3), torch.ones(3, 3)), (None, torch.ones(3, 3)), (torch.ones(4, 3), None)]:
        model.weight.grad = None
        _, groups = module.stage_backward_input([model(x).sum()], None, [x], model.parameters())
        (group,) = groups
        assert len(group["params"]) == len(group["intermediates"]) == len(group["grads"]) == 1
        group["grads"] = [grads]
        module.stage_backward_weight(model.parameters(), groups)
        if grads[1] is not None:
            torch.testing.assert_close(model.weight.grad, torch.ones(3, 3))
        assert "intermediates" not in group


@BOTH
def test_outputs_lose_their_history_and_inputs_add_up(module):
    model, x = Block(), torch.randn(4, 6, requires_grad=True)
    x.grad = torch.ones(4, 6)
    out, constant = model(x), torch.ones(3)
    found, _ = module.stage_backward_input([out, constant], [torch.ones(4, 6), None], [x], model.parameters())
    assert not out.requires_grad
    torch.testing.assert_close(x.grad, torch.ones(4, 6) + found[0])
    assert all(parameter.grad is None for parameter in model.parameters())


@BOTH
def test_outputs_without_history_have_no_gradients(module):
    x = torch.ones(2, requires_grad=True)
    assert module.stage_backward_input([torch.ones(2)], [None], [x, 3], iter([])) == ((None, None), [])


@BOTH
def test_an_input_that_is_not_used_has_none(module):
    model, x, unused = Block(), torch.randn(4, 6, requires_grad=True), torch.ones(2, requires_grad=True)
    found, _ = module.stage_backward_input([model(x)], [torch.ones(4, 6)], [unused, x], model.parameters())
    assert found[0] is None
    assert unused.grad is None
    assert found[1] is not None


def test_inputs_without_gradients_leave_all_to_the_second_half():
    model, x = Block(), torch.randn(4, 6)
    reference = copy.deepcopy(model)
    reference(x).sum().backward()
    found, _, _ = split_backward(ours, model, x, [torch.ones(4, 6)])
    assert found == (None, None)
    for one, another in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, another.grad)


def test_hooks_see_a_gradient_as_in_a_plain_backward():
    gradients = []
    for split in (False, True):
        torch.manual_seed(3)
        model, x, calls = Block(), torch.randn(4, 6, requires_grad=True), []
        model.first.weight.register_hook(lambda gradient: gradient * 2)
        model.first.weight.register_post_accumulate_grad_hook(lambda _, calls=calls: calls.append("added"))
        hidden = model.first(x)
        hidden.register_hook(lambda gradient: gradient * 3)
        out = model.second(hidden)
        if split:
            _, groups = ours.stage_backward_input([out], [torch.ones(4, 6)], [x], model.parameters())
            ours.stage_backward_weight(model.parameters(), groups)
        else:
            out.backward(torch.ones(4, 6))
        gradients.append([x.grad, model.first.weight.grad, model.second.weight.grad])
        assert calls == ["added"]
    torch.testing.assert_close(*gradients)


def test_outputs_may_be_views():
    model, x = Block(), torch.randn(4, 6, requires_grad=True)
    out = Pass.apply(model(x), torch.ones(1))[0]
    assert out._is_view()
    _, groups = ours.stage_backward_input([out], [torch.ones(4, 6)], [x], model.parameters())
    ours.stage_backward_weight(model.parameters(), groups)
    reference = copy.deepcopy(model)
    reference.zero_grad()
    reference(x.detach().requires_grad_()).sum().backward()
    torch.testing.assert_close(model.first.weight.grad, reference.first.weight.grad)


def test_outputs_may_be_gradient_edges():
    results = []
    for rooted in (False, True):
        torch.manual_seed(3)
        model, x = Block(), torch.randn(4, 6, requires_grad=True)
        output = model(x)
        released = weakref.ref(output)
        root = get_gradient_edge(output) if rooted else output
        del output
        assert (released() is None) == rooted
        _, groups = ours.stage_backward_input([root], [torch.ones(4, 6)], [x], model.parameters())
        ours.stage_backward_weight(model.parameters(), groups)
        root = get_gradient_edge(model(x)) if rooted else model(x)
        (found,) = ours.stage_backward((root,), (torch.ones(4, 6),), (x,))
        results.append([found, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results)


def test_a_gradient_edge_needs_a_gradient():
    edge = get_gradient_edge(torch.ones(2, requires_grad=True) * 2)
    with pytest.raises(RunError) as raised:
        ours.stage_backward_input([edge], None, [], iter([]))
    assert "requires output gradients" in str(raised.value.__cause__)


def test_a_group_is_used_once():
    model, x = Block(), torch.randn(4, 6, requires_grad=True)
    _, groups = ours.stage_backward_input([model(x)], [torch.ones(4, 6)], [x], model.parameters())
    ours.stage_backward_weight(model.parameters(), groups)
    with pytest.raises(RunError, match="second time"):
        ours.stage_backward_weight(model.parameters(), groups)


def test_weights_are_those_of_the_first_half():
    model, x = Block(), torch.randn(4, 6, requires_grad=True)
    _, groups = ours.stage_backward_input([model(x)], [torch.ones(4, 6)], [x], model.parameters())
    with pytest.raises(RunError, match="not among the weights"):
        ours.stage_backward_weight(model.first.parameters(), groups)


@BOTH
@pytest.mark.parametrize(
    ("wrap", "gradient"),
    [
        (lambda out: out.sum(), None),
        (lambda out: (out, torch.ones(1), "text"), (torch.ones(4, 6), None, None)),
        (lambda out: [out, [out * 2]], [torch.ones(4, 6), [torch.ones(4, 6)]]),
        (lambda out: {"a": out, "b": (out,)}, {"a": torch.ones(4, 6), "b": None}),
    ],
)
def test_the_whole_backward_takes_the_gradients_of_inputs(module, wrap, gradient):
    model, x, other = Block(), torch.randn(4, 6, requires_grad=True), torch.ones(1)
    reference = copy.deepcopy(model)
    found = module.stage_backward(wrap(model(x)), gradient, [x, other, 3])
    assert x.grad is None
    assert found[1:] == (None, None)
    same = x.detach().requires_grad_()
    upstream.stage_backward(wrap(reference(same)), gradient, [same])
    for one, another in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, another.grad)


@BOTH
def test_some_outputs_can_be_chosen(module):
    x = torch.ones(2, requires_grad=True)
    ones = torch.ones(2)
    (found,) = module.stage_backward([x * 2, x * 3, x * 5], [ones, ones, ones], [x], outputs_with_grads_idxs=[0, 2])
    assert found.tolist() == [7, 7]


@BOTH
@pytest.mark.parametrize(
    ("outputs", "gradients"),
    [
        (lambda y: (y,), (None,)),
        (lambda y: (y,), (3,)),
        (lambda y: (y,), (torch.ones(3),)),
        (lambda y: (y, y), (torch.ones(2),)),
        (lambda y: (y,), {"a": torch.ones(2)}),
        (lambda y: {"a": y}, {"b": torch.ones(2)}),
        (lambda y: {"a": y}, [torch.ones(2)]),
    ],
)
def test_what_does_not_fit_is_a_runtime_error(module, outputs, gradients):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError) as raised:
        module.stage_backward(outputs(x * 2), gradients, [x])
    assert raised.value.__cause__ is not None
    assert "torch.Size([2])" in str(raised.value)


@BOTH
def test_errors_of_the_first_half_are_runtime_errors(module):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError) as raised:
        module.stage_backward_input([x * 2], [torch.ones(3)], [x], iter([]))
    assert raised.value.__cause__ is not None


@BOTH
def test_gradients_of_inputs_have_a_place_for_each(module):
    x, fixed = torch.ones(2, requires_grad=True), torch.ones(2)
    found = module._autograd_grad_for_inputs([(x * 2).sum()], [fixed, x, "text"])
    assert found[0] is None
    assert found[1].tolist() == [2, 2]
    assert found[2] is None
    assert module._autograd_grad_for_inputs([x * 2], [fixed], [torch.ones(2)]) == (None,)


@BOTH
def test_nodes_of_tensors(module):
    leaf = torch.ones(2, requires_grad=True)
    assert module._get_grad_fn_or_grad_acc(torch.ones(2)) is None
    product = leaf * 2
    assert module._get_grad_fn_or_grad_acc(product) is product.grad_fn
    assert module._get_grad_fn_or_grad_acc(leaf) is product.grad_fn.next_functions[0][0]


@BOTH
def test_missing_gradients_count_as_nothing(module):
    one = torch.ones(2)
    assert module._null_coalesce_accumulate(None, None) is None
    assert module._null_coalesce_accumulate(one, None) is one
    assert module._null_coalesce_accumulate(None, one) is one
    assert module._null_coalesce_accumulate(one, one).tolist() == [2, 2]


def test_nothing_is_left_when_the_groups_are_gone():
    model, x = Block(), torch.randn(4, 6, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        hidden = model.first(x)
        held = weakref.ref(hidden)
        _, groups = ours.stage_backward_input([model.second(hidden)], [torch.ones(4, 6)], [x], model.parameters())
        ours.stage_backward_weight(model.parameters(), groups)
        ours.stage_backward([model(x)], [torch.ones(4, 6)], [x])
        del hidden, groups
        assert held() is None
    finally:
        gc.enable()
