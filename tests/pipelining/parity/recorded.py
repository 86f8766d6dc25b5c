"""What the installed torch.distributed.pipelining answers to every scenario, kept in ``recorded.json``.

``make test`` compares ours with the kept answers, so that torch's package need not run; ``make test-full`` runs it and
compares. A change to the scenarios or another version of torch makes the answers stale, which fails every comparison.
Record them again with

    .venv/bin/python tests/pipelining/parity/recorded.py

Tensors are kept to twelve digits, and what is equal once: schedules differ in their last bits only. Of errors, the
types are kept.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from pipelining.parity.comparison import Raised
from pipelining.parity.setting import THEIRS, Case, run

HERE = Path(__file__).parent
FILE = HERE / "recorded.json"
#: What an answer depends on.
SOURCES = ("comparison.py", "customs.py", "mistakes.py", "models.py", "setting.py", "training.py")
DIGITS = 12
LIMIT = 30.0
AGAIN = "Record again: .venv/bin/python tests/pipelining/parity/recorded.py"


class Recorded:
    """Answers by case."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self._kept = kept
        self._tensors = [_tensor(*described) for described in kept["tensors"]]

    def answer(self, case: Case) -> list[Any]:
        """What the scenario returned on each rank."""
        if self._kept["made_with"] != made_with():
            raise AssertionError(f"the answers of torch are stale: they are of {self._kept['made_with']}. {AGAIN}")
        if str(case) not in self._kept["cases"]:
            raise AssertionError(f"torch's answer to {case} has not been recorded. {AGAIN}")
        return [self._value(self._kept["answers"][number]) for number in self._kept["cases"][str(case)]]

    def _value(self, kept: Any) -> Any:
        if not isinstance(kept, dict):
            return kept
        ((kind, inner),) = kept.items()
        if kind == "tensor":
            return self._tensors[inner]
        if kind == "raised":
            return Raised(tuple(inner), "(recorded)")
        if kind == "dict":
            return {self._value(key): self._value(value) for key, value in inner}
        return {"list": list, "tuple": tuple}[kind](self._value(item) for item in inner)


@cache
def recorded() -> Recorded:
    return Recorded(json.loads(FILE.read_text()))


@cache
def made_with() -> dict[str, str]:
    """The version of torch, and a digest of the scenarios."""
    sources = hashlib.sha256(b"\0".join((HERE / name).read_bytes() for name in SOURCES))
    return {"torch": torch.__version__.partition("+")[0], "scenarios": sources.hexdigest()}


# Making the record ----------------------------------------------------------------------------------------------------


class Recorder:
    """Turns answers into what JSON can keep: lines by their number."""

    def __init__(self) -> None:
        self.tensors: dict[str, int] = {}
        self.answers: dict[str, int] = {}

    def number(self, answer: Any) -> int:
        return self.answers.setdefault(_line(self.kept(answer)), len(self.answers))

    def kept(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self.tensors.setdefault(_line(_described(value)), len(self.tensors))}
        if isinstance(value, Raised):
            return {"raised": list(value.kinds)}
        if isinstance(value, dict):
            return {"dict": [[self.kept(key), self.kept(item)] for key, item in value.items()]}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.kept(item) for item in value]}
        raise TypeError(f"a scenario returned {value!r}, which cannot be recorded")


def _described(tensor: torch.Tensor) -> list[Any]:
    """Element type, shape, whether it needs a gradient, and numbers: to so many digits of the largest."""
    numbers = tensor.detach().flatten()
    if tensor.is_floating_point() and tensor.numel():
        exponent = torch.frexp(numbers.abs().max()).exponent.item()
        places = DIGITS - max(0, round(exponent * 0.30103))
        numbers = numbers.double().round(decimals=places) + 0.0  # without negative zeros
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.requires_grad, numbers.tolist()]


def _tensor(dtype: str, shape: list[int], needs_gradient: bool, numbers: list[Any]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape).requires_grad_(needs_gradient)


def record(cases: Iterable[Case]) -> None:
    """Run the cases with torch's package and write down what it answers."""
    from runtime.workers import Workers

    recorder, numbers = Recorder(), {}
    with Workers(4) as workers:
        for case in cases:
            found = workers.run(run, case, THEIRS, ranks=case.ranks, limit=LIMIT)
            if problems := [problem for _, problems in found for problem in problems]:
                raise AssertionError(f"torch's answer to {case} is not that of the unsplit model: {problems}")
            numbers[str(case)] = [recorder.number(answer) for answer, _ in found]
    parts = {
        "made_with": _line(made_with()),
        "tensors": _block("[]", recorder.tensors),
        "answers": _block("[]", recorder.answers),
        "cases": _block("{}", [_line({name: found})[1:-1] for name, found in numbers.items()]),
    }
    FILE.write_text(_block("{}", [f'"{name}":{text}' for name, text in parts.items()]) + "\n")


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _block(brackets: str, lines: Iterable[str]) -> str:
    return f"{brackets[0]}\n" + ",\n".join(lines) + f"\n{brackets[1]}"


if __name__ == "__main__":
    from pipelining.parity.cases import RECORDED

    record(RECORDED)
