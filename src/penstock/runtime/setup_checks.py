"""What is checked when a pipeline is constructed: its schedule, its stages, and that all ranks were given the same."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.errors import ScheduleError, StageError
from penstock.execution.stage import Stage
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    import torch

    from penstock.runtime.transport.protocol import Transport


def check_schedule(schedule: object) -> None:
    """Refuse what is not a schedule."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"expected a Schedule, e.g. penstock.build('1F1B', ...), got {schedule!r}")


def collect_stages(stages: Mapping[int, torch.nn.Module | Stage] | Iterable[Stage]) -> dict[int, Stage]:
    """The stages of this rank by index, from either form in which they may be given."""
    if isinstance(stages, Mapping):
        given = [stage if isinstance(stage, Stage) else Stage(index, stage) for index, stage in stages.items()]
        for index, stage in zip(stages, given, strict=True):
            if stage.index != index:
                raise StageError(f"stages[{index}] is a Stage of index {stage.index}", stage=index)
    else:
        given = list(stages)
        if not all(isinstance(stage, Stage) for stage in given):
            raise StageError(
                "stages must be modules by stage index, e.g. {0: first, 3: last}, or a list of Stage objects"
            )
    found = {stage.index: stage for stage in given}
    if len(found) < len(given):
        raise StageError(f"duplicate stage index in {sorted(stage.index for stage in given)}")
    return found


def check_stages(stages: Mapping[int, Stage], schedule: Schedule, transport: Transport, *, needs_loss: bool) -> None:
    """Make sure that these are the stages that the schedule runs on this rank.

    Args:
        stages: the stages of this rank.
        schedule: the schedule.
        transport: what connects the ranks.
        needs_loss: whether there are backwards, but no loss function.
    """
    rank = transport.rank
    if transport.ranks != schedule.ranks:
        raise StageError(
            f"the schedule is for {schedule.ranks} ranks, but the group has {transport.ranks}; build it with "
            f"ranks={transport.ranks}, or start {schedule.ranks} processes"
        )
    wanted = schedule.placement.stages_of(rank)
    if sorted(stages) != sorted(wanted):
        raise StageError(
            f"rank {rank} must be given stages {sorted(wanted)}, not {sorted(stages)}; see "
            f"schedule.placement.stages_of({rank})"
        )
    if needs_loss and schedule.stages - 1 in stages:
        raise StageError(
            f"rank {rank} has the last stage and the schedule has backwards; pass loss_fn",
            stage=schedule.stages - 1,
        )


def check_ranks_agree(transport: Transport, schedule: Schedule, options: Mapping[str, str]) -> None:
    """Make sure that all ranks were given the same, and that the links come up.

    Args:
        transport: what connects the ranks.
        schedule: the schedule.
        options: what else must be the same, as a line of text, by its name.
    """
    mine = {"schedule": describe_schedule(schedule), **options}
    for rank, data in enumerate(transport.exchange("\n".join(mine.values()).encode())):
        theirs = data.decode(errors="replace").split("\n")
        for (name, value), other in zip(mine.items(), [*theirs, *[""] * len(mine)], strict=False):
            if value != other:
                fact = f"rank {rank} was given a different {name} from rank {transport.rank}"
                raise StageError(f"{fact}: {other[:100]!r} there, {value!r} here")
    rank_of = schedule.placement.rank_of
    ends = ((rank_of[link.source], rank_of[link.target]) for link in schedule.links)
    transport.connect(sorted({(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]}))


def describe_schedule(schedule: Schedule) -> str:
    """Describe a schedule in a line that is different for any other schedule."""
    edges = "" if schedule.is_chain else " ".join(str(edge._replace(value="")) for edge in schedule.edges)
    data = schedule.codes.tobytes() + schedule.offsets.tobytes() + edges.encode()
    digest = hashlib.sha256(data).hexdigest()[:16]
    size = f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
    counted = f"{len(schedule.codes)} actions" + (f", {len(schedule.edges)} edges" if edges else "")
    return f"{schedule.metadata.get('name', 'no name')}, {size}, {counted}, sha256 {digest}"


def warn_of_different_models(transport: Transport, origin: str) -> None:
    """Warn if the stages of ranks are parts of models that began differently, where that is known. All ranks call it.

    It is no error: weights may be loaded later, and stages that are drawn from different seeds train well, though not
    like the model that any seed gives.
    """
    first, *others = (data.decode(errors="replace") for data in transport.exchange(origin.encode()))
    for rank, other in enumerate(others, start=1):
        if first and other and first != other:
            warnings.warn(
                f"ranks 0 and {rank} have stages of models with different values ({first}; {other}), which together "
                "are no model that one process would have built; call torch.manual_seed with one seed on all ranks "
                "before the model is built, pass one seed= to materialize, or load the same weights before the split",
                stacklevel=2,
            )
            return
