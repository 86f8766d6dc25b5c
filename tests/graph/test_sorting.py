"""Sorting digit by digit gives what sorting by comparison gives."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph.sorting import order_by, stable_order


@given(st.integers(0, 2**32 - 1), st.integers(0, 62), st.sampled_from([0, 1, 30, 1000, 1001, 3000]))
@settings(max_examples=100, deadline=None)
def test_what_is_equal_stays_in_order(seed, bits, length):
    key = np.random.default_rng(seed).integers(0, 2**bits, length)
    key[: length // 2] = key[length - length // 2 :]
    assert stable_order(key).tolist() == sorted(range(length), key=key.tolist().__getitem__)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**40), st.integers(0, 2**40)), max_size=30))
def test_by_several_keys(rows):
    """However large the keys are."""
    for chosen in (rows, [(first, second % 5, third % 5) for first, second, third in rows]):
        keys = np.array(chosen, np.int64).reshape(-1, 3).T
        assert order_by(*keys).tolist() == sorted(range(len(chosen)), key=chosen.__getitem__)
