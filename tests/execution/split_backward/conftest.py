"""Fixtures that the tests of split backwards share."""

import gc
from typing import Any

import pytest
import torch

from execution.split_backward import halves
from penstock.execution.split_backward import split as split_backward


@pytest.fixture(autouse=True, params=[False, True], ids=["by the engine", "alone"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "alone", request.param)


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets every gradient of W as soon as it may, as if all were large."""
    monkeypatch.setattr(split_backward, "_FLUSH_BYTES", 0)


@pytest.fixture
def without_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
