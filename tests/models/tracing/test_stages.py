"""What a trace is made into: names, copies, cuts, and where ours does better than torch."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn

from models.tracing.traced_models import CASES, IDS, WIDTH, Block, Chain, Layers, X, numbers
from penstock.errors import SplitError, TraceError
from penstock.pipelining import SplitPoint, pipe_split, pipeline

END, BEGINNING = SplitPoint.END, SplitPoint.BEGINNING


def stages(pipe):
    return [pipe.get_stage_module(index) for index in range(pipe.num_stages)]


def run_as_one(pipe, *args):
    """All stages in one graph, through which a backward goes."""
    return fx.Interpreter(pipe.split_gm).run(*args)


def gradients(modules):
    """The gradient of each parameter by name; those of copies in several stages are summed."""
    found = {}
    for module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad
    return found


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.middle = Block()
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.middle(self.embed(ids)))


def test_a_tied_weight_has_the_name_of_the_module_that_uses_it():
    pipe = pipeline(model := Tied(), (IDS,), split_spec={"middle": BEGINNING, "head": BEGINNING})
    assert [list(stage.state_dict()) for stage in stages(pipe)] == [
        ["embed.weight"],
        ["middle.linear.weight", "middle.linear.bias", "middle.norm.weight", "middle.norm.bias"],
        ["head.weight"],
    ]
    assert pipe.replicated_params == [{"submod_pp_0": "embed.weight", "submod_pp_2": "head.weight"}]
    run_as_one(pipe, IDS)[0].square().mean().backward()
    model(IDS).square().mean().backward()
    found = gradients(stages(pipe))
    torch.testing.assert_close(found["embed.weight"] + found["head.weight"], model.embed.weight.grad)


class Again(nn.Module):
    """A module that runs three times, in two stages; a parameter that its parent reads, too."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.block(x)
        pipe_split()
        x = self.block(self.block(x)) + self.block[0].bias
        return self.last(x)


