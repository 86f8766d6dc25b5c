from collections.abc import Iterator

import pytest

from runtime.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four processes with gloo between them, for all tests."""
    with Workers(4) as pool:
        yield pool
