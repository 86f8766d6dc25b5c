"""The functions that work on graphs, beside those of torch."""

import operator
import warnings

import pytest
import torch
import torch.distributed.pipelining as upstream
from torch import fx, nn

import penstock.pipelining as ours
from models.tracing.traced_models import WIDTH, Nested, X
from penstock.pipelining import _IR, _unflatten

PACKAGES = (ours, upstream)


def placed(order):
    """A graph with placeholders (p) and attributes (a) in this order, then their sum."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(WIDTH))
    graph = fx.Graph()
    values = [
        graph.placeholder(f"p{number}") if kind == "p" else graph.get_attr("weight")
        for number, kind in enumerate(order)
    ]
    total = values[0]
    for value in values[1:]:
        total = graph.call_function(operator.add, (total, value))
    graph.output(total)
    return fx.GraphModule(module, graph)


@pytest.mark.parametrize("order", ["p", "app", "pap", "ppa", "apapa", "papap"])
def test_placeholders_move_to_the_front(order):
    orders = []
    for package in (_IR, upstream._IR):
        module = placed(order)
        package._move_placeholders_to_front(module.graph)
        module.graph.lint()
        module.recompile()
        orders.append([node.op for node in module.graph.nodes])
        inputs = [X * number for number in range(order.count("p"))]
        torch.testing.assert_close(module(*inputs), sum(inputs) + order.count("a"))
    assert orders[0] == orders[1]
    assert orders[0][: order.count("p")] == ["placeholder"] * order.count("p")


def test_a_graph_without_nodes_has_nothing_to_move():
    graph = fx.Graph()
    _IR._move_placeholders_to_front(graph)
    assert len(graph.nodes) == 0


def test_modules_are_outlined_as_in_torch():
    """From a graph in which parameters are arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        program = torch.export.export(Nested(lambda: None), (X,))
    made = [package._outline_submodules(program.graph) for package in (_unflatten, upstream._unflatten)]
    assert [name for name, _ in made[0].named_modules()] == [name for name, _ in made[1].named_modules()]
    names = [[node.name for node in each.graph.nodes if node.op == "placeholder"] for each in made]
    assert names[0] == names[1]
    inputs = [*program.state_dict.values(), X]
    torch.testing.assert_close(made[0](*inputs), (program.module()(X),), rtol=0, atol=0)


def test_nodes_without_a_graph():
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    found = []
    for package in (_IR, upstream._IR):
        nodes = package._LinearNodeList(module.graph.nodes)
        assert [node.name for node in nodes.serialize_node_list] == [node.name for node in module.graph.nodes]
        assert isinstance(nodes.serialize_node_list[1].args[0], package._NodeReference)
        assert nodes.serialize_node_list[1].args[0].name == "input_1"
        found.append(str(nodes.to_graph()))
    assert found[0] == found[1]
    restored = _IR._direct_serialization_deserialize(*_IR._direct_serialization_reduce(module)[1])
    torch.testing.assert_close(restored(X), module(X), rtol=0, atol=0)


def test_forwards_with_marks():
    model = nn.Linear(WIDTH, WIDTH)
    model._orig_forward = model.forward
    for split in (_IR._split_before_forward, _IR._split_after_forward):
        torch.testing.assert_close(split(model, X), model(X), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("output", "spec", "found"),
    [
        ("a", True, "a"),
        ("a", False, None),
        (("a", "b"), (False, True), "b"),
        (["a", ("b", "c")], [False, (True, False)], "b"),
        ({"x": "a", "loss": "b"}, {"x": False, "loss": True}, "b"),
    ],
)
def test_a_spec_says_which_output_is_the_loss(output, spec, found):
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in "abc"}
    given = torch.utils._pytree.tree_map_only(str, nodes.__getitem__, output)
    for package in (_IR, upstream._IR):
        try:
            result = package._find_loss_from_output_and_spec(given, spec)
        except RuntimeError:
            # An inner spec without a loss is an error in torch, where only the whole has to have one.
            assert package is upstream
            continue
        assert result is nodes.get(found)


def test_a_loss_is_found_by_its_name():
    graph = fx.Graph()
    loss, logits = graph.placeholder("loss"), graph.placeholder("logits")
    graph.output({"loss": loss, "logits": logits})
    for package in (_IR, upstream._IR):
        node, output, spec = package._find_loss_output(nn.Module(), graph, None)
        assert (node, output.op, spec) == (loss, "output", {"loss": True, "logits": False})
