"""Agrees with the other ranks on ties: that their members begin equal, and which ranks hold them."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from penstock.errors import MetadataError, StageError
from penstock.execution.distributed_tensors import describe_sharding, local_part
from penstock.execution.parameter_names import ParameterPlace, places_by_name, replace_parameter
from penstock.execution.tied_parameters.digests import digest
from penstock.execution.tied_parameters.holders import LocalTie
from penstock.execution.ties import Member, Tie
from penstock.execution.value_spec import describe_tensor
from penstock.runtime.ties.given import find_ties

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.execution.stage import Stage
    from penstock.runtime.ties.given import GivenTie
    from penstock.runtime.transport.protocol import Transport

    #: The parameters of each stage of this rank, by name.
    Places = Mapping[int, Mapping[str, ParameterPlace]]

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """What the other ranks must know of a member.

    Attributes:
        stage: its stage.
        name: its name there.
        kind: its element type and shape.
        sharding: which shard of it the rank has, if it is sharded.
        replicated: whether a wrapper averages its gradient over replicas of the pipeline.
        trained: whether it requires a gradient.
        digest: of its values; empty if it has none yet.
        identity: equal for members that are one tensor, or become one when the pipeline is made.
    """

    stage: int
    name: str
    kind: str
    sharding: str
    replicated: bool
    trained: bool
    digest: str
    identity: str

    @property
    def member(self) -> Member:
        """The stage and the name."""
        return Member(self.stage, self.name)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know of the ties of a pipeline.

    Attributes:
        ties: all ties.
        local: those of which this rank has tensors that it takes care of.
        uncounted: the parameters of this rank that count elsewhere, on another rank or in another stage.
        borrowed: those of them that are tensors of another rank, in the same process.
        has_borrowed: whether any rank has such a tensor.
    """

    ties: tuple[Tie, ...] = ()
    local: tuple[LocalTie, ...] = ()
    uncounted: tuple[ParameterPlace, ...] = ()
    borrowed: tuple[ParameterPlace, ...] = ()
    has_borrowed: bool = False


def agree(
    given: Iterable[GivenTie], stages: Mapping[int, Stage], rank_of: Sequence[int], transport: Transport
) -> Agreement:
    """Find the members of all ties, check that they are alike, and make those of one rank one tensor.

    All ranks call it, with the same ties.
    """
    given = list(given)
    if not given:
        return Agreement()
    places = {index: places_by_name(stage.module) for index, stage in stages.items()}
    ties = find_ties(given, _names_of_all(places, len(rank_of), transport))
    specs = _specs_of_all(_describe_members(ties, stages, places, transport), transport)
    for tie in ties:
        _check_alike([specs[Member(*member)] for member in tie.members])
    _unite(ties, stages, places)
    agreement = _divide(ties, specs, rank_of, places, transport.rank)
    pairs = {pair for tie in ties for pair in combinations(_owners(tie, specs, rank_of)[1], 2)}
    transport.connect(sorted(pairs))
    return agreement


def _names_of_all(places: Places, stages: int, transport: Transport) -> dict[int, list[str]]:
    """Exchange the names of all parameters."""
    found: dict[int, list[str]] = {stage: [] for stage in range(stages)}
    mine = [[stage, name] for stage, names in places.items() for name in names]
    for stage, name in _exchange(transport, mine, lambda stage, name: (int(stage), str(name))):
        found[stage].append(name)
    return found


def _exchange(transport: Transport, mine: Sequence[Any], read: Callable[..., Item]) -> list[Item]:
    """Share items with all ranks; returns those of all."""
    found = []
    for rank, data in enumerate(transport.exchange(json.dumps(mine).encode())):
        try:
            found += [read(*item) for item in json.loads(data)]
        except (TypeError, ValueError) as error:
            raise MetadataError(f"the parameters that rank {rank} described could not be decoded") from error
    return found


# What each member is ------------------------------------------------------------------------------------------------


def _describe_members(
    ties: Sequence[Tie], stages: Mapping[int, Stage], places: Places, transport: Transport
) -> list[MemberSpec]:
    digests: dict[int, str] = {}
    found = []
    for tie in ties:
        first: dict[torch.device, str] = {}
        for member in [Member(*member) for member in tie.members if member[0] in stages]:
            stage, parameter = stages[member.stage], places[member.stage][member.name].parameter
            if torch.nn.parameter.is_lazy(parameter):
                raise StageError(
                    f"{member} is tied, but not initialized yet; run a batch through the module first",
                    stage=member.stage,
                )
            if id(parameter) not in digests:
                digests[id(parameter)] = digest(local_part(parameter))
            identity = _identity(parameter, transport)
            found.append(
                MemberSpec(
                    *member,
                    kind=describe_tensor(parameter),
                    sharding=describe_sharding(parameter),
                    replicated=stage.parallel is not None,
                    trained=parameter.requires_grad,
                    digest=digests[id(parameter)],
                    identity=first.setdefault(parameter.device, identity) if stage.parallel is None else identity,
                )
            )
    return found


