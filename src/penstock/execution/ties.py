"""Defines ties: one parameter of the unsplit model that several stages hold, such as an embedding and a head.

What is here is plain data and needs no torch; ``penstock.runtime.ties`` keeps the holders of a tie equal.
"""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches
from operator import index
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import SplitError
from penstock.execution.value_spec import describe_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

_EXAMPLE: Final = 'write e.g. Tie(((0, "wte.weight"), (3, "lm_head.weight")))'


class Member(NamedTuple):
    """A parameter of a stage, by its name in the stage's module.

    >>> print(Member(0, "wte.weight"))
    wte.weight of stage 0
    """

    stage: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} of stage {self.stage}"


class Tie(NamedTuple):
    """One parameter of the unsplit model that several stages hold.

    >>> print(Tie(((0, "wte.weight"), (3, "lm_head.weight"))))
    wte.weight of stage 0 = lm_head.weight of stage 3

    Attributes:
        members: the stages that hold it, each with the parameter's name in the stage's module.
    """

    members: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        return " = ".join(str(Member(*member)) for member in self.members)


def checked_ties(ties: Iterable[Tie], stages: int) -> tuple[Tie, ...]:
    """Return the ties with sorted members, each in one tie only and of an existing stage, or raise ``SplitError``.

    >>> checked_ties([[[(3, "head.weight"), (0, "embedding.weight")]]], stages=4)
    (Tie(members=(Member(stage=0, name='embedding.weight'), Member(stage=3, name='head.weight'))),)
    """
    found = tuple(sorted(_checked(tie, stages) for tie in ties))
    uses = Counter(member for tie in found for member in tie.members)
    for member, count in uses.items():
        if count > 1:
            raise SplitError(f"{member} is in {count} ties; make them one tie", unit=member[1])
    return found


def _checked(given: Any, stages: int) -> Tie:
    try:
        tie = Tie(*given)
        read = tuple(sorted({Member(index(stage), name) for stage, name in tie.members}))
    except (TypeError, ValueError):
        raise SplitError(f"a tie needs stages and names of parameters, got {given!r}; {_EXAMPLE}") from None
    if len(read) < 2:
        raise SplitError(f"a tie needs at least two members, got {given!r}; {_EXAMPLE}")
    for member in read:
        if not isinstance(member.name, str):
            raise SplitError(f"a tie needs names of parameters, got {member.name!r}; {_EXAMPLE}")
        if not 0 <= member.stage < stages:
            raise SplitError(
                f"a tie refers to {member}, but there are {stages} stages (0 to {stages - 1})", unit=member.name
            )
    return Tie(read)


def near_matches(name: str, known: Iterable[str]) -> str:
    """Describe the known names that are like one that is unknown, for the end of an error message.

    >>> near_matches("wte.wieght", ["wte.weight", "wpe.weight", "head.bias"])
    '; did you mean wte.weight or wpe.weight?'
    """
    known = dict.fromkeys(known)
    tail = name.rpartition(".")[2]
    near = get_close_matches(name, known, n=3) or [one for one in known if one.rpartition(".")[2] == tail][:3]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def describe_mismatch(parameters: Mapping[Any, torch.Tensor]) -> str | None:
    """Describe how the parameters of a tie, by member or name, differ in shape or element type; None if they do not."""
    (first, one), *others = parameters.items()
    for member, other in others:
        if tuple(one.shape) != tuple(other.shape) or one.dtype != other.dtype:
            found = f"{first} is {describe_tensor(one)}, but {member} is {describe_tensor(other)}"
            return f"{found}; tied parameters must be alike"
    return None
