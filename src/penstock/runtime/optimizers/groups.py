"""Sorts the parameters of a pipeline into groups for an optimizer, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.errors import StageError
from penstock.execution.parameter_names import places_by_name, plain_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.engine import Engine

#: Whether a group takes a parameter: a pattern of its name, such as ``"*.bias"``, or a function of name and parameter.
Wanted = str | Callable[[str, torch.nn.Parameter], bool]
#: Which parameters get which options; the first that fits counts.
GivenGroups = Mapping[Wanted, Mapping[str, Any]] | Iterable[tuple[Wanted, Mapping[str, Any]]]


class Rule(NamedTuple):
    """Which parameters form a group, and its options.

    Attributes:
        wanted: a pattern of names, or a function of name and parameter.
        options: the options in which the group differs.
    """

    wanted: Wanted
    options: Mapping[str, Any]

    def matches(self, name: str, parameter: torch.nn.Parameter) -> bool:
        """Whether the group takes a parameter."""
        if isinstance(self.wanted, str):
            return fnmatchcase(name, self.wanted)
        return bool(self.wanted(name, parameter))

    def __str__(self) -> str:
        """The pattern, or the name of the function."""
        return repr(self.wanted if isinstance(self.wanted, str) else getattr(self.wanted, "__name__", "a function"))


def read_rules(groups: GivenGroups | None) -> list[Rule]:
    """Read the groups that a user asks for.

    >>> print(*read_rules({"*.bias": {"weight_decay": 0.0}}))
    '*.bias'
    """
    if groups is None:
        return []
    given: list[Any] = list(groups.items() if isinstance(groups, Mapping) else groups)
    for one in given:
        if not (
            isinstance(one, tuple)
            and len(one) == 2
            and (isinstance(one[0], str) or callable(one[0]))
            and isinstance(one[1], Mapping)
        ):
            raise StageError(
                "groups must be options by pattern of names, e.g. {'*.bias': {'weight_decay': 0.0}}, or pairs of a "
                f"pattern, or of a function of name and parameter, and options; got {one!r}"
            )
    return [Rule(wanted, dict(options)) for wanted, options in given]


def names_of(engine: Engine) -> dict[torch.nn.Parameter, str]:
    """Name the parameters that this rank takes care of, as they are called in the unsplit model.

    A tied parameter has the name of its first holder on all ranks, so that every holder puts it in the same group.
    """
    names: dict[torch.nn.Parameter, str] = {}
    for stage in engine.stages.values():
        for parameter, name in plain_names(stage.module).items():
            names.setdefault(parameter, name)
    for tie in engine.ties.ties:
        for index, name in tie.members:
            if index in engine.stages:
                names[places_by_name(engine.stages[index].module)[name].parameter] = tie.members[0][1]
    for parameter in engine.ties.borrowed:
        names.pop(parameter, None)
    return names


def sort_into_groups(names: Mapping[torch.nn.Parameter, str], rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Make a group of what no rule takes, and one for each rule. All ranks have the same groups; some may be empty.

    >>> layer = torch.nn.Linear(2, 2)
    >>> names = {parameter: name for name, parameter in layer.named_parameters()}
    >>> [group["param_names"] for group in sort_into_groups(names, read_rules({"b*": {"lr": 0.1}}))]
    [['weight'], ['bias']]
    """
    groups = [{"params": [], "param_names": [], **rule.options} for rule in (Rule("", {}), *rules)]
    for parameter, name in names.items():
        number = next((n for n, rule in enumerate(rules, start=1) if rule.matches(name, parameter)), 0)
        groups[number]["params"].append(parameter)
        groups[number]["param_names"].append(name)
    return groups