def _identity(parameter: torch.nn.Parameter, transport: Transport) -> str:
    """Name the tensor. Ranks that are threads of one process may have the same."""
    return f"{id(parameter)}" if transport.in_one_process else f"{id(parameter)} of rank {transport.rank}"


def _specs_of_all(mine: Sequence[MemberSpec], transport: Transport) -> dict[Member, MemberSpec]:
    return {spec.member: spec for spec in _exchange(transport, [*map(astuple, mine)], MemberSpec)}


def _check_alike(specs: Sequence[MemberSpec]) -> None:
    """Refuse a tie of unlike parameters; the error names both."""
    first = specs[0]
    for other in specs[1:]:
        for one, another, advice in (
            (first.kind, other.kind, "tied parameters must have one shape and element type"),
            (_sharded(first), _sharded(other), "tied gradients are summed shard by shard: shard both stages alike"),
            (_averaged(first), _averaged(other), "wrap both stages alike"),
            (_trained(first), _trained(other), "freeze both, or none"),
        ):
            if one != another:
                raise StageError(
                    f"{first.member} is {one}, but {other.member} is {another}; {advice}", stage=other.stage
                )
        if first.digest and other.digest and first.digest != other.digest:
            raise StageError(
                f"{first.member} and {other.member} are tied, but begin with different values; load the same "
                "weights into both, or copy one to the other, before the pipeline is made",
                stage=other.stage,
            )


def _sharded(spec: MemberSpec) -> str:
    return f"sharded ({spec.sharding})" if spec.sharding else "not sharded"


def _averaged(spec: MemberSpec) -> str:
    return f"{'' if spec.replicated else 'not '}averaged over replicas of the pipeline"


def _trained(spec: MemberSpec) -> str:
    return "trained" if spec.trained else "frozen (requires_grad=False)"


# Who holds what -----------------------------------------------------------------------------------------------------


def _unite(ties: Sequence[Tie], stages: Mapping[int, Stage], places: Places) -> None:
    """Make members of a tie that are on this rank and device one tensor, unless a wrapper has its own."""
    for tie in ties:
        first: dict[torch.device, torch.nn.Parameter] = {}
        for stage, name in tie.members:
            if stage not in stages or stages[stage].parallel is not None:
                continue
            parameter = places[stage][name].parameter
            one = first.setdefault(parameter.device, parameter)
            if one is not parameter:
                replace_parameter(stages[stage].module, parameter, one)


def _owners(
    tie: Tie, specs: Mapping[Member, MemberSpec], rank_of: Sequence[int]
) -> tuple[dict[str, Member], tuple[int, ...]]:
    """Find the first member of each tensor of a tie, whose rank takes care of it; and these ranks."""
    first: dict[str, Member] = {}
    for member in sorted((Member(*member) for member in tie.members), key=lambda one: (rank_of[one.stage], one)):
        first.setdefault(specs[member].identity, member)
    return first, tuple(sorted({rank_of[member.stage] for member in first.values()}))


def _divide(
    ties: Sequence[Tie],
    specs: Mapping[Member, MemberSpec],
    rank_of: Sequence[int],
    places: Places,
    rank: int,
) -> Agreement:
    local: list[LocalTie] = []
    uncounted: list[ParameterPlace] = []
    borrowed: list[ParameterPlace] = []
    has_borrowed = False
    for tie in ties:
        first, ranks = _owners(tie, specs, rank_of)
        members = tuple(member for member in first.values() if rank_of[member.stage] == rank)
        holders = tuple(places[member.stage][member.name] for member in members)
        united = [
            (member, places[member.stage][member.name], members.index(first[specs[member].identity]))
            for member in map(Member._make, tie.members)
            if rank_of[member.stage] == rank and member not in members and first[specs[member].identity] in members
        ]
        if holders:
            local.append(LocalTie(tie, holders, members, tuple(united), ranks))
        uncounted += holders[rank == ranks[0] :]
        for member in map(Member._make, tie.members):
            if rank_of[member.stage] != rank_of[first[specs[member].identity].stage]:
                has_borrowed = True
                if rank_of[member.stage] == rank:
                    borrowed.append(places[member.stage][member.name])
    return Agreement(tuple(ties), tuple(local), (*uncounted, *borrowed), tuple(borrowed), has_borrowed)
