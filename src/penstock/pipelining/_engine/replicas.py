"""Trains a parameter that several stages of a traced model use as one: every copy gets the sum of all gradients."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from penstock.errors import StageError
from penstock.execution.parameter_names import places_by_name
from penstock.execution.tied_parameters.gradients import TiedGradients
from penstock.execution.tied_parameters.holders import LocalTie
from penstock.execution.ties import Member, Tie
from penstock.pipelining._engine.group_exchange import GroupExchange
from penstock.pipelining._stage.links import LinkedStage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.execution.parameter_names import ParameterPlace

#: After how many steps to check again that copies are equal, beside the first steps: as ``Pipeline`` does.
_CHECK_EVERY: Final = 100


class ReplicaSums:
    """Sums the gradients of copies at the end of each training step of a schedule."""

    def __init__(self) -> None:
        self._modules: list[Any] = []
        self._gradients = TiedGradients((), 0)
        self._is_running = False

    @contextmanager
    def in_step(self, stages: Sequence[Any], *, trains: bool) -> Iterator[None]:
        """Wrap a step of these stages. If such a wrapper is inside another, only the outer one sums."""
        ties = _ties_of(stages) if trains and not self._is_running else ()
        if not ties:
            yield
            return
        gradients = self._gradients_of(stages, ties)
        gradients.set_aside()
        self._is_running = True
        try:
            yield
            _sum(gradients, stages)
        except BaseException:
            gradients.put_back()
            raise
        finally:
            self._is_running = False

    def _gradients_of(self, stages: Sequence[Any], ties: Sequence[Tie]) -> TiedGradients:
        """Get the copies on this rank, which are others if a module has been replaced."""
        modules = [stage.submod for stage in stages]
        if len(modules) != len(self._modules) or any(map(_differ, modules, self._modules)):
            self._modules = modules
            self._gradients = TiedGradients(local_ties(stages, ties), _CHECK_EVERY)
        return self._gradients


def sum_now(ties: Sequence[Tie], stages: Sequence[Any]) -> None:
    """Give every copy of a parameter the sum of all copies' gradients, unless the last step of a schedule has done so.

    Args:
        ties: the parameters.
        stages: the stages of this rank; all ranks that have a copy call this.
    """
    if not all(stage.has_summed_replicas for stage in stages):
        _sum(TiedGradients(local_ties(stages, ties), check_every=1), stages)


def _sum(gradients: TiedGradients, stages: Sequence[Any]) -> None:
    if dist.get_backend(stages[0].group) != "fake":  # nothing comes through a fake group
        exchange = GroupExchange(stages[0])
        gradients.sum_step(exchange)
        exchange.finish()
    for stage in stages:
        if isinstance(stage, LinkedStage):
            stage.has_summed_replicas = True


def _ties_of(stages: Sequence[Any]) -> tuple[Tie, ...]:
    """Get the ties whose gradients these stages let a schedule sum."""
    found = {stage.ties if isinstance(stage, LinkedStage) else () for stage in stages}
    if len(found) > 1:
        numbers = sorted(stage.stage_index for stage in stages)
        raise ValueError(
            f"stages {numbers} of one schedule differ in the parameters that they share with other stages; build all "
            "of them from one Pipe, with one value of its sums_replicas"
        )
    return found.pop() if found else ()


def local_ties(stages: Sequence[Any], ties: Sequence[Tie]) -> list[LocalTie]:
    """Find the copies that are on this rank."""
    here = {stage.stage_index: stage for stage in stages}
    places = {index: places_by_name(stage.submod) for index, stage in here.items()}
    rank_of = stages[0].stage_index_to_group_rank
    return [
        _local(
            tie,
            {member: _place(places, member) for member in map(Member._make, tie.members) if member[0] in here},
            rank_of,
        )
        for tie in ties
        if any(stage in here for stage, _ in tie.members)
    ]


def _place(places: dict[int, dict[str, ParameterPlace]], member: Member) -> ParameterPlace:
    if member.name not in places[member.stage]:
        raise StageError(
            f"the module of stage {member.stage} no longer has the parameter {member.name!r}, whose gradient is summed "
            "with that of other stages; replace modules before the model is traced, or set "
            "pipe.sums_replicas = False before stages are built",
            stage=member.stage,
        )
    return places[member.stage][member.name]


def _local(tie: Tie, copies: dict[Member, ParameterPlace], rank_of: dict[int, int]) -> LocalTie:
    """Describe the copies of a tie; a program may have made some of them one tensor."""
    distinct = {id(place.parameter): (member, place) for member, place in reversed(copies.items())}
    members, holders = zip(*sorted(distinct.values(), key=_by_member), strict=True)
    return LocalTie(tie, holders, members, (), tuple(sorted({rank_of[stage] for stage, _ in tie.members})))


def _by_member(found: tuple[Member, ParameterPlace]) -> Member:
    return found[0]


def _differ(one: object, other: object) -> bool:
    return one is not other