def test_a_module_that_runs_again_keeps_its_names():
    pipe = pipeline(model := Again(), (X,))
    assert [list(stage.state_dict()) for stage in stages(pipe)] == [
        ["block.0.weight", "block.0.bias"],
        ["block.0.weight", "block.0.bias", "last.weight", "last.bias"],
    ]
    assert len(pipe.replicated_params) == 2
    run_as_one(pipe, X)[0].square().mean().backward()
    model(X).square().mean().backward()
    for name, gradient in gradients(stages(pipe)).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_buffers_stay_as_persistent_as_they_were():
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            self.inner.register_buffer("kept", torch.ones(WIDTH))
            self.inner.register_buffer("table", torch.full((WIDTH,), 2.0), persistent=False)

        def forward(self, x):
            return x * self.inner.kept + self.inner.table

    (stage,) = stages(pipeline(Tables(), (X,)))
    for each in (stage, copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
        assert list(each.state_dict()) == ["inner.kept"]
        assert [name for name, _ in each.named_buffers()] == ["inner.kept", "inner.table"]
        torch.testing.assert_close(each(X), X + 2)


@pytest.mark.parametrize("name", CASES)
def test_stages_can_be_copied_and_pickled(name):
    case = CASES[name]
    spec = case.spec and {name: SplitPoint[point] for name, point in case.spec.items()}
    pipe = pipeline(case.make(pipe_split), case.args, dict(case.kwargs), split_spec=spec)
    for stage in stages(pipe):
        for twin in (copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
            assert list(twin.state_dict()) == list(stage.state_dict())
            assert [(node.op, node.name, str(node.args)) for node in twin.graph.nodes] == [
                (node.op, node.name, str(node.args)) for node in stage.graph.nodes
            ]
            shapes = [
                [node.meta["val"].shape for node in each.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
                for each in (stage, twin)
            ]
            assert shapes[0] == shapes[1] != []
            assert twin.code == stage.code


@pytest.mark.parametrize(
    "spec",
    [
        {"embed": BEGINNING, "layers.1": BEGINNING},
        {"layers.0": END, "layers.1": BEGINNING},
        {"layers.0": END, "head": END},
    ],
)
def test_stages_are_numbered_without_gaps(spec):
    model = Layers(None)
    pipe = pipeline(model, (IDS,), split_spec=spec)
    assert pipe.num_stages == 2
    assert [name for name, _ in pipe.split_gm.named_children()] == ["submod_pp_0", "submod_pp_1"]
    torch.testing.assert_close(pipe(IDS)[0], model(IDS), rtol=0, atol=0)


def test_the_model_is_left_as_it_was():
    model = Layers(None)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    for _ in range(2):
        pipe = pipeline(model, (IDS,), split_spec={"layers.1": BEGINNING, "head": BEGINNING})
        assert pipe.num_stages == 3
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    with pytest.raises(SplitError):
        pipeline(model, (IDS,), split_spec={"layers.1": BEGINNING, "head": "END"})
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert stages(pipe)[2].head.weight is model.head.weight


def test_a_module_may_be_annotated_twice():
    from penstock.pipelining._IR import annotate_split_points

    model = Layers(None)
    annotate_split_points(model, {"layers.1": BEGINNING})
    annotate_split_points(model, {"layers.1": END})
    assert pipeline(model, (IDS,)).num_stages == 3


class Swapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        z = self.first(y) - x
        pipe_split()
        return self.second(z)


def test_arguments_are_in_the_order_of_the_model():
    y = numbers(1, *X.shape)
    model = Swapped()
    pipe = pipeline(model, (X, y))
    expected = model.first(y) - X
    torch.testing.assert_close(stages(pipe)[0](X, y), expected, rtol=0, atol=0)
    torch.testing.assert_close(stages(pipe)[0](y=y, x=X), expected, rtol=0, atol=0)
    torch.testing.assert_close(pipe(X, y=y)[0], model(X, y), rtol=0, atol=0)


def test_a_tensor_may_be_the_example_of_two_arguments():
    y = numbers(1, *X.shape)
    model = Swapped()
    torch.testing.assert_close(pipeline(model, (X, X))(X, y)[0], model(X, y), rtol=0, atol=0)


def test_parameters_and_arguments_may_be_outputs():
    class Outputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.linear(x)
            pipe_split()
            return y + 1, self.linear.weight, x, None

    model = Outputs()
    found = pipeline(model, (X,))(X)
    assert found[3] is None
    torch.testing.assert_close(found[:3], model(X)[:3], rtol=0, atol=0)


def test_what_only_has_effects_joins_the_part_before():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            x = self.linear(x)
            pipe_split()
            self.seen.add_(1)
            pipe_split()
            return torch.relu(x)

    pipe = pipeline(Counting(), (X,))
    assert pipe.num_stages == 2
    pipe(X)
    assert stages(pipe)[0].seen.item() == 1


def test_devices_of_created_tensors_are_moved():
    class Creating(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Noise()

        def forward(self, x):
            return self.inner(x) + torch.ones(WIDTH, device=x.device)

    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.zeros(WIDTH, device=x.device)

    from penstock.pipelining._IR import _modify_graph_op_device

    (stage,) = stages(pipeline(Creating(), (X,)))
    _modify_graph_op_device(stage, torch.device("meta"))
    assert stage(X.to("meta")).device.type == "meta"


class Untraceable(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


def test_what_cannot_be_traced_is_named():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(), Untraceable()))
    with pytest.raises(TraceError, match=r"cannot trace module '1.1' \(Untraceable\)") as raised:
        pipeline(model, (X,))
    assert raised.value.unit == "1.1"
    assert isinstance(raised.value, RuntimeError)
    assert "ps.split(model, layout=" in str(raised.value)
    assert raised.value.__cause__ is not None
    with pytest.raises(TraceError, match="the forward of Untraceable"):
        pipeline(Untraceable(), (X,))
    reserved = nn.Sequential()
    reserved.register_module("graph", nn.Linear(WIDTH, WIDTH))
    with pytest.raises(TraceError, match=r"cannot trace the forward of Sequential: .*graph"):
        pipeline(reserved, (X,))


def test_an_unknown_module_comes_with_near_matches():
    with pytest.raises(AttributeError, match=r"no module 'layer.1'.*did you mean 'layers.1'") as raised:
        pipeline(Layers(None), (IDS,), split_spec={"layer.1": END})
    assert isinstance(raised.value, SplitError)
    with pytest.raises(ValueError, match="stages are 0 to 2"):
        pipeline(Chain(pipe_split), (X,)).get_stage_module(3)


class InPlace(nn.Module):
    """The second stage changes what it gets, and the third uses it, too."""

    def __init__(self, change):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x):
        x = self.first(x) * 2
        pipe_split()
        y = self.change(x)
        pipe_split()
        return self.last(y) + x


@pytest.mark.parametrize(
    "change", [nn.ReLU(inplace=True), lambda x: x.add_(1), lambda x: x.mul_(3), lambda x: nn.functional.relu_(x) + 1]
)
def test_a_change_in_place_of_another_stages_value_is_seen_by_all(change):
    pipe = pipeline(model := InPlace(change), (X,))
    assert pipe.num_stages == 3
    expected = model(X)
    expected.square().mean().backward()
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    torch.testing.assert_close(pipe(X)[0], expected, rtol=0, atol=0)
    run_as_one(pipe, X)[0].square().mean().backward()
    torch.testing.assert_close(gradients(stages(pipe)), whole)


def test_a_change_in_place_that_a_later_stage_would_miss_is_refused():
    class Missed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.first(x) * 2
            row = x[:1]
            pipe_split()
            y = x.mul_(3)
            pipe_split()
            return y + row

    with pytest.raises(TraceError, match=r"changes a value of an earlier stage in place \(aten.mul_"):
        pipeline(Missed(), (X,))
    model = InPlace(lambda x: x.mul_(x[:1] + 1))
    with torch.no_grad():
        torch.testing.assert_close(pipeline(model, (X,))(X)[0], model(X), rtol=0, atol=0)
