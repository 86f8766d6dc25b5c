"""Values that reach a layer neither as an argument nor over an edge are noticed, whatever holds them."""

import ctypes
import re

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import SplitError

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
EXAMPLE = ((X,), {})
LAYOUT = [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
VARIABLES = {}


class Box:
    pass


class InBox:
    """What the first and the third layer have in common is an object."""

    def __init__(self):
        self.held = Box()

    def put(self, value):
        self.held.value = value

    def get(self):
        return self.held.value


class InBoxWithDefault(InBox):
    def __init__(self):
        super().__init__()
        self.held.value = 1.0


class InDictionary(InBox):
    def __init__(self):
        self.held = {}

    def put(self, value):
        self.held["value"] = value

    def get(self):
        return self.held["value"]


class InList(InDictionary):
    def __init__(self):
        self.held = []

    def put(self, value):
        self.held.append(value)

    def get(self):
        return self.held[-1]


class InVariable(InBox):
    def __init__(self):
        VARIABLES.clear()

    def put(self, value):
        VARIABLES["value"] = value

    def get(self):
        return VARIABLES["value"]


class InClass(InBox):
    value = 0.0

    def __init__(self):
        type(self).value = 0.0

    def put(self, value):
        type(self).value = value

    def get(self):
        return type(self).value


def in_function():
    found = 0.0

    class InFunction(InBox):
        def __init__(self):
            pass

        def put(self, value):
            nonlocal found
            found = value

        def get(self):
            return found

    return InFunction()


def number_of(x):
    return float(x.detach().abs().sum())


class Layer(nn.Linear):
    def __init__(self, number, store, kept):
        super().__init__(4, 4)
        self.number, self.store, self.kept = number, store, kept

    def forward(self, x):
        if self.number == 0:
            self.store.put(self.kept(x))
        result = super().forward(x)
        return result * self.store.get() if self.number == 2 else result


class Model(nn.Module):
    def __init__(self, store, kept):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(number, store, kept) for number in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


STORES = {
    "an attribute": (InBox, "layers.0.store.held.value"),
    "an attribute with a default": (InBoxWithDefault, "layers.0.store.held.value"),
    "a dictionary": (InDictionary, "layers.0.store.held['value']"),
    "a list": (InList, "layers.0.store.held[0]"),
    "a global variable": (InVariable, "VARIABLES['value']"),
    "a class": (InClass, "value"),
    "an enclosing function": (in_function, "found of in_function.<locals>.InFunction"),
}


@pytest.mark.parametrize("kept", [number_of, lambda x: x], ids=["number", "argument"])
@pytest.mark.parametrize("store", STORES)
def test_a_stored_value_is_refused_with_both_layers(store, kept):
    make, place = STORES[store]
    with pytest.raises(SplitError) as caught:
        ps.split(Model(make(), kept), layout=LAYOUT, example=EXAMPLE)
    message = str(caught.value)
    assert message.startswith(
        "'layers.2' does not compute on its stage what it computes in the model: 'layers.0', on another stage, stores"
    )
    assert place in message
    assert caught.value.unit == "layers.2"
    ps.split(Model(make(), kept), layout=[["layers.0", "layers.1", "layers.2"], ["layers.3"]], example=EXAMPLE)


@pytest.mark.parametrize("store", STORES)
def test_a_value_that_an_earlier_call_has_stored(store):
    """It is there already, and right for the example."""
    model = Model(STORES[store][0](), number_of)
    model(X)
    with pytest.raises(SplitError, match=r"'layers.2' does not compute on its stage what it computes in the model"):
        ps.split(model, layout=LAYOUT, example=EXAMPLE)


def test_global_state_is_left_as_it_was():
    store = InVariable()
    store.put("before")
    ps.split(Model(store, number_of), layout=[["layers.0", "layers.1", "layers.2"], ["layers.3"]], example=EXAMPLE)
    assert store.get() == "before"


def test_an_unchecked_split_says_where_to_look():
    stages = ps.split(Model(InDictionary(), number_of), layout=LAYOUT, example=EXAMPLE, check=False).stages()
    with pytest.raises(KeyError) as caught:
        stages[1](stages[0](X))
    assert "raised on stage 1 of a split" in caught.value.__notes__[0]


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.count = 0.0
        self.mean = torch.zeros(4)
        self.table = torch.arange(1.0, 13.0).view(3, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Counts(Chain):
    def forward(self, x):
        result = super().forward(x + self.count)
        self.count += 1.0
        return result


class Averages(Chain):
    def forward(self, x):
        result = super().forward(x + self.mean)
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return result


class CountsFirst(Chain):
    """Every stage runs what counts, and before the layers that use it."""

    def forward(self, x):
        self.count += 1.0
        return super().forward(x) * self.count


@pytest.mark.parametrize(("model", "place"), [(Counts, "count"), (Averages, "mean")])
def test_state_that_not_every_stage_updates(model, place):
    with pytest.raises(SplitError, match=f"the code around the layers changes {place}, which later calls read"):
        ps.split(model(), layout=LAYOUT, example=EXAMPLE)


def test_state_that_every_stage_updates():
    stages = ps.split(CountsFirst(), layout=LAYOUT, example=EXAMPLE).stages()
    whole = CountsFirst()
    for _ in range(3):
        torch.testing.assert_close(stages[1](stages[0](X)), whole(X))


class WarmsUp(Chain):
    """What it counts matters from the tenth call on."""

    def forward(self, x):
        if self.count >= 10:
            x = 2 * x
        self.count += 1.0
        return super().forward(x)


class WarmsUpLate(Chain):
    def forward(self, x):
        result = super().forward(2 * x if self.count >= 10 else x)
        self.count += 1.0
        return result


class WarmsUpByALayer(Chain):
    class Layer(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.layers[0] = self.Layer(4, 4)

    def forward(self, x):
        x = super().forward(x)
        return 2 * x if self.layers[0].calls >= 10 else x


class Logs(Chain):
    """Nothing reads what it keeps."""

    def forward(self, x):
        result = super().forward(x)
        self.count = float(result.detach().mean())
        return result


def test_a_number_that_matters_later():
    for model in (WarmsUp(), Logs()):
        stages = ps.split(model, layout=LAYOUT, example=EXAMPLE).stages()
        for _ in range(12):
            torch.testing.assert_close(stages[1](stages[0](X)), model(X))
    with pytest.raises(SplitError, match=r"stage 0 reads count, .* it is 0\.0 there, and 2\.0 in the model"):
        ps.split(WarmsUpLate(), layout=LAYOUT, example=EXAMPLE)
    with pytest.raises(SplitError, match=r"stage 1 reads layers\.0\.calls, but does not run all"):
        ps.split(WarmsUpByALayer(), layout=LAYOUT, example=EXAMPLE)


class ReadsIntegers(Chain):
    def forward(self, x, ids):
        number = ctypes.c_int64.from_address(ids.data_ptr()).value  # torch does not see this
        return super().forward(x) * self.table[number]


class LooksUp(Chain):
    """Looks up ids that only the first stage has; elsewhere nothing comes of it."""

    def forward(self, ids):
        return super().forward(nn.functional.embedding(ids, self.table[:1]))


def test_integers_that_a_stage_is_not_sent():
    """They are zero in the example, as in what stands in for them."""
    with pytest.raises(SplitError, match="a stage reads integers that it is not sent"):
        ps.split(ReadsIntegers(), layout=LAYOUT, example=((X, torch.zeros(2, dtype=torch.long)), {}))


def test_integers_of_which_nothing_comes():
    ids = torch.zeros(2, 3, dtype=torch.long)
    stages = ps.split(LooksUp(), layout=LAYOUT, example=((ids,), {})).stages()
    torch.testing.assert_close(stages[1](stages[0](ids)), LooksUp()(ids))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_of_the_whole_model_is_refused_without_a_check(register):
    model = Chain()
    getattr(model, register)(lambda *_: None)
    with pytest.raises(SplitError, match=re.escape("the model has a hook of its own forward")):
        ps.split(model, layout=LAYOUT, example=EXAMPLE, check=False)
