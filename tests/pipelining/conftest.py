"""Fixtures that the tests of the drop-in share."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.pipelining import PipelineStage
from pipelining.contracts import PACKAGES, Package, fake_group


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> Package:
    """torch's package, and ours."""
    return Package(request.param)


@pytest.fixture(name="s")
def _schedules_of_the_package(package: Package) -> Any:
    return package.schedules


@pytest.fixture(name="u")
def _utils_of_the_package(package: Package) -> Any:
    return package._utils


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of one rank, through which nothing goes."""
    with fake_group():
        yield


@pytest.fixture
def one_gloo_rank() -> Iterator[None]:
    """A real group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two ranks, of which this is the first."""
    with fake_group(0, 2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


@pytest.fixture(params=["native", "methods"])
def operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both sets of operations: the native ones, and the methods of stages, which a replaced method brings about."""
    if request.param == "methods":
        forward = PipelineStage.forward_one_chunk
        monkeypatch.setattr(
            PipelineStage, "forward_one_chunk", lambda self, *args, **named: forward(self, *args, **named)
        )
    return str(request.param)
