import pytest

from pipelining.contracts import PACKAGES, Package


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> Package:
    """torch's package, and ours."""
    return Package(request.param)
