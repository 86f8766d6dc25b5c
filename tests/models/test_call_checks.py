"""A stage refuses calls that are not like the example; other sizes are served wherever stages can follow them."""

import re
import time

import pytest
import torch
from torch import nn

import penstock as ps
from models.hugging_face import batch, build
from models.in_turn import assert_equal
from penstock.errors import SplitError
from penstock.models.self_check import run_stages


def rows(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def squares(output):
    return (output * output).mean()


class Layers(nn.Module):
    def __init__(self, count=4, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])
        self.double()

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Flag(Layers):
    """The last stage reads the first layer's output only if it is told to."""

    def forward(self, x, skip=False, bias=None):
        first = self.layers[0](x)
        hidden = self.layers[2](self.layers[1](first))
        hidden = hidden + first if skip else hidden
        hidden = hidden + first * bias if bias is not None else hidden
        return self.layers[3](hidden)


class Scaled(Layers):
    def forward(self, x, scale=1.0, mask=None):
        x = self.run(x) * scale
        return x if mask is None else x * mask


class Options(Layers):
    def forward(self, x, options=None):
        return self.run(x) * options["scale"] if options["on"] else self.run(x)


class LeavesNumbers(Layers):
    """The first layer returns a number that the parent's code uses at the end."""

    class Layer(nn.Linear):
        how = staticmethod(lambda x: x.shape[0])

        def forward(self, x):
            return super().forward(x), self.how(x)

    def __init__(self, how):
        super().__init__()
        self.layers[0] = self.Layer(4, 4).double()
        self.layers[0].how = how

    def forward(self, x):
        x, number = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return x / number


