import ctypes
import re
import threading

import pytest
import torch
from torch import nn

import penstock as ps
from models.in_turn import Tied
from penstock.errors import SizeError, SplitError

X = ((torch.ones(2, 4),), {})


class Chain(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class StoredOutput(Chain):
    """The first layer returns a value, and stores it where the last one finds it, which has a default."""

    class Layer(nn.Linear):
        def __init__(self, store):
            super().__init__(4, 4)
            self.store = store

        def forward(self, x):
            result = super().forward(x)
            if "first" not in self.store:
                self.store["first"] = result
                return result
            return result + self.store.get("first", 0)

    def __init__(self):
        super().__init__()
        self.store = {}
        self.layers = nn.ModuleList([self.Layer(self.store), nn.Linear(4, 4), self.Layer(self.store)])

    def forward(self, x):
        self.store.clear()
        return super().forward(x)


class SharedDictionary(Chain):
    """The first layer stores a value that the last one reads."""

    class Layer(nn.Linear):
        def forward(self, x, store):
            if "first" not in store:
                store["first"] = x * 2
            return super().forward(x) + store["first"]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(4, 4) for _ in range(3)])

    def forward(self, x):
        store = {}
        for layer in self.layers:
            x = layer(x, store)
        return x


class Loop(Chain):
    def forward(self, x):
        for _ in range(3):
            x = super().forward(x)
        return x


class Hidden(Chain):
    """A later layer's input depends on an earlier one's output in a way that no operator shows."""

    def forward(self, x):
        first = self.layers[0](x)
        factor = ctypes.c_float.from_address(first.data_ptr()).value
        return self.layers[2](self.layers[1](x) * factor)


class FailsOnNan(Hidden):
    """Its own code fails on what a stage must not read."""

    def forward(self, x):
        first = self.layers[0](x)
        count = round(ctypes.c_float.from_address(first.data_ptr()).value)
        return self.layers[2](self.layers[1](x) * count)


class Locked(Chain):
    def __init__(self):
        super().__init__()
        self.layers[1].lock = threading.Lock()


class Boxed(Chain):
    class Box:
        def __init__(self, value):
            self.value = value

    class Layer(nn.Linear):
        def forward(self, x):
            return Boxed.Box(super().forward(x))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(4, 4) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).value
        return x


def names(*stages):
    return [[f"layers.{number}" for number in stage] for stage in stages]


class Replaced(Chain):
    """The forward is replaced by a function, which no copy of the model follows."""

    def __init__(self):
        super().__init__()
        old = self.forward
        self.forward = lambda x: old(x) * 2


class SameMemory(Chain):
    """Two parameters that are one in memory only."""

    def __init__(self):
        super().__init__()
        self.layers[2].weight = nn.Parameter(self.layers[0].weight)


