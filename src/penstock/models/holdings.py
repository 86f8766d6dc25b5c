"""Decides which stage holds which parameter and buffer, and which of them are ties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.errors import SplitError
from penstock.execution.ties import Tie, describe_mismatch, near_matches
from penstock.models.construction import named_tensors
from penstock.models.units import names_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from penstock.models.units import Units


_EXAMPLE: Final = 'write e.g. ties=[("wte.weight", "lm_head.weight")]'


class Holdings(NamedTuple):
    """What the stages hold.

    Attributes:
        names: the full names of the parameters and buffers of each stage.
        ties: the parameters that several stages hold.
        unread: the parameters of containers that nothing has read, placed with a neighbor.
    """

    names: tuple[frozenset[str], ...]
    ties: tuple[Tie, ...]
    unread: tuple[str, ...]


def find_holdings(
    model: nn.Module,
    units: Units,
    stages_of: Mapping[str, Iterable[int]],
    needed: Mapping[str, Iterable[int]],
    count: int,
) -> Holdings:
    """Find what each stage holds.

    Args:
        model: the unsplit model.
        units: its units.
        stages_of: the stages that run each unit.
        needed: the stages that need further parameters, by name.
        count: the number of stages.
    """
    tensors = dict(named_tensors(model))
    groups = group_names(tensors)
    names: list[set[str]] = [set() for _ in range(count)]
    all_names = names_of(model)
    for unit, stages in stages_of.items():
        inside = {
            f"{name}.{short}" if name else short
            for part in units.units[unit].modules()
            for name in all_names[part]
            for short in [*part._parameters, *part._buffers]
        }
        for stage in stages:
            names[stage] |= inside
    for name, stages in needed.items():
        for stage in stages:
            names[stage] |= set(groups[name])
    unread = _place_unread(model, units, stages_of, names)
    _check_memory(dict(model.named_parameters(remove_duplicate=False)), names)
    return Holdings(tuple(map(frozenset, names)), _find_ties(model, names), unread)


def part_names(model: nn.Module, units: Units, held: Iterable[Iterable[str]], groups: Iterable[set[str]]) -> set[str]:
    """Return the names of all tensors that some stages need: what they hold, its ties, and the buffers of glue."""
    names = set().union(*held)
    for group in groups:
        names |= group if names & group else set()
    placed = {part for module in units.units.values() for part in module.modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        if module not in placed:
            names |= {
                f"{name}.{short}" if name else short for short, value in module._buffers.items() if value is not None
            }
    present = {name for name, _ in named_tensors(model)}
    return names & present


def group_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """Return, for each name, all names of the same tensor."""
    by_identity: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_identity.setdefault(id(tensor), []).append(name)
    return {name: tuple(by_identity[id(tensor)]) for name, tensor in tensors.items()}


def declared_ties(model: nn.Module, ties: Iterable[Sequence[str]]) -> dict[int, torch.Tensor]:
    """Return which tensors are replaced by which, so that declared ties are one tensor; by the id of the replaced one.

    >>> from torch import nn
    >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 3)})
    >>> declared_ties(model, [("embed.weight", "head.weight")])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    penstock.errors.SplitError: embed.weight is float32[4, 2], but head.weight is float32[3, 2]; tied ...
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    replaced: dict[int, torch.Tensor] = {}
    for tie in _checked_groups(ties):
        for name in tie:
            if name not in parameters:
                raise SplitError(
                    f"ties= names {name!r}, which is not a parameter{_suggest(name, parameters)}", unit=name
                )
        if mismatch := describe_mismatch({name: parameters[name] for name in tie}):
            raise SplitError(mismatch, unit=tie[1])
        first: torch.Tensor = parameters[tie[0]]
        first = replaced.get(id(first), first)
        for name in tie[1:]:
            if parameters[name] is not first:
                replaced[id(parameters[name])] = first
    return replaced


def _checked_groups(ties: object) -> list[list[str]]:
    """Return the names in each tie, or raise ``SplitError``."""
    if isinstance(ties, (str, Mapping)) or not isinstance(ties, Iterable):
        raise SplitError(f"ties= must be a list of groups of names, got {ties!r}; {_EXAMPLE}")
    groups = []
    for tie in ties:
        names = [] if isinstance(tie, str) or not isinstance(tie, Iterable) else [*tie]
        if len(names) < 2 or not all(isinstance(name, str) for name in names):
            raise SplitError(f"a tie is at least two names of parameters, got {tie!r}; {_EXAMPLE}")
        groups.append(names)
    return groups


def _suggest(name: str, parameters: Mapping[str, torch.Tensor]) -> str:
    """Suggest the parameters of a module with this name, or names like it, as the end of a message."""
    inside = [parameter for parameter in parameters if parameter.startswith(f"{name}.")]
    return f"; name its parameters, e.g. {inside[0]}" if inside else near_matches(name, parameters)


def _place_unread(
    model: nn.Module, units: Units, stages_of: Mapping[str, Iterable[int]], names: Sequence[set[str]]
) -> tuple[str, ...]:
    """Place the parameters that no stage needs with the first unit of their module."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    held = set().union(*names)
    held_tensors = {id(parameters[name]) for name in held if name in parameters}
    unread = [name for name, tensor in parameters.items() if id(tensor) not in held_tensors]
    for name in unread:
        owner = name.rpartition(".")[0]
        near = [unit for unit in units.units if unit.startswith(f"{owner}.")] or list(units.units)
        names[min(stages_of[near[0]])].add(name)
    return tuple(unread)


def _check_memory(parameters: Mapping[str, torch.Tensor], names: Sequence[set[str]]) -> None:
    """Refuse parameters of several stages that are not one tensor, but have the same memory."""
    stages = {name: {stage for stage, held in enumerate(names) if name in held} for name in parameters}
    by_memory: dict[int, list[str]] = {}
    for name, tensor in parameters.items():
        if tensor.layout is torch.strided and tensor.numel():
            by_memory.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for group in by_memory.values():
        for first, second in combinations(group, 2):
            one, other = parameters[first], parameters[second]
            if one is not other and _overlap(one, other) and len(stages[first] | stages[second]) > 1:
                raise SplitError(
                    f"{first} and {second} are two parameters in the same memory, and not on one stage; make them one "
                    f"parameter, or pass ties=[({first!r}, {second!r})]",
                    unit=second,
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one memory have elements in common, if each is dense."""
    (start, end), (other_start, other_end) = _extent(one), _extent(other)
    return start < other_end and other_start < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (sum(steps) + 1) * tensor.element_size()


def _find_ties(model: nn.Module, names: Sequence[set[str]]) -> tuple[Tie, ...]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    groups = dict.fromkeys(group_names(parameters).values())
    ties = []
    for group in groups:
        members = [
            (stage, next(n for n in group if n in held)) for stage, held in enumerate(names) if held & set(group)
        ]
        if len(members) > 1:
            ties.append(Tie(tuple(members)))
    return tuple(ties)
