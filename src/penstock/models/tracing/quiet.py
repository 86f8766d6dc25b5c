"""Keeps torch from warning about itself."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def torch_warnings_hidden() -> Iterator[None]:
    """Hide warnings of torch's tracing about other parts of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
