"""Programs for the engine, of any lowered order; a program is kept until what it was made from has changed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from penstock.errors import ScheduleError
from penstock.execution.channel import Progress
from penstock.execution.compiler import compile_program
from penstock.execution.messages import number_links
from penstock.execution.operation_set import CustomOperations
from penstock.execution.send_releases import Releases, find_releases, release_at_end
from penstock.ir.actions import BACKWARD_WEIGHT, FULL_BACKWARD, OVERLAP_F_B, REDUCE_GRAD
from penstock.ir.dependencies import TRANSFER_TYPES
from penstock.ir.edges import links as links_of
from penstock.pipelining._engine.coalesced import releases_of
from penstock.pipelining._engine.links import LinkOperations
from penstock.pipelining._engine.methods import CallConvention, MethodOperations, ScaleGradients
from penstock.pipelining._engine.mode_selection import Mode
from penstock.pipelining._engine.native import Native
from penstock.pipelining._engine.native_rows import can_run_natively, facts_of
from penstock.pipelining._schedule.actions import _Action, _get_profiler_function_name
from penstock.pipelining._schedule.passes import OrderError
from penstock.pipelining._schedule.rows import as_schedule
from penstock.pipelining._stage.compute import is_unmodified
from penstock.pipelining._stage.group_channel import is_gloo
from penstock.pipelining._stage.inference import StageInference
from penstock.pipelining._stage.links import LinkedStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.execution.operation_set import OperationSet
    from penstock.execution.program import Program
    from penstock.ir.actions import ComputationType
    from penstock.ir.edges import Edge
    from penstock.pipelining._engine.step import Custom

#: The rank of a message where it is unknown.
_SOME_RANK: Final = -1


class Compiled(NamedTuple):
    """A program, and what a step needs to run it.

    Attributes:
        program: the program.
        scaled: the stages whose gradients it scales, in order.
        progress: shows where it is.
        native: what its operations work with, if they are the native ones.
    """

    program: Program[Any]
    scaled: Sequence[Any]
    progress: Progress
    native: Native | None = None

    def has_transfers_left(self) -> bool:
        """Whether a program that failed has not posted all of its messages: other ranks wait for them."""
        left = self.program.running[max(0, self.progress.index) :]
        return any(isinstance(line.cell, _Action) and line.cell.computation_type in TRANSFER_TYPES for line in left)


class ProgramCache:
    """A program, and what it was made from: it is made again when that has changed."""

    def __init__(self) -> None:
        self._made: dict[tuple[bool, Mode], tuple[Compiled, tuple[Any, ...]]] = {}

    def program(
        self,
        rows: Mapping[int, Sequence[Any]],
        rank: int,
        stages: Sequence[Any],
        microbatches: int,
        customs: Mapping[ComputationType, Custom],
        trains: bool,
        mode: Mode,
        make: Callable[[], Compiled],
    ) -> Compiled:
        """Get the program for these rows; ``make`` makes it.

        There is one for training, one for evaluation, and of each one for every mode. The row of this rank is compared
        action by action, those of others by identity and length only.
        """
        others = [rows[each] for each in rows]
        kinds = [
            (isinstance(getattr(stage, "submod", None), FSDPModule), _receives_in_the_usual_way(stage))
            for stage in stages
        ]
        sizes = [microbatches, *map(len, others)]
        specs = [*map(facts_of, stages)] if mode is Mode.NATIVE else []
        facts = (rows[rank], list(stages), dict(customs), [*rows], kinds, [*map(id, others)], sizes, specs)
        program, known = self._made.get((trains, mode), (None, ()))
        if program is None or facts != known[:-1]:
            program = make()
            # The rows are kept, so that none can come to have the identity of one that is gone.
            self._made[trains, mode] = program, (list(rows[rank]), *facts[1:], others)
        return program


def program_of_order(
    rows: Mapping[int, Sequence[_Action]],
    rank: int,
    stages: Mapping[int, Any],
    microbatches: int,
    *,
    calls: CallConvention,
    trains: bool,
    mode: Mode = Mode.METHODS,
    customs: Mapping[ComputationType, Custom] | None = None,
    scales_after_backward: bool = False,
    edges: Sequence[Edge] | None = None,
) -> Compiled:
    """Compile the program of one rank.

    Args:
        rows: the lowered actions of every rank.
        rank: whose program it is.
        stages: its stages by index.
        microbatches: how many there are.
        calls: how stages are called.
        trains: whether there are backwards. An evaluation asks for them too, which stages without backward ignore, but
            reduces and scales nothing.
        mode: which operations run.
        customs: functions of the user, by the type of action that they replace.
        scales_after_backward: whether gradients are scaled after the last backward of a stage, without REDUCE_GRAD.
        edges: which values go from which stage to which others; those of a chain by default.
    """
    customs = customs or {}
    _check_stages(rows[rank], stages, customs)
    row = [*_with_scaling(rows[rank], microbatches)] if scales_after_backward else rows[rank]
    native = None
    if mode is Mode.NATIVE and can_run_natively(rows[rank], stages, microbatches, trains=trains):
        native = Native.of(row, stages, microbatches, calls=calls, trains=trains)
    operations: OperationSet[Any]
    if native is not None:
        operations = native.operations
    elif edges is not None:
        directly = mode >= Mode.DIRECT
        operations = LinkOperations(stages, microbatches, calls, trains=trains, directly=directly, edges=edges)
    else:
        operations = operations_of(mode, stages, microbatches, calls, trains=trains)
    if customs:
        operations = CustomOperations(operations, customs, lambda step: step.context(), in_overlaps=False)
    rank_of = _rank_of(stages)
    program = compile_program(
        row,
        operations,
        _releases(rows, row, rank, microbatches, rank_of, edges),
        rank=rank,
        rank_of=rank_of,
        links=None if edges is None else links_of(edges),
        early_receives=not customs and may_post_ahead(stages.values()),
    )
    progress = Progress() if native is None else native.channel.progress
    return Compiled(program, _scaled(row, stages, customs) if trains else [], progress, native)


def program_of_row(
    row: Sequence[Any],
    stage: Any,
    microbatches: int,
    *,
    calls: CallConvention,
    trains: bool,
    mode: Mode,
    in_flight: int,
    label: Callable[[Any], str | None],
) -> Compiled:
    """Compile a row of one stage per rank whose cells say which transfers are posted together."""
    stages = {stage.stage_index: stage}
    program = compile_program(
        row,
        operations_of(mode, stages, microbatches, calls, trains=trains, label=label),
        releases_of(row, microbatches, in_flight=in_flight),
        rank=stage.stage_index,
        rank_of=lambda _: None,
    )
    return Compiled(program, _scaled(row, stages, {}) if trains else [], Progress())


def _with_scaling(row: Iterable[_Action], microbatches: int) -> Iterator[Any]:
    """Add a cell for scaling after the last backward of each stage."""
    done: Counter[int] = Counter()
    for action in row:
        yield action
        for part in action.parts:
            if part.computation_type in (FULL_BACKWARD, BACKWARD_WEIGHT):
                done[part.stage_index] += 1
                if done[part.stage_index] == microbatches:
                    yield ScaleGradients(part.stage_index)


def _scaled(row: Iterable[Any], stages: Mapping[int, Any], customs: Mapping[ComputationType, Custom]) -> list[Any]:
    """Find the stages whose gradients a row scales, in order."""
    return [
        stages[cell.stage_index]
        for cell in row
        if isinstance(cell, ScaleGradients)
        or (isinstance(cell, _Action) and cell.computation_type is REDUCE_GRAD and REDUCE_GRAD not in customs)
    ]


def _releases(
    rows: Mapping[int, Sequence[_Action]],
    row: Sequence[Any],
    rank: int,
    microbatches: int,
    rank_of: Callable[[int], int | None],
    edges: Sequence[Edge] | None,
) -> Releases:
    """When sends are waited for; at the end if the rows of other ranks do not tell."""
    try:
        schedule = as_schedule(rows, microbatches=microbatches, edges=edges)
    except ScheduleError:
        numbers = None if edges is None else number_links(links_of(edges))
        return release_at_end((cell for cell in row if isinstance(cell, _Action)), microbatches, rank_of, numbers)
    found = find_releases(schedule, sorted(rows).index(rank), by_level=True)
    if len(row) == len(rows[rank]):
        return found
    # Positions count the actions of a schedule; here, there are cells for scaling between them.
    places = [position for position, cell in enumerate(row) if isinstance(cell, _Action)]
    return Releases({places[position]: keys for position, keys in found.after.items()}, found.at_end)


def _rank_of(stages: Mapping[int, Any]) -> Callable[[int], int | None]:
    """Find the ranks of stages. A stage of another kind may talk to any other one: then all are as one rank."""
    if not all(isinstance(stage, (StageInference, LinkedStage)) for stage in stages.values()):
        return lambda _: _SOME_RANK
    ranks: dict[int, int] = {}
    for stage in stages.values():
        ranks |= stage.stage_index_to_group_rank
    return ranks.get


def _check_stages(row: Sequence[_Action], stages: Mapping[int, Any], customs: Mapping[ComputationType, Custom]) -> None:
    """Refuse a schedule that runs stages which this rank does not hold."""
    parts = [part for action in row if action.computation_type not in customs for part in action.parts]
    needed = {part.stage_index for part in parts if part.computation_type is not OVERLAP_F_B}
    if needed - stages.keys():
        raise OrderError(
            f"this rank holds stages {sorted(stages)}, but its schedule runs stages {sorted(needed)}; construct it "
            "with PipelineStage objects for those"
        )


def operations_of(
    mode: Mode,
    stages: Mapping[int, Any],
    microbatches: int,
    calls: CallConvention,
    *,
    trains: bool,
    label: Callable[[Any], str | None] = _get_profiler_function_name,
) -> MethodOperations:
    """Make the operations of these stages, in this mode."""
    return MethodOperations(stages, microbatches, calls, trains=trains, directly=mode >= Mode.DIRECT, label=label)


def may_post_ahead(stages: Iterable[Any]) -> bool:
    """Whether receives may be posted before sends that precede them: where messages do not queue in lanes.

    Not with a stage that overrides how it receives, which may rely on the order of its calls.
    """
    return dist.is_initialized() and all(
        _receives_in_the_usual_way(stage)
        and torch.device(stage.device).type == "cpu"
        and is_gloo(stage.group, torch.device("cpu"))
        for stage in stages
    )


def _receives_in_the_usual_way(stage: Any) -> bool:
    return is_unmodified(stage, "get_fwd_recv_ops", "get_bwd_recv_ops", "_get_recv_ops")
