"""Builds the programs of one rank and the links that they use, when a step first needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import MetadataError, StageError
from penstock.execution.compiler import compile_program
from penstock.execution.microbatch_kinds import find_kinds
from penstock.execution.native_operations import NativeOperations
from penstock.execution.send_releases import find_releases
from penstock.graph.comm_model import CommModel
from penstock.lowering.forwards import forwards_of
from penstock.lowering.pipeline import lower
from penstock.runtime.given_shapes import specs_from_examples
from penstock.runtime.link_building import LinkBuilder
from penstock.runtime.shape_negotiation import infer_specs, last_modifying
from penstock.runtime.wiring import Wiring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.execution.program import Program
    from penstock.execution.stage import Stage
    from penstock.execution.step import Step
    from penstock.ir.actions import Action
    from penstock.ir.schedule import Schedule
    from penstock.runtime.batches import Batch
    from penstock.runtime.custom_functions import Custom
    from penstock.runtime.ends import LossFunction
    from penstock.runtime.link_building import RankLinks
    from penstock.runtime.transport.protocol import Transport

    #: Makes what makes the operations.
    Customized = Callable[[NativeOperations], Custom]

#: How shapes of a link are found, if not given.
INFERRED: Final = "inferred"
PER_MICROBATCH: Final = "per_microbatch"


class ProgramCache:
    """Keeps the programs that this rank runs in training, and in evaluation with and without a loss.

    Args:
        schedule: the lowered schedule of all ranks.
        stages: the stages of this rank.
        transport: what they communicate through.
        shapes: how the shapes of a link are found.
        loss_fn: the loss of a microbatch, if there is one.
        verify: whether to prove the schedule of an evaluation.

    Attributes:
        links: the links of training; None until ranks have agreed on them.
        samples: how many samples each microbatch has, if that was agreed with the shapes.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        transport: Transport,
        *,
        shapes: str | Mapping[int, Any],
        loss_fn: LossFunction | None,
        verify: bool,
    ) -> None:
        self.links: RankLinks | None = None
        self.samples: Sequence[int] | None = None
        self._schedule = schedule
        self._stages = stages
        self._transport = transport
        self._wiring = Wiring(schedule)
        self._builder = LinkBuilder(self._wiring, stages, transport, schedule.microbatches)
        self._shapes = shapes
        self._loss_fn = loss_fn
        self._verify = verify
        self._made: dict[str, Program[Step]] = {}
        self._seen: Any = None
        self._seen_form: Any = None

    def for_schedule(self, schedule: Schedule) -> ProgramCache:
        """Make the programs of another schedule of the same stages; agreed shapes are kept if microbatches are.

        Args:
            schedule: a lowered schedule with the same placement and edges.
        """
        made = ProgramCache(
            schedule,
            self._stages,
            self._transport,
            shapes=self._shapes,
            loss_fn=self._loss_fn,
            verify=self._verify,
        )
        if schedule.microbatches == self._schedule.microbatches:
            made.links, made.samples = self.links, self.samples
            made._seen, made._seen_form = self._seen, self._seen_form
        return made

    def training(self, batch: Batch, customized: Customized) -> Program[Step]:
        """Get the program of a step; the first time, all ranks agree on what goes over the links.

        Args:
            batch: what this rank has of the batch.
            customized: makes what makes the operations.
        """
        if 0 in self._stages and self._shapes == INFERRED and (batch.form is None or batch.form != self._seen_form):
            self._check_seen(batch.args, batch.kwargs)
            self._seen_form = batch.form
        if "training" not in self._made:
            if self.links is None:
                self.links = self._agreed(batch)
            self._made["training"] = self._compiled(self._schedule, self.links, self._loss_fn, customized)
        return self._made["training"]

    def evaluation(self, customized: Customized, *, with_loss: bool) -> Program[Step]:
        """Get the program of an evaluation: the forwards, lowered separately."""
        name = f"evaluation with_loss={with_loss}"
        if name not in self._made:
            model = model_with_headers(self._transport.model)
            lowered = lower(forwards_of(self._schedule), reduce=False, model=model, verify=self._verify)
            # If one rank evaluates and another one trains, their messages must not be mixed up.
            links = self._builder.described(first_tag=2 * len(self._wiring.links) * self._schedule.microbatches)
            self._made[name] = self._compiled(lowered, links, self._loss_fn if with_loss else None, customized)
        return self._made[name]

    def clear(self) -> None:
        """Rebuild programs when they are next needed; agreed shapes are kept."""
        self._made.clear()

    def action(self) -> Action | None:
        """Get the current action."""
        lines = (program.line_at(self._transport.progress) for program in self._made.values())
        return next((line.cell for line in lines if line is not None), None)

    def _check_seen(self, args: Sequence[Any], kwargs: Sequence[dict[str, Any]]) -> None:
        """Refuse other shapes than agreed: they would be received into buffers of the wrong size."""
        seen = find_kinds(args, kwargs)
        if self._seen is None:
            self._seen = seen
        elif seen != self._seen:
            raise MetadataError(
                f"microbatches changed since the first step: {_describe(seen)}, expected {_describe(self._seen)}; drop "
                f"a smaller last batch, or pass shapes={PER_MICROBATCH!r}"
            )

    def _agreed(self, batch: Batch) -> RankLinks:
        stages, wiring, transport = self._stages, self._wiring, self._transport
        if self._shapes == PER_MICROBATCH:
            return self._builder.described()
        if isinstance(self._shapes, Mapping):
            metas = specs_from_examples(self._shapes, stages, wiring, transport, self._schedule.microbatches)
        else:
            metas, self.samples = infer_specs(stages, wiring, transport, batch.args, batch.kwargs, batch.counts.samples)
        return self._builder.agreed(metas, last_modifying(stages, transport))

    def _compiled(
        self, schedule: Schedule, links: RankLinks, loss_fn: LossFunction | None, customized: Customized
    ) -> Program[Step]:
        transport = self._transport
        operations = NativeOperations(
            self._stages,
            self._builder.inbound(links),
            self._builder.outbound(links, loss_fn),
            links.by_ends,
            microbatches=schedule.microbatches,
            progress=transport.progress,
        )
        # Only where messages do not queue may receives be posted early, and sends waited for without a proof.
        has_no_lanes = transport.model.lanes == "message"
        return compile_program(
            [action for action in schedule.actions[transport.rank] if action is not None],
            customized(operations),
            find_releases(schedule, transport.rank, by_level=has_no_lanes, with_headers=links.have_headers),
            rank=transport.rank,
            rank_of=dict(enumerate(schedule.placement.rank_of)).get,
            links=None if self._wiring.is_chain else self._wiring.links,
            early_receives=has_no_lanes,
        )


def check_shapes(shapes: object) -> None:
    """Refuse an unknown value of ``shapes``."""
    if shapes not in (INFERRED, PER_MICROBATCH) and not isinstance(shapes, Mapping):
        raise StageError(f"shapes must be {INFERRED!r}, {PER_MICROBATCH!r} or examples by stage, not {shapes!r}")


def model_with_headers(model: CommModel) -> CommModel:
    """Get the communication model of messages with headers: waiting for these puts all messages in one lane."""
    return model if model.lanes == "message" else CommModel(model.buffering, lanes="rank")


def _describe(seen: Any) -> str:
    kinds, signatures = seen
    return " and ".join(
        f"{kinds.count(number)} x {_describe_tensors(signature)}" for number, signature in enumerate(signatures)
    )


def _describe_tensors(signature: Sequence[Any]) -> str:
    tensors = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in signature]
    return ", ".join(tensors) or "no tensors"
