"""What a pipeline is built from: hand-made stages, or a split that knows its stages, edges, ties and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, cast

from torch import nn

from penstock.errors import EdgeError, StageError
from penstock.ir.edges import checked_edges
from penstock.runtime.losses import MEAN
from penstock.runtime.setup_checks import check_schedule

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from penstock.execution.stage import Stage
    from penstock.ir.edges import Edge
    from penstock.ir.placement import Placement
    from penstock.ir.schedule import Schedule
    from penstock.models.generation.generator import Generator
    from penstock.runtime.ends import LossFunction
    from penstock.runtime.losses import Weight
    from penstock.runtime.ties import GivenTie

    #: What is around the module of a stage, e.g. ``fully_shard`` or ``torch.compile``.
    Wrapper = Callable[[torch.nn.Module], torch.nn.Module]
    #: Stages of this rank in either form in which they may be given by hand.
    GivenStages = Mapping[int, torch.nn.Module | Stage] | Iterable[Stage]


class ModelLoss(Protocol):
    """The loss that a split model computes itself."""

    @property
    def loss_fn(self) -> Callable[..., torch.Tensor]:
        """The loss of a microbatch, given the model's output and the target."""

    @property
    def reduction(self) -> str:
        """What it computes, as ``loss_reduction`` says."""

    @property
    def weight(self) -> Weight | None:
        """How much a microbatch counts, given its target."""

    @property
    def target(self) -> str:
        """The name of the keyword argument that is the target."""

    @property
    def replace(self) -> Callable[[Any, torch.Tensor], Any]:
        """Puts the loss of the batch into a merged output."""


class Split(Protocol):
    """A split model, as far as a pipeline needs it."""

    @property
    def layout(self) -> Sequence[Any]:
        """What is in each stage."""

    @property
    def edges(self) -> Sequence[Edge]:
        """The edges between its stages."""

    @property
    def ties(self) -> Sequence[Any]:
        """The parameters that several stages hold."""

    @property
    def digest(self) -> str:
        """A checksum, the same on all ranks that hold the same split."""

    @property
    def loss(self) -> ModelLoss | None:
        """The loss that the model computes itself, if any."""

    def stages(self, rank: int, placement: Placement) -> Mapping[int, torch.nn.Module]:
        """The stages of a rank, by index."""

    def origin_of(self, stages: Iterable[int]) -> str:
        """What identifies the model that stages are parts of; empty if it is not known."""

    def generator(self) -> Generator:
        """How its stages generate tokens; raises ``SplitError`` if they cannot."""

    def rename_for_files(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Some of the model's tensors under the names that they have in files."""

    def write_configuration(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write to a folder what describes the model there, whose parameters are of that type."""


class Parts(NamedTuple):
    """What a pipeline is built from.

    Attributes:
        stages: the stages of this rank.
        schedule: the schedule, with its edges.
        ties: the parameters that several stages hold.
        loss_fn: the loss of a microbatch, if there is one.
        reduction: what it computes.
        weight: how much a microbatch counts, if it is weighted.
        target: the name of the keyword argument that is the target, if one is not passed by itself.
        digest: the checksum of the split; empty for stages that were given by hand.
        origin: what identifies the model that was split; empty if that is not known.
        replace_loss: puts the loss of the batch into a merged output, if the output has it.
        split: the split, if the stages are from one.
    """

    stages: GivenStages
    schedule: Schedule
    ties: tuple[GivenTie, ...]
    loss_fn: LossFunction | None
    reduction: str
    weight: Weight | None
    target: str | None = None
    digest: str = ""
    origin: str = ""
    replace_loss: Callable[[Any, torch.Tensor], Any] | None = None
    split: Split | None = None


def collect_parts(
    given: GivenStages | Split,
    schedule: Schedule,
    rank: int,
    *,
    edges: Iterable[Edge] | None,
    ties: Iterable[GivenTie],
    loss_fn: LossFunction | None,
    loss_reduction: str | None,
    loss_weight: Weight | None,
    wrap: Wrapper | None = None,
) -> Parts:
    """Collect what a pipeline is built from; a split provides what is not given."""
    check_schedule(schedule)
    if not _is_split(given):
        schedule = schedule if edges is None else add_edges(schedule, edges, "edges=")
        stages = _wrapped(cast("GivenStages", given), wrap)
        return Parts(stages, schedule, tuple(ties), loss_fn, loss_reduction or MEAN, loss_weight)
    if edges is not None:
        raise StageError("a split has its own edges; leave out edges=")
    if len(given.layout) != schedule.stages:
        raise StageError(
            f"the split has {len(given.layout)} stages, but the schedule has {schedule.stages}; split the model into "
            f"{schedule.stages} stages"
        )
    schedule = add_edges(schedule, given.edges, "the split")
    loss, own = given.loss, given.stages(rank=rank, placement=schedule.placement)
    parts = Parts(
        _wrapped(own, wrap),
        schedule,
        (*given.ties, *ties),
        loss_fn,
        loss_reduction or MEAN,
        loss_weight,
        None if loss is None else loss.target,
        given.digest,
        given.origin_of(own),
        split=given,
    )
    if loss is None or loss_fn is not None:
        return parts
    reduction = loss_reduction or loss.reduction
    weight = loss.weight if reduction == loss.reduction else None
    return parts._replace(
        loss_fn=loss.loss_fn, reduction=reduction, weight=loss_weight or weight, replace_loss=loss.replace
    )


def _wrapped(given: GivenStages, wrap: Wrapper | None) -> GivenStages:
    """Wrap the modules of stages."""
    if wrap is None:
        return given
    if not isinstance(given, Mapping):
        raise StageError("wrap= takes modules by stage index; wrap the modules of Stage objects yourself")
    wrapped: dict[int, torch.nn.Module | Stage] = {}
    for stage, module in given.items():
        if not isinstance(module, nn.Module):
            raise StageError(
                f"wrap= takes modules, but stage {stage} is {module!r}; wrap its module yourself", stage=stage
            )
        wrapped[stage] = wrap(module)
        if not isinstance(wrapped[stage], nn.Module):
            raise StageError(f"wrap= must return a module, not {wrapped[stage]!r}", stage=stage)
    return wrapped


def add_edges(schedule: Schedule, edges: Iterable[Edge], giver: str) -> Schedule:
    """Give a schedule these edges, which may differ from its own only if it is a chain that is not lowered yet.

    Args:
        schedule: the schedule.
        edges: the edges.
        giver: where they come from, for errors.
    """
    wanted = checked_edges(edges, schedule.stages)
    differing = sorted(set(_unnamed(wanted)) ^ set(_unnamed(schedule.edges)))
    if schedule.compute_only and (schedule.is_chain or not differing):
        return schedule.with_edges(wanted)
    if not differing and _unnamed(wanted) == _unnamed(schedule.edges):
        return schedule
    example = f" ({differing[0]} is only in one of them)" if differing else ""
    if schedule.is_chain:
        raise EdgeError(
            f"the schedule is lowered for a chain of stages, but {giver} has other edges{example}; pass the schedule "
            "before it is lowered"
        )
    raise EdgeError(
        f"the schedule has other edges than {giver}{example}; pass a schedule without edges, e.g. penstock.build(...)"
    )


def _unnamed(edges: Iterable[Edge]) -> list[Edge]:
    return [edge._replace(value="") for edge in edges]


def _is_split(given: GivenStages | Split) -> TypeGuard[Split]:
    return not isinstance(given, Mapping) and callable(getattr(given, "stages", None))