ERRORS = {
    "replaced forward": (Replaced, {"stages": 2}, "the forward calls none of the model's modules", None),
    "same memory": (
        SameMemory,
        {"stages": 2},
        "layers.0.weight and layers.2.weight are two parameters in the same memory, and not on one stage",
        "layers.2.weight",
    ),
    "unknown name": (
        Chain,
        {"layout": [["layers.0", "layer.1"], ["layers.2"]]},
        "unknown module 'layer.1' on stage 0; did you mean 'layers.1'",
        "layer.1",
    ),
    "named twice": (Chain, {"layout": names([0, 1], [1, 2])}, "'layers.1' is named twice: on stages 0, 1", "layers.1"),
    "left out": (Chain, {"layout": names([0], [2])}, "the layout leaves out layers.1", "layers.1"),
    "backwards": (
        Chain,
        {"layout": names([1], [0, 2])},
        "an edge would go backwards: 'layers.1' on stage 0 needs what 'layers.0' on stage 1 returns",
        "layers.0",
    ),
    "too many stages": (Chain, {"stages": 4}, "4 stages need at least as many units, but the model has 3", None),
    "side channel": (
        SharedDictionary,
        {"stages": 3},
        "'layers.1' on stage 1 reads a value that 'layers.0' on stage 0 has stored instead of returning it",
        "layers.0",
    ),
    "side channel of an output": (
        StoredOutput,
        {"stages": 3},
        "'layers.2' on stage 2 reads a value that 'layers.0' on stage 0 has stored instead of returning it",
        "layers.0",
    ),
    "loop": (Loop, {"stages": 3}, "is called 3 times, in a loop", r"layers\.\d"),
    "loop by name": (Loop, {"layout": names([0], [1, 2])}, "'layers.0' is called in a loop", "layers.0"),
    "missed value": (Hidden, {"layout": names([0], [1], [2])}, "a stage reads a value of 'layers.0'", "layers.0"),
    "failure": (
        FailsOnNan,
        {"layout": names([0], [1], [2])},
        "a stage reads a value of 'layers.0' that was not found to be needed there (it fails with ValueError: cannot "
        "convert float NaN to integer)",
        "layers.0",
    ),
    "state": (Locked, {"stages": 2}, "layers.1 has state that cannot be copied", "layers.1"),
    "opaque": (Boxed, {"stages": 3}, "'layers.0' on stage 0 returns a Box", "layers.0"),
    "ties of different shapes": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        {"stages": 2, "ties": [("0.weight", "1.weight")]},
        "0.weight is float32[4, 4], but 1.weight is float32[2, 4]; tied parameters must be alike",
        "1.weight",
    ),
    "unknown tie": (
        Chain,
        {"stages": 2, "ties": [("layers.0.weight", "layers.1.wieght")]},
        "ties= names 'layers.1.wieght', which is not a parameter; did you mean layers.1.weight",
        "layers.1.wieght",
    ),
    "tie of a module": (
        Chain,
        {"stages": 2, "ties": [("layers.0", "layers.1.weight")]},
        "ties= names 'layers.0', which is not a parameter; name its parameters, e.g. layers.0.weight",
        "layers.0",
    ),
    "ties that are a number": (Chain, {"stages": 2, "ties": 3}, "ties= must be a list of groups of names, got 3", None),
    "tie of numbers": (Chain, {"stages": 2, "ties": [(1, 2)]}, "a tie is at least two names of parameters", None),
    "costs of a layout": (
        Chain,
        {"layout": names([0, 1], [2]), "costs": [1, 1, 1]},
        "costs= chooses a layout, but layout= is one",
        None,
    ),
    "constructor with arguments": (
        nn.Linear,
        {"stages": 2},
        "split calls Linear without arguments to build the model, but it is missing a required argument: 'in_features'",
        None,
    ),
    "one name in a tie": (Chain, {"stages": 2, "ties": ["layers.0.weight"]}, "a tie is at least two names", None),
    "neither": (Chain, {}, "pass either stages= or layout=", None),
    "both": (Chain, {"stages": 2, "layout": [[]]}, "pass either stages= or layout=", None),
    "example": (Chain, {"stages": 2, "example": (torch.ones(2, 4),)}, "must be (args, kwargs)", None),
    "bad example": (
        Chain,
        {"stages": 2, "example": ((torch.ones(2, 5),), {})},
        "the model failed on the example",
        None,
    ),
    "no model": (lambda: 3, {"stages": 2}, "split needs an nn.Module, or a function that returns one, got int", None),
}


@pytest.mark.parametrize("case", ERRORS)
def test_one_clear_error(case):
    build, arguments, message, unit = ERRORS[case]
    with pytest.raises(SplitError, match=re.escape(message)) as caught:
        ps.split(build, **{"example": X} | arguments)
    assert caught.value.unit is unit is None or re.fullmatch(unit, caught.value.unit)


@pytest.mark.parametrize("case", ["replaced forward", "same memory"])
def test_one_clear_error_for_a_built_model(case):
    build, arguments, message, _ = ERRORS[case]
    with pytest.raises(SplitError, match=re.escape(message)):
        ps.split(build(), example=X, **arguments)


def test_parameters_in_the_same_memory():
    assert not ps.split(SameMemory(), layout=names([0, 1, 2]), example=X).ties
    split = ps.split(SameMemory(), stages=2, ties=[("layers.0.weight", "layers.2.weight")], example=X)
    assert [tie.members for tie in split.ties] == [((0, "layers.0.weight"), (1, "layers.2.weight"))]


def test_parameters_side_by_side_in_one_memory():
    model = Chain()
    flat = torch.randn(3, 4, 4)
    for layer, weight in zip(model.layers, flat, strict=True):
        layer.weight = nn.Parameter(weight)
    assert len(ps.split(model, stages=3, example=X).layout) == 3


def test_a_loop_on_one_stage_is_fine():
    class Ends(Loop):
        def __init__(self):
            super().__init__(2)
            self.start, self.end = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.end(super().forward(self.start(x)))

    split = ps.split(Ends(), layout=[["start"], ["layers"], ["end"]], example=X)
    assert [str(edge) for edge in split.edges] == ["0>1 (start)", "1>2 (layers.1, call 3)"]


