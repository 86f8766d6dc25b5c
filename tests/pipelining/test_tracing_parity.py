"""Traces the same models with both packages: the same stages, with the same state, that compute the same."""

import copy
import warnings

import pytest
import torch
import torch.distributed.pipelining as upstream
from torch import fx, nn

import penstock.pipelining as ours
from models.tracing.traced_models import CASES, WIDTH, Chain, Layers, X, numbers

PACKAGES = (ours, upstream)


def trace(package, make, args, kwargs=None, **where):
    """The model of a case, and what a package makes of it."""
    torch.manual_seed(3)
    model = make(package.pipe_split)
    if (spec := where.get("split_spec")) is not None:
        where["split_spec"] = {name: getattr(package.SplitPoint, point) for name, point in spec.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of another part of it
        return package.pipeline(model, args, kwargs or {}, **where)


def of_case(package, name):
    case = CASES[name]
    return trace(package, case.make, case.args, dict(case.kwargs), split_spec=case.spec)


def stages(pipe):
    return [pipe.get_stage_module(index) for index in range(pipe.num_stages)]


def calls(pipe):
    """What goes into each stage, and out of the model."""
    return [(node.op, str(node.target), str(node.args)) for node in pipe.info().graph.nodes]


def arguments(stage):
    return [node.name for node in stage.graph.nodes if node.op == "placeholder"]


@pytest.mark.parametrize("name", CASES)
def test_stages_are_those_of_torch(name):
    mine, theirs = (of_case(package, name) for package in PACKAGES)
    assert mine.num_stages == theirs.num_stages
    assert calls(mine) == calls(theirs)
    assert [node.meta.get("stage_idx") for node in mine.info().graph.nodes] == [
        node.meta.get("stage_idx") for node in theirs.info().graph.nodes
    ]
    for one, other in zip(stages(mine), stages(theirs), strict=True):
        assert arguments(one) == arguments(other)
        assert sorted(one.state_dict()) == sorted(other.state_dict())
        for key, value in one.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[key], rtol=0, atol=0)
        assert {key for key, _ in one.named_parameters()} == {key for key, _ in other.named_parameters()}
    sets = [{frozenset(each.items()) for each in pipe.replicated_params} for pipe in (mine, theirs)]
    assert sets[0] == sets[1]


