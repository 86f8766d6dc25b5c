"""Finds the members of the ties that a user declares, by stage or by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import SplitError, StageError
from penstock.execution.ties import Member, Tie, checked_ties, near_matches
from penstock.ir.numbers import whole_number

#: A tie, or names of parameters: whatever stages have one of these names hold one parameter.
GivenTie = Tie | Sequence[str] | str


def describe_options(ties: Iterable[GivenTie], check_every: int) -> dict[str, str]:
    """Describe the declared ties and the interval of their check in a line each, to be compared between ranks."""
    check_every = whole_number("check_ties_every", check_every)
    declared = "; ".join(str(tie) if isinstance(tie, Tie) else " = ".join(_names(tie)) for tie in ties)
    return {"list of ties": declared or "none", "check_ties_every": str(check_every)}


def find_ties(ties: Iterable[GivenTie], held: Mapping[int, Sequence[str]]) -> tuple[Tie, ...]:
    """Find the stages and names of each tie; ties with a common member become one.

    >>> held = {0: ["wte.weight", "layer.weight"], 1: ["wte.weight", "head.weight"]}
    >>> for tie in find_ties([("wte.weight", "head.weight")], held): print(tie)
    wte.weight of stage 0 = head.weight of stage 1 = wte.weight of stage 1

    Args:
        ties: as declared.
        held: the names of the parameters of each stage, on all ranks.
    """
    found = [_members(tie, held) for tie in ties]
    whole = checked_ties([Tie(tuple(members)) for members in _merged(found)], len(held))
    for member in [Member(*member) for tie in whole for member in tie.members]:
        if member.name not in held[member.stage]:
            near = near_matches(member.name, held[member.stage])
            raise StageError(
                f"a tie refers to {member}, but that stage has no such parameter{near}", stage=member.stage
            )
    return whole


def _members(tie: GivenTie, held: Mapping[int, Sequence[str]]) -> set[Member]:
    if isinstance(tie, Tie):
        (whole,) = checked_ties([tie], len(held))
        return {Member(*member) for member in whole.members}
    names = _names(tie)
    found = {Member(stage, name) for stage, known in held.items() for name in names if name in known}
    for name in names:
        if not any(name in known for known in held.values()):
            every = [one for known in held.values() for one in known]
            raise StageError(f"a tie refers to {name!r}, but no stage has such a parameter{near_matches(name, every)}")
    if len(found) < 2:
        (only,) = found
        raise StageError(
            f"a tie needs at least two holders, but of {', '.join(names)} there is only {only}", stage=only.stage
        )
    return found


def _names(tie: Any) -> list[str]:
    names = [tie] if isinstance(tie, str) else list(tie) if isinstance(tie, Iterable) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise SplitError(
            f"a tie must be a Tie, a name or names of parameters, e.g. ('wte.weight', 'head.weight'): {tie!r}"
        )
    return names


def _merged(groups: Sequence[set[Member]]) -> list[set[Member]]:
    merged: list[set[Member]] = []
    for group in groups:
        touched = [other for other in merged if other & group]
        merged = [other for other in merged if not other & group]
        merged.append(group.union(*touched))
    return merged
