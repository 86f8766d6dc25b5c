"""What the tests of failures share."""

import threading

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    yield
    torch.set_num_threads(count)
    assert set(threading.enumerate()) <= before
