"""Stages that pass values to any later stages: losses, outputs and gradients are those of the unsplit model."""

from random import Random

import pytest
import torch

import penstock as ps
from runtime.wired import GRAPHS, Wired, compared, compared_in_threads, random_case, random_schedule

SHAPES = ["inferred", "per_microbatch", "given"]
NAMES = ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
CASES_AT_ONCE = 60


@pytest.fixture(autouse=True)
def _exact():
    """Threads share the default element type, so it is set around them."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def cases_of(graph: str, ranks: int, shapes: str = "inferred", **options) -> list[Wired]:
    """A model under each schedule; the last one is a random order."""
    schedules = [ps.build(name, ranks=ranks, microbatches=4) for name in NAMES]
    schedules.append(random_schedule(Random(ranks), ranks, 2 * ranks, 3, split=True))
    return [
        Wired(schedule, *GRAPHS[graph](schedule.stages), shapes, samples=2 * schedule.microbatches, **options)
        for schedule in schedules
    ]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_in_threads(graph, shapes):
    """Over three steps of an optimizer, and an evaluation with fewer samples than microbatches."""
    cases = [case for ranks in (2, 4) for case in cases_of(graph, ranks, shapes, evaluates=3)]
    assert compared_in_threads(cases) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_processes(workers, ranks):
    ways = [("unet", "per_microbatch"), ("nested", "given"), *((graph, "inferred") for graph in GRAPHS)]
    cases = [case for graph, shapes in ways for case in cases_of(graph, ranks, shapes, evaluates=3)]
    found = workers.run(compared, cases, ranks=ranks, limit=60 + 2 * len(cases))
    assert [each for rank in found for each in rank] == []


@pytest.mark.parametrize("first", [0, *(pytest.param(60 * n, marks=pytest.mark.full) for n in range(1, 9))])
def test_random_edges_in_random_orders(first):
    cases = [random_case(seed) for seed in range(first, first + CASES_AT_ONCE)]
    assert compared_in_threads(cases) == []
