"""The result of a parity check, and its text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from penstock.execution.ties import Member, Tie

#: Ways to the gradients that are compared with the unsplit model.
HALVES: Final = "in halves"
SCHEDULED: Final = "scheduled"

_SHOWN: Final = 10
_OTHERWISE: Final = "write loss_reduction='sum' for a sum, 'weighted' for a mean over tokens"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a gradient, or a loss, is from that of the unsplit model.

    Attributes:
        stage: the stage.
        name: the parameter within the stage, e.g. ``layers.1.weight``; or ``input`` or ``loss``.
        module: the type of the module that the parameter is in.
        way: how the gradient was computed: ``"in halves"`` or ``"scheduled"``.
        largest: the largest absolute difference of two elements; infinite if one of the gradients is missing.
        size: the largest absolute element that it should have.
        tolerance: what `largest` may be.
        order: where in the order of a backward it comes.
    """

    stage: int
    name: str
    module: str
    way: str
    largest: float
    size: float
    tolerance: float
    order: int

    @property
    def relative(self) -> float:
        """The difference as a share of the size."""
        return self.largest / self.size if self.size else (0.0 if self.largest == 0 else float("inf"))

    @property
    def fits(self) -> bool:
        """Whether rounding explains it."""
        return self.largest <= self.tolerance

    def __str__(self) -> str:
        what = "the loss" if self.name == "loss" else f"{self.name} of {self.module}"
        way = "with the schedule" if self.way == SCHEDULED else "when its backward runs in two halves"
        if self.largest == float("inf"):
            return f"stage {self.stage}, {what}: {way} a gradient is missing, unexpected, or not a number"
        return (
            f"stage {self.stage}, {what}: {way} the largest difference is {self.largest:.2g}, in a "
            f"{'loss' if self.name == 'loss' else 'gradient'} of size {self.size:.2g}"
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """Whether the losses of the microbatches, each by its share, make the loss of the batch.

    Attributes:
        whole: what the loss function gives for the outputs and targets of all microbatches as one.
        together: the sum of the microbatches' losses, each multiplied by its share.
        tolerance: by how much the two may differ.
        unchecked: why they could not be compared; empty if they were.
    """

    whole: float = 0.0
    together: float = 0.0
    tolerance: float = 0.0
    unchecked: str = ""

    @property
    def fits(self) -> bool:
        """Whether they differ by rounding at most, or were not compared."""
        alike = self.whole == self.together or (math.isnan(self.whole) and math.isnan(self.together))
        return alike or abs(self.whole - self.together) <= self.tolerance

    def __str__(self) -> str:
        if self.unchecked:
            return (
                f"whether the microbatches' losses add up to that of the whole batch was not checked: {self.unchecked}"
            )
        fact = f"the loss of the whole batch is {self.whole:.6g}, that of the microbatches together {self.together:.6g}"
        return fact if self.fits else f"{fact}: is loss_fn a mean over samples? {_OTHERWISE}"


@dataclass(frozen=True, slots=True)
class Parity:
    """The result of a parity check, the same on every rank.

    Attributes:
        differences: all that was compared, in the order of a backward.
        random: whether the unsplit model itself gives other gradients when it is run again.
        losses: the losses of the unsplit model, on the rank of the last stage.
        reduction: whether they make the loss of the batch.
        copies: parameters of different stages with equal values, each group as ``("weight of stage 0", ...)``: they may
            be one parameter of the model, but each was compared, and is trained, separately.
        untied: those of them that are most likely one parameter, as the ties to declare.
    """

    differences: tuple[Difference, ...]
    random: bool
    losses: tuple[float, ...]
    reduction: Reduction
    copies: tuple[tuple[str, ...], ...] = ()
    untied: tuple[Tie, ...] = ()

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences that rounding does not explain."""
        return tuple(one for one in self.differences if not one.fits)

    @property
    def largest(self) -> float:
        """The largest relative difference."""
        return max((one.relative for one in self.differences), default=0.0)

    def __str__(self) -> str:
        differences, reduction = self._describe_differences(), str(self.reduction)
        lines = [*differences, reduction] if self.wrong or self.reduction.fits else [reduction, *differences]
        return "\n".join([*lines, *self._describe_copies()])

    def _describe_differences(self) -> list[str]:
        wrong = self.wrong
        if not wrong:
            fact = f"{len(self.differences)} gradients and losses match those of the stages run one after the other"
            return [f"{fact}, microbatch by microbatch"]
        fact = f"{len(wrong)} of {len(self.differences)} gradients and losses differ from those of the stages"
        lines = [f"{fact} run one after the other:"]
        lines += [f"- {one}" for one in wrong[:_SHOWN]]
        if len(wrong) > _SHOWN:
            lines.append(f"- and {len(wrong) - _SHOWN} more")
        if self.random:
            lines.append(
                "The unsplit model itself gives different gradients when run again with the same random state: it has "
                "a generator that is not restored, or a nondeterministic operation, so check_parity cannot judge it."
            )
        return lines

    def _describe_copies(self) -> list[str]:
        likely = [tuple(str(Member(*member)) for member in tie.members) for tie in self.untied]
        others = [places for places in self.copies if places not in likely]
        lines = [*map(describe_untied, self.untied)]
        lines += [
            f"{', '.join(places)} have equal values, and each was compared separately: if they are one parameter of "
            "the model (tied weights), declare them in ties=, or they will train apart"
            for places in others
        ]
        more = len(lines) - _SHOWN
        return [*lines[:_SHOWN], f"and {more} more groups of parameters with equal values"] if more > 0 else lines


def describe_untied(tie: Tie) -> str:
    r"""Describe a parameter that several stages hold without a tie, and how to declare one.

    >>> print(describe_untied(Tie(((0, "wte.weight"), (3, "head.weight")))).replace(": ", ":\n").replace("; ", ";\n"))
    wte.weight of stage 0 and head.weight of stage 3 have equal values but no tie:
    if they are one parameter in the unsplit model, they will train apart;
    pass ties=[Tie(((0, 'wte.weight'), (3, 'head.weight')))]
    """
    members = " and ".join(str(Member(*member)) for member in tie.members)
    declared = ", ".join(repr(tuple(member)) for member in tie.members)
    return (
        f"{members} have equal values but no tie: if they are one parameter in the unsplit model, they will train "
        f"apart; pass ties=[Tie(({declared}))]"
    )
