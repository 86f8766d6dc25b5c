"""Random cases through both front doors, compared with the unsplit model in plain autograd.

A seed that fails is printed with its case. ``cd tests && python -m differential SEED`` runs it again.
"""

import dataclasses

import pytest
import torch

from differential import native, processes
from differential.cases import PROCESSES, THREADS, Case, draw, place_of
from differential.forms import DROP_IN, FORMS, NATIVE
from differential.observing import Raised, Result
from differential.outcomes import judge, known_warnings
from differential.pieces import PIECES
from differential.reference import check_reference

SEEDS_AT_ONCE = 200
FIRST_SEEDS = [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(SEEDS_AT_ONCE, 5000, SEEDS_AT_ONCE))]


def cases_of(first: int, door: str, place: str) -> list[Case]:
    return [draw(seed) for seed in range(first, first + SEEDS_AT_ONCE) if place_of(seed) == (door, place)]


def check(cases: list[Case], results: dict[int, list[Result]]) -> None:
    failed = {}
    for case in cases:
        if problems := judge(case, results[case.seed]):
            failed[case.seed] = "\n".join([str(case), *problems[:5]])
    assert not failed, "\n\n".join([f"seeds {list(failed)} of {len(cases)} cases failed", *failed.values()])


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes: with more, small operations take longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_native_in_threads(first):
    cases = cases_of(first, NATIVE, THREADS)
    with known_warnings():
        results = {case.seed: native.run_threads(case) for case in cases}
    check(cases, results)


@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_native_in_processes(workers, first):
    cases = cases_of(first, NATIVE, PROCESSES)
    check(cases, processes.run_cases(workers, cases))


@pytest.mark.parametrize("first", FIRST_SEEDS)
def test_drop_in(workers, first):
    cases = cases_of(first, DROP_IN, PROCESSES)
    check(cases, processes.run_cases(workers, cases))


# The test itself ------------------------------------------------------------------------------------------------------


def test_the_reference_is_the_unsplit_model():
    """Where samples do not depend on each other, microbatches add up to the batch in one piece."""
    compared = 0
    for case in map(draw, range(SEEDS_AT_ONCE)):
        adds_up = not case.mixes and (case.door == NATIVE or case.reduction == "sum")
        if adds_up and case.calls[0].kind == "step":
            with known_warnings():
                assert check_reference(case) == [], str(case)
            compared += 1
    assert compared > SEEDS_AT_ONCE // 4


def test_a_seed_always_gives_the_same_case():
    for seed in range(20):
        assert draw(seed) == draw(seed)
        assert str(draw(seed)).startswith(f"seed {seed}: ")


def test_a_few_thousand_seeds_draw_everything():
    cases = [draw(seed) for seed in range(2000)]
    assert {piece for case in cases for stage in case.stages for piece in stage.pieces} == PIECES.keys()
    assert {stage.gives for case in cases for stage in case.stages} == FORMS.keys()
    assert {case.ranks for case in cases} == {1, 2, 3}


def right_case() -> tuple[Case, list[Result]]:
    """The first case that trains in threads, and results that are right."""
    cases = (case for case in map(draw, range(0, 100, 2)) if case.ranks == 2 and case.calls[0].kind == "step")
    case = next(case for case in cases if case.calls[0].losses and case.calls[0].outputs)
    with known_warnings():
        results = native.run_threads(case)
    assert judge(case, results) == []
    assert results[0].raised is None
    return case, results


def test_a_wrong_gradient_is_reported():
    case, results = right_case()
    name = next(
        name for name, value in results[0].calls[0].items() if name.startswith("gradient") and value is not None
    )
    results[0].calls[0][name] *= 1.001
    (problem,) = judge(case, results)
    assert problem.startswith(f"call 0: {name}: Tensor-likes are not close!")


def test_a_missing_loss_is_reported():
    case, results = right_case()
    has_losses = next(result for result in results if "losses" in result.calls[0])
    del has_losses.calls[0]["losses"]
    assert judge(case, results) == ["call 0: losses is missing"]


def test_an_error_that_is_not_documented_is_reported():
    case, results = right_case()
    results[1].raised = Raised("KeyError", "0", "Traceback: KeyError: 0")
    assert judge(case, results) == ["raised:\nTraceback: KeyError: 0"]


def test_an_error_that_does_not_come_is_reported():
    case, results = right_case()
    case = dataclasses.replace(case, allows_untrained=False)
    last = dataclasses.replace(case.stages[-1], frozen=True, detaches=True)
    problems = judge(dataclasses.replace(case, stages=(*case.stages[:-1], last)), results)
    assert "no rank raised: a step that trains nothing, or leaves a stage untrained" in problems