def test_missed_values_are_found_again_by_check():
    model = Hidden()
    split = ps.split(model, layout=names([0], [1], [2]), example=X, check=False)
    with pytest.raises(SplitError, match=re.escape("a stage reads a value of 'layers.0'")):
        split.check(X)


def test_calls_that_differ_from_the_probe():
    class Optional(Chain):
        def forward(self, x, skip=None, flag=False):
            return self.layers[2](x if skip is not None else self.layers[1](self.layers[0](x)))

    stages = ps.split(Optional(), stages=3, example=X).stages()
    with pytest.raises(SplitError, match=re.escape("skip=a tensor of shape [1] was not part of the example")):
        stages[0](torch.ones(2, 4), skip=torch.ones(1))
    with pytest.raises(SplitError, match="flag=True was not part of the example"):
        stages[0](torch.ones(2, 4), flag=True)
    with pytest.raises(SplitError, match=re.escape("stage 1 takes 1 values from other stages (layers.0), got 2")):
        stages[1](torch.ones(2, 4), torch.ones(2, 4))


def test_a_description_of_another_model():
    data = ps.split(Chain(), stages=2, example=X).to_json()
    from penstock.models.split import Split

    with pytest.raises(SplitError, match=r"does not fit the model; in only one of them are layers\.3"):
        Split.from_json(Chain(4), data)
    with pytest.raises(SplitError, match="this is not the description of a split"):
        Split.from_json(Chain(), {})
    with pytest.raises(SplitError, match="is damaged"):
        Split.from_json(Chain(), {name: value for name, value in data.items() if name != "edges"})
    with pytest.raises(SplitError, match="has version 2"):
        Split.from_json(Chain(), data | {"version": 2})


def test_tied_models_have_all_modules():
    assert sum(len(stage) for stage in ps.split(Tied(), stages=2, example=((torch.ones(1, 2).long(),), {})).layout) == 5


@pytest.mark.parametrize("example", [X[0][0], {"x": X[0][0]}, X])
def test_an_example_is_what_the_model_is_called_with(example):
    split = ps.split(Chain(), stages=3, example=example)
    assert split.layout == (("layers.0",), ("layers.1",), ("layers.2",))
    split.check(example)


@pytest.mark.parametrize(
    ("example", "kind"),
    [
        (X[0], "(Tensor)"),
        ((X[0][0], {}), "(Tensor, dict)"),
        ((X[0], {0: 1}), "(tuple, dict)"),
        ([X[0][0]], "list"),
        (X[0][0].numpy(), "ndarray"),
        ({0: X[0][0]}, "dict"),
    ],
)
def test_what_is_no_example_is_refused(example, kind):
    message = f"example= must be (args, kwargs), a tuple and a dict, got {kind}; write e.g. example="
    with pytest.raises(SplitError, match=re.escape(message)):
        ps.split(Chain(), stages=3, example=example)


def test_the_stages_of_what_is_no_rank_are_refused():
    split = ps.split(Chain(), stages=2, example=X)
    schedule = ps.build("1F1B", ranks=2, microbatches=2)
    with pytest.raises(SplitError, match=re.escape("pass placement=schedule.placement, got a Schedule")):
        split.stages(0, schedule)
    with pytest.raises(SizeError, match="rank must be at most 1, got 2"):
        split.stages(2, schedule.placement)
    with pytest.raises(SizeError, match="rank must be at least 0, got -1"):
        split.stages(-1, schedule.placement)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (["layers.0", "layers"], "stage 0 must be a list of names, got 'layers.0'; write e.g. [["),
        ([["layers"], 1], "stage 1 must be a list of names, got 1; write e.g. [["),
        (5, "a layout is a list of names for each stage, got 5; write e.g. [["),
    ],
)
def test_a_layout_that_is_no_list_of_lists_is_refused(layout, message):
    with pytest.raises(SplitError, match=re.escape(message)):
        ps.split(Chain(), layout=layout, example=X)


def test_a_layout_may_be_used_up_or_number_its_stages():
    expected = (("layers.0",), ("layers.1", "layers.2"))
    assert ps.split(Chain(), layout=iter([["layers.0"], ["layers.1", "layers.2"]]), example=X).layout == expected
    assert ps.split(Chain(), layout={0: ["layers.0"], 1: ["layers.1", "layers.2"]}, example=X).layout == expected