class Ids(Layers):
    """A model of tokens whose code reads the shape of its input at the end."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 4).double()

    def forward(self, ids):
        return self.run(self.embed(ids)).sum() / ids.shape[1]


class Turned(Ids):
    """The sequence comes first inside."""

    def forward(self, ids):
        return self.run(self.embed(ids.T))[: ids.shape[1]]


class Pooled(Ids):
    """Behind the first layer nothing has the length of the sequence."""

    def forward(self, ids):
        hidden = self.layers[1](self.layers[0](self.embed(ids)).mean(1))
        return self.layers[3](self.layers[2](hidden)) / ids.shape[1]


class SameWidth(Pooled):
    """As wide as the example is long: a later stage would take the one for the other."""


class Shrinks(Layers):
    """A layer halves its input, and the code at the end reads how long the result was."""

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, ::2]

    def __init__(self):
        super().__init__()
        self.layers[0] = self.Layer(4, 4).double()

    def forward(self, x):
        half = self.layers[0](x)
        hidden = self.layers[2](self.layers[1](half.mean(1)))
        return self.layers[3](hidden) / half.shape[1]


def run(split, *args, **kwargs):
    return run_stages(split.stages(), split.edges, args, kwargs)


X = rows(3, 4)
IDS = torch.arange(14).view(2, 7)

#: A model, its example, a call that is not like it, and what the error says.
DIFFERENT = {
    "flag": (Flag, ((X,), {"skip": False}), ((X,), {"skip": True}), "skip was False in the example, but is True now"),
    "flag on": (Flag, ((X,), {"skip": True}), ((X,), {}), "skip was True in the example, but is False now"),
    "type": (Flag, ((X,), {"skip": True}), ((X,), {"skip": 1}), "skip was True in the example, but is 1 now"),
    "unknown tensor": (
        Flag,
        ((X,), {}),
        ((X,), {"bias": X}),
        "bias=a tensor of shape [3, 4] was not part of the example",
    ),
    "tensor missing": (
        Flag,
        ((X,), {"bias": X}),
        ((X,), {}),
        "bias was a float tensor of 2 dimensions in the example, but is None now",
    ),
    "dimensions": (
        Flag,
        ((X,), {"bias": X}),
        ((X,), {"bias": X[0]}),
        "bias was a float tensor of 2 dimensions in the example, but is a float tensor of 1 dimensions now",
    ),
    "kind": (
        Flag,
        ((X,), {"bias": X}),
        ((X,), {"bias": X > 0}),
        "bias was a float tensor of 2 dimensions in the example, but is a bool tensor of 2 dimensions now",
    ),
    "nested": (
        Options,
        ((X,), {"options": {"on": True, "scale": 2.0}}),
        ((X,), {"options": {"on": True, "scale": 3.0}}),
        "options.scale was 2.0 in the example, but is 3.0 now",
    ),
    "nested keys": (
        Options,
        ((X,), {"options": {"on": False}}),
        ((X,), {"options": {"on": False, "scale": 3.0}}),
        "options has options.on in the example, but has options.on, options.scale now",
    ),
    "positional number": (
        Scaled,
        ((X, 1.0), {}),
        ((X, 2.0), {}),
        "args[1] was 1.0 in the example, but is 2.0 now; make it a tensor if it changes",
    ),
    "positional None": (
        Scaled,
        ((X, 1.0, None), {}),
        ((X, 1.0, X), {}),
        "args[2] was None in the example, but is a float tensor of 2 dimensions now; pass it by keyword",
    ),
    "positional left out": (
        Scaled,
        ((X, 1.0), {}),
        ((X, 1.0, X), {}),
        "the model is called with 3 positional arguments, but its example had 2",
    ),
    "positional structure": (
        Options,
        ((X, {"on": False}), {}),
        ((X, None), {}),
        "args[1] is a dict in the example, but is None now",
    ),
    "keyword instead": (
        Scaled,
        ((X,), {}),
        ((), {"x": X}),
        "'x' was positional argument 0 of the example, but is a keyword argument now",
    ),
    "position instead": (
        Scaled,
        ((), {"x": X}),
        ((X,), {}),
        "the model is called with 1 positional argument, but its example had 0; pass x=... by keyword",
    ),
    "number of a unit": (
        lambda: LeavesNumbers(lambda x: x.shape[0]),
        ((X,), {}),
        ((rows(5, 4),), {}),
        "what 'layers.0' returns was 3 in the probe, but is 5 now, and other stages use the former",
    ),
    "measured number": (
        lambda: LeavesNumbers(lambda x: float(x.abs().mean())),
        ((X,), {}),
        ((rows(3, 4, seed=1),), {}),
        "what 'layers.0' returns was 0.",
    ),
    "None": (
        lambda: LeavesNumbers(lambda x: 2 if x.shape[0] < 4 else torch.ones(())),
        ((X,), {}),
        ((rows(5, 4),), {}),
        "what 'layers.0' returns was 2 in the probe, but is a float tensor of 0 dimensions now",
    ),
    "sequence first": (
        Turned,
        ((IDS,), {}),
        ((torch.arange(10).view(2, 5),), {}),
        "args[0] has size 7 in dimension 1 in the example, but has 5 now; pass it by keyword",
    ),
    "no length": (
        Pooled,
        ((IDS,), {}),
        ((torch.arange(10).view(2, 5),), {}),
        "args[0] has size 7 in dimension 1 in the example, but has 5 now; pass it by keyword",
    ),
    "mistaken length": (
        SameWidth,
        ((IDS[:, :4],), {}),
        ((IDS,), {}),
        "args[0] has size 7 in dimension 1, which stage 2 cannot derive from layers.1, whose shape is [2, 4]",
    ),
    "result of another shape": (
        Shrinks,
        ((), {"x": rows(2, 8, 4)}),
        ((), {"x": rows(2, 6, 4)}),
        "'layers.0' returns a tensor of shape [2, 3, 4], but other stages, to whom it is not sent, expect [2, 4, 4]",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_call_unlike_the_example_is_refused(case):
    model, example, call, message = DIFFERENT[case]
    split = ps.split(model(), stages=4, example=example)
    run(split, *example[0], **example[1])
    with pytest.raises(SplitError, match=re.escape(message)) as caught:
        run(split, *call[0], **call[1])
    assert "split the model again" in str(caught.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["flag", "unknown tensor", "nested", "keyword instead"])
def test_every_stage_checks_the_keywords(case, stage):
    model, example, (_, kwargs), message = DIFFERENT[case]
    split = ps.split(model(), stages=4, example=example)
    received = [X for edge in split.edges if stage in edge.targets]
    with pytest.raises(SplitError, match=re.escape(message)):
        split.stages()[stage](*(received if stage else [X]), **kwargs)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("kind", [Ids, Turned, Pooled])
def test_keyword_inputs_of_any_size(kind, stages):
    model = kind()
    split = ps.split(model, stages=stages, example=((), {"ids": torch.tensor([[1, 2, 3, 4]])}))
    sizes = [(5, 30), (1, 1), (3, 4), (4, 5)]
    calls = [((), {"ids": torch.arange(a * b).view(a, b) % 16}) for a, b in sizes]
    assert_equal(split, model, calls, squares)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("kind", [Ids, Pooled, Turned])
def test_positional_inputs_of_any_number_of_samples(kind, stages):
    model = kind()
    split = ps.split(model, stages=stages, example=((IDS,), {}))
    assert_equal(split, model, [((torch.arange(7 * n).view(n, 7) % 16,), {}) for n in (5, 1, 3)], squares)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_positional_inputs_of_any_length_where_it_can_be_followed(stages):
    model = Ids()
    split = ps.split(model, stages=stages, example=((torch.tensor([[1, 2, 3, 5, 6]]),), {}))
    assert_equal(split, model, [((torch.arange(150).view(5, 30) % 16,), {})], squares)


def test_defaults_may_be_written_out_or_left_out():
    model = Flag()
    split = ps.split(model, stages=4, example=((X,), {}))
    expected = model(X)
    assert torch.equal(run(split, X, skip=False, bias=None), expected)
    split = ps.split(model, stages=4, example=((X,), {"skip": False, "bias": None}))
    assert torch.equal(run(split, X), expected)


class Decides(Layers):
    """The values of a keyword input decide whether the first layer is read again at the end."""

    def forward(self, x, weights):
        first = self.layers[0](x)
        hidden = self.layers[2](self.layers[1](first))
        return self.layers[3](hidden + first if weights.sum() > 0 else hidden)


def test_a_value_that_was_not_sent_is_not_zero():
    model = Decides()
    split = ps.split(model, stages=4, example=((X,), {"weights": -torch.ones(3)}))
    assert torch.equal(run(split, X, weights=-torch.ones(5)), model(X, -torch.ones(5)))
    assert run(split, X, weights=torch.ones(3)).isnan().all()


class OverwritesAView(Layers):
    """What a stage receives is a view of what the parent has computed, also with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        first = self.layers[0](x)
        both = (first * self.scale + self.layers[1](first)).view(-1, 4)
        return self.layers[3](self.layers[2](both)) * self.scale


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_gradient_comes_from_a_value_that_was_not_sent(stages):
    model = OverwritesAView()
    split = ps.split(model, stages=stages, example=((X,), {}))
    assert_equal(split, model, [((X,), {}), ((rows(5, 4),), {})], squares)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "mixtral"])
