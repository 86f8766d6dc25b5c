"""Reads from a loss's graph what it averages over, to check that microbatches have the right weight.

``loss_reduction`` says how the losses of microbatches make that of the batch. If ``loss_fn`` is a mean over tokens and
not over samples, gradients are silently those of another loss. A mean divides by a number, and for the usual forms the
graph has it: torch's own losses, ``mean()``, and a division by a number. A loss of another form, e.g. of a compiled
function, is not judged here; ``check_parity`` judges any, by calling ``loss_fn`` for the whole batch, which takes the
memory of all outputs.

The names of nodes and what they save are torch's own; ``tests/runtime/test_loss_weights.py`` notices if they change.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Nodes that pass a number on unchanged, or add others to it.
_PASSING: Final = frozenset(
    {
        "AddBackward0",
        "AddBackward1",
        "SubBackward0",
        "SubBackward1",
        "NegBackward0",
        "ToCopyBackward0",
        "CloneBackward0",
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "SqueezeBackward0",
        "UnsqueezeBackward0",
    }
)
_TIMES: Final = frozenset({"MulBackward0", "MulBackward1"})
_DIVIDED: Final = frozenset({"DivBackward0", "DivBackward1"})
_MEAN: Final = 1  # torch's number for reduction="mean"
_DEEPEST: Final = 16
#: How far weights may be apart: counts are kept in the element type of the output, which may be half precision.
_TOLERANCE: Final = 0.01
_SHOWN: Final = 8


class Term(NamedTuple):
    """A part of a loss: a sum, times a factor, over a number.

    Attributes:
        factor: the factor.
        over: how many elements it is a mean of, or their weight; None if it is not known to be a mean.
        ignored: the target that does not count, for a loss that has such.
    """

    factor: float
    over: float | None
    ignored: int | None = None

    @property
    def divisor(self) -> float:
        """What the sum is divided by."""
        return (1.0 if self.over is None else self.over) / abs(self.factor) if self.factor else math.inf


class LossWeights:
    """Compares what the losses of one step divide by with their weights in the batch.

    Args:
        shares: what each microbatch's loss counts for in that of the batch.
        reduction: the ``loss_reduction`` that says so.
        is_ragged: whether samples may be of different sizes, so that a mean over all elements says nothing.
    """

    def __init__(self, shares: Sequence[float], reduction: str, *, is_ragged: bool) -> None:
        self._shares = shares
        self._reduction = reduction
        self._is_ragged = is_ragged
        self._terms: list[list[Term]] = [[] for _ in shares]

    def note(self, microbatch: int, loss: torch.Tensor) -> None:
        """Inspect the loss of a microbatch while it has a graph."""
        self._terms[microbatch] = find_terms(loss)

    def describe_mismatch(self) -> str | None:
        """Describe what is wrong, and what to write instead; None if nothing is, or nothing is known."""
        if len({len(terms) for terms in self._terms}) > 1:
            return None
        for column in zip(*self._terms, strict=True):
            if not self._fits(column):
                return self._describe(column)
        return None

    def _fits(self, terms: Sequence[Term]) -> bool:
        """Whether an element has the same weight in every microbatch."""
        counts_targets = any(term.ignored is not None for term in terms)
        if not counts_targets and (self._is_ragged or len({term.divisor for term in terms}) == 1):
            return True  # what it is a mean or a sum of need not be samples, but e.g. means over samples
        weights = [share / term.divisor for share, term in zip(self._shares, terms, strict=True) if share > 0]
        known = [weight for weight in weights if math.isfinite(weight) and weight > 0]
        return len(known) < len(weights) or max(known) <= min(known) * (1 + _TOLERANCE)

    def _describe(self, terms: Sequence[Term]) -> str:
        total = math.fsum(self._shares)
        ignored = next((term.ignored for term in terms if term.ignored is not None), None)
        counted = "pad" if ignored is None else ignored
        return (
            f"loss_fn divides by {_numbers([term.divisor for term in terms])} (one number per microbatch), but "
            f"loss_reduction={self._reduction!r} counts the microbatches as "
            f"{_numbers([share / total for share in self._shares])} of the batch, so gradients differ from those of "
            "the whole batch. For a mean over tokens pass loss_reduction='weighted' and loss_weight=lambda target: "
            f"(target != {counted}).sum(), or count what else loss_fn divides by"
        )


def find_terms(loss: torch.Tensor) -> list[Term]:
    """Find the terms of a loss, as far as its graph shows them.

    >>> output, target = torch.zeros(4, 3, requires_grad=True), torch.tensor([0, 1, -100, -100])
    >>> find_terms(torch.nn.functional.cross_entropy(output, target))
    [Term(factor=1.0, over=2.0, ignored=-100)]
    >>> find_terms(output.sum() / 5 + 0.5 * output.mean())
    [Term(factor=0.2, over=None, ignored=None), Term(factor=0.5, over=12.0, ignored=None)]
    """
    return [] if loss.grad_fn is None else list(_walk(loss.grad_fn, 1.0, _DEEPEST))


def _walk(node: Any, factor: float, depth: int) -> Iterator[Term]:
    name, inputs = node.name(), node.next_functions
    if depth and name in _PASSING:
        for other, _ in inputs:
            if other is not None:
                yield from _walk(other, factor, depth - 1)
    elif depth and (number := _factor(node, name, inputs)) is not None:
        (other,) = (one for one, _ in inputs if one is not None)
        yield from _walk(other, factor * number, depth - 1)
    else:
        yield Term(factor, *_extent(node, name))


def _factor(node: Any, name: str, inputs: Sequence[Any]) -> float | None:
    """Find the factor by which a node multiplies its only input."""
    if name not in _TIMES | _DIVIDED or sum(one is not None for one, _ in inputs) != 1:
        return None
    if inputs[0][0] is None:  # the other one is the loss, so this is its factor
        return _number(node._saved_self) if name in _TIMES else None
    number = _number(node._saved_other)
    if number is None or name in _TIMES:
        return number
    return 1 / number if number else None


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None


def _extent(node: Any, name: str) -> tuple[float | None, int | None]:
    """Find how many elements a node averages, and the target that it ignores."""
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel), None
    if getattr(node, "_saved_reduction", None) != _MEAN:
        return None, None
    if not hasattr(node, "_saved_total_weight"):
        return float(node._saved_self.numel()), None
    ignored = int(node._saved_ignore_index)
    return float(node._saved_total_weight), ignored - 2**64 if ignored >= 2**63 else ignored


def _numbers(numbers: Sequence[float]) -> str:
    shown = ", ".join(f"{number:.4g}" for number in numbers[:_SHOWN])
    return shown if len(numbers) <= _SHOWN else f"{shown}, ..."
