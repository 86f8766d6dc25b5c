"""Plain data goes to JSON and back, exactly."""

import json
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.encoding import decode, encode

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])])
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers()).map(Counter)
    ),
    max_leaves=12,
)


def again(value):
    return decode(json.loads(json.dumps(encode(value, "it"))))


@given(PLAIN)
def test_plain_data_comes_back(value):
    assert repr(again(value)) == repr(value)


def test_sets_come_back():
    for value in ({3, -8, 0}, frozenset("ab"), set()):
        assert again(value) == value
        assert type(again(value)) is type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    back = again([tensor, tensor.T if tensor.ndim == 2 else tensor])
    assert back[0].dtype == dtype
    assert torch.equal(back[0], tensor)
    assert torch.equal(back[1], tensor.T if tensor.ndim == 2 else tensor)


def test_arrays_and_states_of_generators_come_back():
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    back = again({"array": array, "scalar": np.float32(0.1), "numpy": np.random.get_state()})
    assert np.array_equal(back["array"], array)
    assert back["array"].dtype == array.dtype
    assert isinstance(back["scalar"], np.float32)
    np.random.set_state(back["numpy"])
    state = random.getstate()
    assert again(state) == state


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2: object()}]}, r"it\['a'\]\[1\]\[2\] is a builtins.object, which cannot be saved"),
        (np.array([object()]), "is a numpy.ndarray, which cannot be saved"),
        (torch.eye(2).to_sparse(), "it is a sparse or quantized tensor"),
    ],
)
def test_anything_else_is_refused(value, message):
    with pytest.raises(CheckpointError, match=message):
        encode(value, "it")


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        ({"frozen": [1]}, "unknown kind of value 'frozen'; it was saved by a later version of penstock"),
        ({"tensor": ["float4", [1], ""]}, "unknown element type 'float4'; it was saved by a later version of torch"),
    ],
)
def test_what_is_not_known_is_refused(encoded, message):
    with pytest.raises(CheckpointError, match=message):
        decode(encoded)
