"""What may come of a case: what the unsplit model gives, or an error that is documented for what the case does."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from differential.cases import Case
from differential.forms import DROP_IN, NATIVE
from differential.observing import Observed, Result, differences
from differential.reference import Expected, expect


@dataclass(frozen=True)
class Refusal:
    """An error that a case may, or must, raise.

    Attributes:
        why: what is documented.
        door: where.
        applies: whether it is expected of a case.
        message: a part of the error.
        certain: whether the case must raise it; else it may be right instead.
    """

    why: str
    door: str
    applies: Callable[[Case, Expected], bool]
    message: str
    certain: bool = True


def _evaluates(case: Case) -> bool:
    return any(call.kind == "eval" for call in case.calls)


NOT_TRAINED = r"(is|are) not trained|trains nothing|nothing is trained|has requires_grad=False, but True was agreed"
REFUSALS = [
    Refusal(
        "inputs that share memory are not to be changed in place",
        NATIVE,
        lambda case, _: "shared" in case.marks,
        r"modified one of .* in place; they share memory",
        certain=False,
    ),
    Refusal(
        "what a stage returns belongs to the next one",
        NATIVE,
        lambda case, _: "reuses" in case.marks and _evaluates(case),
        r"modified a tensor .* in place after returning it",
        certain=False,
    ),
    Refusal(
        "a step that trains nothing, or leaves a stage untrained",
        NATIVE,
        lambda case, expected: not case.allows_untrained and (expected.trains_nothing or bool(expected.lost)),
        NOT_TRAINED,
    ),
    Refusal(
        "stages that nothing trains, since a later one passes no gradient on",
        NATIVE,
        lambda case, expected: not case.allows_untrained and bool(expected.cut),
        NOT_TRAINED,
        certain=False,  # if there are no parameters in the stages before
    ),
    Refusal(
        "by the given shapes, gradients are wanted where something before is trained",
        NATIVE,
        lambda case, expected: case.shapes == "given" and bool(expected.lost or expected.cut),
        "has requires_grad=False, but True was agreed",
        certain=False,
    ),
    Refusal(
        "a step that trains nothing, or leaves a stage untrained",
        DROP_IN,
        lambda case, expected: (
            (expected.trains_nothing or bool(expected.lost)) and not (case.shapes == "given" and bool(expected.lost))
        ),
        NOT_TRAINED,
    ),
    Refusal(
        "the same, where by examples an output requires a gradient that no parameter of its stage has a part in",
        DROP_IN,
        lambda _, expected: expected.trains_nothing or bool(expected.lost),
        NOT_TRAINED,
        certain=False,
    ),
    Refusal(
        "stages that nothing trains, since a later one passes no gradient on",
        DROP_IN,
        lambda _, expected: bool(expected.cut),
        NOT_TRAINED,
    ),
    Refusal(
        "inputs that share memory are not to be changed in place",
        DROP_IN,
        lambda case, _: "shared" in case.marks,
        r"the module modified input .* in place.* share memory",
        certain=False,
    ),
    Refusal(
        "inputs that require a gradient are not to be changed in place, as in torch",
        DROP_IN,
        lambda case, _: "changes" in case.marks,
        "leaf Variable that requires grad",
        certain=False,
    ),
    Refusal(
        "between stages go tensors and tuples of tensors",
        DROP_IN,
        lambda case, _: case.has_containers,
        "a stage takes a tensor|must be a tensor",
    ),
]


@contextmanager
def known_warnings() -> Iterator[None]:
    """Around a run: what torch warns of in the unsplit model, too, and that microbatches count alike."""
    with warnings.catch_warnings():
        for message in (
            "None of the inputs have requires_grad",
            "Full backward hook is firing",
            ".*samples but equal weight",
        ):
            warnings.filterwarnings("ignore", message=message)
        yield


def judge(case: Case, results: list[Result]) -> list[str]:
    """What is wrong with the results of the ranks of a case."""
    with known_warnings():
        expected = expect(case)
    problems = []
    for number in range(min(len(result.calls) for result in results)):
        found: Observed = {}
        for result in results:
            found |= result.calls[number]
        problems += differences(case, expected.calls[number], found, f"call {number}")
    refusals = [one for one in REFUSALS if one.door == case.door and one.applies(case, expected)]
    raised = [result.raised for result in results if result.raised is not None]
    if not raised:
        return problems + [f"no rank raised: {one.why}" for one in refusals if one.certain]
    if any(re.search(refusal.message, one.message) for refusal in refusals for one in raised):
        return problems
    return problems + [f"raised:\n{one.trace}" for one in raised]
