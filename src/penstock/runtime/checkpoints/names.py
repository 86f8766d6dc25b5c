"""Names what a pipeline saves as the unsplit model does, so that any layout finds it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from penstock.errors import CheckpointError
from penstock.execution.parameter_names import plain_paths
from penstock.runtime.checkpoints.channel import TransportChannel, run_on_all, same_for_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.execution.stage import Stage
    from penstock.execution.ties import Tie
    from penstock.runtime.transport.protocol import Transport

PARAMETER: Final = "parameter"
_OTHER: Final = "other"


class Held(NamedTuple):
    """Something that the state dict of a stage has.

    Attributes:
        stage: the stage.
        name: its name there, without wrappers.
        kind: whether it is a parameter.
        identity: equal for names of one parameter.
    """

    stage: int
    name: str
    kind: str
    identity: str


@dataclass(frozen=True)
class StateNames:
    """What the entries of all stages are called in a checkpoint.

    Attributes:
        prefixed: whether names begin with that of the stage.
        canonical: the name of each parameter that has several, by each of them.
        shared: names of what is no parameter, and is on several stages.
        has_replicas: whether a stage on any rank shares its parameters with other pipelines.
    """

    prefixed: bool
    canonical: Mapping[str, str]
    shared: frozenset[str]
    has_replicas: bool

    def name(self, stage: int, name: str) -> str:
        """Return the name in a checkpoint of what a stage calls so."""
        spelled = _spelled(stage, name, prefixed=self.prefixed)
        return self.canonical.get(spelled, spelled)

    def names_of(self, name: str) -> list[str]:
        """Return all names of what is called so in a checkpoint, that one first."""
        return [name, *(other for other, first in self.canonical.items() if first == name and other != name)]


def agree_on_names(
    stages: Mapping[int, Stage], ties: Iterable[Tie], transport: Transport, *, is_split: bool
) -> StateNames:
    """Find out what the stages of all ranks hold, and name it. All ranks call it.

    Args:
        stages: the stages of this rank.
        ties: the parameters that several stages hold.
        transport: what connects the ranks.
        is_split: whether the stages are parts of a model that has been split, and keep its names.
    """
    channel = TransportChannel(transport)

    def describe() -> bytes:
        held = [one for stage in stages.values() for one in _held_by(stage, transport)]
        return json.dumps([held, any(stage.parallel is not None for stage in stages.values())]).encode()

    def merge(parts: Sequence[bytes]) -> list[bytes]:
        ranks = [json.loads(part) for part in parts]
        merged = [list(chain.from_iterable(held for held, _ in ranks)), any(replicated for _, replicated in ranks)]
        return same_for_all(channel, json.dumps(merged).encode())

    held, has_replicas = json.loads(run_on_all(channel, describe, merge))
    return _name_all([Held(*one) for one in held], ties, is_split=is_split, has_replicas=has_replicas)


def entries_of(module: torch.nn.Module, *, keep_vars: bool = False) -> Iterator[tuple[str, str, Any]]:
    """Yield what a module saves: the name without wrappers, the key in its state dict, and the value."""
    plain = plain_paths(module)
    for key, value in module.state_dict(keep_vars=keep_vars).items():
        path, _, last = key.rpartition(".")
        inside = plain.get(path, path)
        yield f"{inside}.{last}" if inside else last, key, value


def _held_by(stage: Stage, transport: Transport) -> Iterator[Held]:
    for name, _, value in entries_of(stage.module, keep_vars=True):
        is_parameter = isinstance(value, torch.nn.Parameter)
        identity = f"{id(value)}" if transport.in_one_process else f"{id(value)} of rank {transport.rank}"
        yield Held(stage.index, name, PARAMETER if is_parameter else _OTHER, identity)


def _spelled(stage: int, name: str, *, prefixed: bool) -> str:
    return f"stages.{stage}.{name}" if prefixed else name


def _name_all(held: Sequence[Held], ties: Iterable[Tie], *, is_split: bool, has_replicas: bool) -> StateNames:
    groups = _group(held, ties)
    clash = _find_clash(held, groups)
    if clash is not None and is_split:
        first, second = clash
        raise CheckpointError(
            f"{first.name} of stage {first.stage} and of stage {second.stage} are different parameters; name them in "
            "ties= if they are one, so that they stay equal"
        )
    prefixed = clash is not None
    canonical: dict[str, str] = {}
    for group in dict.fromkeys(groups.values()):
        names = dict.fromkeys(_spelled(stage, name, prefixed=prefixed) for stage, name in group)
        if len(names) > 1:
            canonical |= dict.fromkeys(names, next(iter(names)))
    stages_of = defaultdict(set)
    for one in held:
        if one.kind != PARAMETER:
            stages_of[_spelled(one.stage, one.name, prefixed=prefixed)].add(one.stage)
    shared = frozenset(name for name, stages in stages_of.items() if len(stages) > 1)
    return StateNames(prefixed, canonical, shared, has_replicas)


def _group(held: Sequence[Held], ties: Iterable[Tie]) -> dict[tuple[int, str], tuple[tuple[int, str], ...]]:
    """Return, for each parameter of a stage, all places of the same one, in the order of stages."""
    order = {(one.stage, one.name): number for number, one in enumerate(held) if one.kind == PARAMETER}
    same: dict[tuple[int, str], set[tuple[int, str]]] = {place: {place} for place in order}
    by_identity: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for one in held:
        if one.kind == PARAMETER:
            by_identity[one.identity].append((one.stage, one.name))
    tied = [[(stage, name) for stage, name in tie.members if (stage, name) in order] for tie in ties]
    for places in [*by_identity.values(), *tied]:
        union = set().union(*(same[place] for place in places))
        for place in union:
            same[place] = union
    ordered = {id(union): tuple(sorted(union, key=lambda one: (one[0], order[one]))) for union in same.values()}
    return {place: ordered[id(union)] for place, union in same.items()}


def _find_clash(
    held: Sequence[Held], groups: Mapping[tuple[int, str], tuple[tuple[int, str], ...]]
) -> tuple[Held, Held] | None:
    """Find two stages that mean different things by one name: at least one of them a parameter."""
    first: dict[str, Held] = {}
    for one in held:
        other = first.setdefault(one.name, one)
        if other.stage == one.stage or PARAMETER not in (one.kind, other.kind):
            continue
        if one.kind != other.kind or groups[one.stage, one.name] != groups[other.stage, other.name]:
            return other, one
    return None