def test_masks_and_positions_of_hugging_face_models_come_and_go(family):
    model = build(family)
    given = batch(family, 3, 9)
    positions = torch.arange(9).expand(3, 9) + 1
    calls = [
        ((), given),
        ((), given | {"position_ids": positions, "use_cache": False}),
        ((), {name: value for name, value in given.items() if name != "attention_mask"}),
    ]
    for example in (None, ((), given)):
        split = ps.split(model, stages=3, example=example)
        assert_equal(split, split.model, calls, lambda output: output.loss)
    with torch.no_grad():
        whole = {name: value for name, value in given.items() if name != "labels"}
        torch.manual_seed(0)
        expected = split.model(**whole).logits
        torch.manual_seed(0)
        assert torch.equal(run(split, **whole).logits, expected)


def test_the_checks_are_cheap():
    class Nothing(nn.Module):
        def forward(self, x):
            return x

    class Many(Layers):
        def __init__(self):
            super().__init__(2)
            self.between = nn.ModuleList([Nothing() for _ in range(100)])

        def forward(self, x, mask=None, flag=False):
            x = self.layers[0](x)
            for part in self.between:
                x = part(x)
            return self.layers[1](x)

    model = Many()
    first = ps.split(model, stages=2, example=((X,), {"mask": X, "flag": False})).stages()[0]
    with torch.no_grad():
        start = time.perf_counter()
        for _ in range(20):
            first(X, mask=X, flag=False)
        seconds = (time.perf_counter() - start) / 20
    assert seconds < 0.05, f"a forward with 50 units that do nothing takes {seconds} s"