@pytest.mark.parametrize("name", CASES)
def test_a_pipe_computes_what_torchs_computes(name):
    case = CASES[name]
    torch.manual_seed(3)
    whole = case.make(lambda: None)
    expected = torch.utils._pytree.tree_leaves(whole(*case.args, **case.kwargs))
    flat = torch.utils._pytree.tree_leaves((case.args, dict(case.kwargs)))
    results = [of_case(package, name)(*flat) for package in PACKAGES]
    assert all(type(result) is tuple for result in results)
    for outputs in zip(expected, *results, strict=True):
        for output in outputs[1:]:
            torch.testing.assert_close(output, outputs[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["chain", "nested", "by name", "skips", "shared"])
def test_gradients_of_stages_are_those_of_torchs(name):
    """Run as one, and backward through all stages."""
    found = []
    for package in PACKAGES:
        pipe = of_case(package, name)
        flat = torch.utils._pytree.tree_leaves((CASES[name].args, dict(CASES[name].kwargs)))
        outputs = fx.Interpreter(pipe.split_gm).run(*flat)
        sum(output.float().square().mean() for output in outputs if output.requires_grad).backward()
        found.append(
            {
                (index, key): value.grad
                for index, stage in enumerate(stages(pipe))
                for key, value in stage.named_parameters()
            }
        )
    assert found[0].keys() == found[1].keys()
    assert any(gradient is not None for gradient in found[0].values())
    for key, gradient in found[0].items():
        assert (gradient is None) == (found[1][key] is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, found[1][key], rtol=0, atol=0)


def test_the_first_stage_takes_keyword_arguments_of_the_model():
    class Two(nn.Module):
        def __init__(self, split):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.split = split

        def forward(self, x, *, scale=None):
            x = self.first(x) * scale
            self.split()
            return self.second(x)

    first = [trace(package, Two, (X,), {"scale": X + 1}).get_stage_module(0) for package in PACKAGES]
    found = [stage(X, scale=X + 2) for stage in first]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def policy_of(package):
    """Cut before the second and before the last linear layer."""

    def policy(module):
        linears = [node for node in module.graph.nodes if node.target is torch.ops.aten.linear.default]
        for node in (linears[1], linears[-1]):
            with module.graph.inserting_before(node):
                module.graph.call_function(package._IR.aten_pipe_split_alias)
        module.recompile()
        return module

    return policy


def test_a_policy_cuts_as_in_torch():
    mine, theirs = (
        trace(package, Layers, CASES["by name"].args, split_policy=policy_of(package)) for package in PACKAGES
    )
    assert mine.num_stages == theirs.num_stages == 3
    assert calls(mine) == calls(theirs)
    for one, other in zip(stages(mine), stages(theirs), strict=True):
        assert list(one.state_dict()) == list(other.state_dict())


def test_a_policy_or_a_model_with_torchs_mark_is_cut_too():
    pipe = trace(ours, Layers, CASES["by name"].args, split_policy=policy_of(upstream))
    assert pipe.num_stages == 3
    assert ours.pipeline(Chain(upstream.pipe_split), (X,)).num_stages == 3


def test_sequentials_with_marks():
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    found = []
    for package in PACKAGES:
        marked = package._IR.PipeSequential.from_sequential(copy.deepcopy(plain))
        found.append(trace(package, lambda _, marked=marked: marked, (X,)))
    assert [list(stage.state_dict()) for stage in stages(found[0])] == [
        list(stage.state_dict()) for stage in stages(found[1])
    ]
    torch.testing.assert_close(found[0](X), found[1](X), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["spec", "wrapper"])
def test_a_loss_in_the_graph_comes_with_its_backward(name):
    """``Pipe._from_traced`` with a loss spec: calling the pipe leaves the gradients of the whole model."""
    x, target = numbers(1, 2, WIDTH), numbers(2, 2, WIDTH)
    found = []
    for package in PACKAGES:
        torch.manual_seed(3)
        model = package._IR.TrivialLossWrapper(Chain(package.pipe_split), nn.functional.mse_loss)
        if name == "spec" or package is upstream:  # whose wrapper, behind an export, gets no backward

            class Wrapped(package._IR.LossWrapper):
                def forward(self, x, targets):
                    return self.loss_fn(self.module(x), targets)

            model = Wrapped(model.module, model.loss_fn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            program = torch.export.export(model, (x, target))
            pipe = package._IR.Pipe._from_traced(model, program, output_loss_value_spec=(True,))
        assert pipe.has_loss_and_backward
        assert pipe.info().has_loss_and_backward
        loss = pipe(x, target)[0]
        gradients = {key: value.grad for stage in stages(pipe) for key, value in stage.named_parameters()}
        found.append((loss, gradients))
    assert len(found[0][1]) == 8
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert ours._IR._find_loss_output(model, program.graph, None)[0] is None


def mistakes(package):
    """Calls that raise, and what of torch's messages is worth keeping."""
    chain = CASES["chain"]
    point = package.SplitPoint.END

    def pipe():
        return of_case(package, "chain")

    class Guarded(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum().item() > 0 else x

    return {
        "unknown module": lambda: package.pipeline(Layers(None), chain.args, split_spec={"layers.7": point}),
        "unknown parent": lambda: package.pipeline(Layers(None), chain.args, split_spec={"blocks.0": point}),
        "not a point": lambda: package.pipeline(Layers(None), chain.args, split_spec={"head": "END"}),
        "both": lambda: package.pipeline(Layers(None), chain.args, split_spec={}, split_policy=lambda graph: graph),
        "no such stage": lambda: pipe().get_stage_module(3),
        "negative stage": lambda: pipe().get_stage_module(-1),
        "the graph alone": lambda: pipe().split_gm(X),
        "untraceable": lambda: package.pipeline(Guarded(), chain.args),
        "arguments that do not fit": lambda: package.pipeline(Chain(package.pipe_split), (X, X)),
        "another graph": lambda: (
            package.Pipe(fx.symbolic_trace(nn.ReLU()), 1, False, None)
            and package.Pipe(fx.symbolic_trace(lambda x: x + 1), 1, False, None)
        ),
        "a spec of another type": lambda: package._IR._find_loss_from_output_and_spec(1, "loss"),
        "a spec of another length": lambda: package._IR._find_loss_from_output_and_spec((1, 2), (True,)),
        "a spec of other keys": lambda: package._IR._find_loss_from_output_and_spec({"a": 1}, {"b": True}),
        "a spec without loss": lambda: package._IR._find_loss_from_output_and_spec((1, 2), [False, False]),
        "a constant as loss": lambda: package._IR._find_loss_from_output_and_spec(1, True),
    }


@pytest.mark.parametrize("name", mistakes(ours))
def test_mistakes_raise_what_torch_raises(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with pytest.raises(Exception) as theirs:  # noqa: PT011 - which one is what is asked
            mistakes(upstream)[name]()
        with pytest.raises(type(theirs.value)):
            mistakes(ours)[name]()
