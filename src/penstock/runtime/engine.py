"""Runs steps on one rank: its stages, the transport, the programs and the batches.

``Pipeline`` is what a script holds; ``check_parity`` and a recording drive the engine below it. An engine prepares a
step, its caller runs the program, and the engine completes the step: so no frame lies between ``step`` and the program.
"""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from penstock.errors import MicrobatchError, StageError
from penstock.execution.data_parallel import reduction_scope, reductions_of
from penstock.execution.links import ABSENT
from penstock.execution.microbatches.merge import merge
from penstock.execution.microbatches.split import is_presplit
from penstock.execution.stage import device_of
from penstock.execution.step import Step, sample_mismatch_error
from penstock.execution.training_check import TrainingCheck
from penstock.execution.trees import map_tensors
from penstock.ir import packed
from penstock.ir.actions import COMPUTE, FORWARD, ComputationType
from penstock.lowering.pipeline import lower
from penstock.runtime.batches import Batches
from penstock.runtime.checkpoints.names import agree_on_names
from penstock.runtime.custom_functions import Custom
from penstock.runtime.ends import DetachedInputs
from penstock.runtime.failure_scope import FailureScope, describe_failure
from penstock.runtime.grad_scaling import Scaling
from penstock.runtime.loss_weights import LossWeights
from penstock.runtime.losses import check_reduction, combine_losses, find_shares
from penstock.runtime.program_cache import PER_MICROBATCH, ProgramCache, check_shapes, model_with_headers
from penstock.runtime.setup_checks import (
    check_ranks_agree,
    check_stages,
    collect_stages,
    warn_of_different_models,
)
from penstock.runtime.shared_losses import broadcast_losses
from penstock.runtime.split_keywords import SplitKeywords
from penstock.runtime.splits import collect_parts
from penstock.runtime.statistics import StepCounter
from penstock.runtime.switching import agree, fit_schedule
from penstock.runtime.ties import Ties, describe_options
from penstock.runtime.trace import Trace
from penstock.runtime.transport.failure_messages import pipeline_failed_error
from penstock.verification.check import verify as prove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence

    from penstock.execution.channel import Progress
    from penstock.execution.native_operations import NativeOperations
    from penstock.execution.stage import Stage
    from penstock.ir.edges import Edge
    from penstock.ir.schedule import Schedule
    from penstock.runtime.batches import Batch
    from penstock.runtime.checkpoints.names import StateNames
    from penstock.runtime.checkpoints.saves import Saves
    from penstock.runtime.custom_functions import CustomFunction
    from penstock.runtime.ends import LossFunction
    from penstock.runtime.losses import Weight
    from penstock.runtime.pipeline import Pipeline
    from penstock.runtime.splits import GivenStages, Split, Wrapper
    from penstock.runtime.ties import GivenTie
    from penstock.runtime.transport.protocol import Transport

#: In seconds: the least interval at which the start of a step checks whether another rank has failed; within a step
#: a failure is noticed anyway.
_ASKED_EVERY: Final = 0.05
_BACKWARDS: Final = COMPUTE - {FORWARD}


class Runnable(Protocol):
    """A program, or one that is recorded."""

    def run(self, step: Step, progress: Progress) -> None:
        """Run all of it."""


class StepRecorder(Protocol):
    """Takes the times of steps: a recording, or a trace."""

    def customize(self, operations: NativeOperations) -> Custom:
        """Add the user's functions to the operations of a program, and take the times of all."""

    def record(self, program: Runnable) -> Runnable:
        """A program that is recorded as one step when it runs."""

    def use(self, schedule: Schedule) -> None:
        """Go on with another schedule of the same stages."""


class Training(NamedTuple):
    """A training step that is ready to run.

    Attributes:
        program: what to run.
        step: its state.
        inputs: the arguments of the first stage, cut off from the graph that made them.
        weights: judges how the loss of a microbatch is weighted; None if that was judged before.
    """

    program: Runnable
    step: Step
    inputs: DetachedInputs
    weights: LossWeights | None


def is_forward_only(schedule: Schedule) -> bool:
    """Return whether a schedule has no backward."""
    return not packed.kind_mask(_BACKWARDS).take(packed.types(schedule.codes)).any()


class Engine:
    """Runs a schedule on one rank.

    Attributes:
        pipe: what a custom function gets as its pipeline.
        transport: connects the ranks. A recording replaces it, and the programs with it.
        stages: the stages of this rank, by index.
        compute: the schedule as it was given.
        schedule: the lowered schedule, which runs.
        programs: the programs of this rank.
        batches: splits batches.
        loss_fn: the loss of a microbatch, if there is one.
        output_spec: how outputs are merged.
        scaling: multiplies gradients, if there is a scaler.
        ties: keeps parameters equal that several stages hold.
        custom_functions: the user's own functions, by the type of action that they replace.
        failures: the scope around each call: it makes an error here one on every rank.
        recording: what takes the times of steps: the current recording, or the trace, or nothing.
        trace: the trace of all steps, if there is one.
        judges_loss: whether the next step checks that microbatches are weighted as their losses suggest.
        shares_tokens: whether the rank of the last stage is connected to all others, to send generated tokens.
        batch_loss: the loss of the last batch, where its losses are.
        split: what the stages are from, if they are from a split.
        counter: counts training steps, and how long they wait.
        settlers: called before parameters are used: each completes a step of an optimizer that has yet to be validated.
    """

    def __init__(
        self,
        pipe: Pipeline,
        stages: GivenStages | Split,
        schedule: Schedule,
        transport: Transport,
        *,
        edges: Iterable[Edge] | None,
        loss_fn: LossFunction | None,
        shapes: str | Mapping[int, Any],
        loss_reduction: str | None,
        loss_weight: Weight | None,
        wrap: Wrapper | None,
        specs: Mapping[str, Any],
        output_spec: Any,
        share_losses: bool,
        scaler: torch.amp.GradScaler | None,
        ties: Iterable[GivenTie],
        check_ties_every: int,
        allow_untrained: bool,
        verify: bool,
        trace: bool,
    ) -> None:
        self.pipe = pipe
        self.transport = transport
        self.output_spec = output_spec
        self.custom_functions: dict[ComputationType, CustomFunction] = {}
        self.recording: StepRecorder | None = None
        self.trace: Trace | None = None
        self.judges_loss = True
        self.counter = StepCounter()
        self.settlers: list[Callable[[], None]] = []
        self.shares_tokens = False
        self.batch_loss: torch.Tensor | None = None
        self._shares: Sequence[float] = ()
        self._shapes = shapes
        self._verify = verify
        self._share_losses = share_losses
        self._has_trained = False
        self._state_names: StateNames | None = None
        self.saves: Saves | None = None
        with self._setup_scope():
            parts = collect_parts(
                stages,
                schedule,
                transport.rank,
                edges=edges,
                ties=ties,
                loss_fn=loss_fn,
                loss_reduction=loss_reduction,
                loss_weight=loss_weight,
                wrap=wrap,
            )
            schedule, self.loss_fn, self._target_name = parts.schedule, parts.loss_fn, parts.target
            self._reduction, self._weight = parts.reduction, parts.weight
            self._replace_loss = parts.replace_loss
            self.split = parts.split
            check_reduction(self._reduction, self._weight)
            check_shapes(shapes)
            self.stages: Mapping[int, Stage] = collect_stages(parts.stages)
            if transport.in_one_process:
                for stage in self.stages.values():
                    stage.share_process()
            self.failures = FailureScope(transport, self.stages.values(), lambda: self.programs.action())
            self.compute = schedule
            self.schedule = self._lower(schedule)
            self.programs = self.new_programs()
            self.batches = self._new_batches(specs)
            self._reductions = reductions_of(self.schedule)
            self._must_train = not (allow_untrained or self.is_forward_only)
            self.scaling = None if scaler is None else Scaling(scaler, self.stages, transport)
            needs_loss = self.loss_fn is None and not self.is_forward_only
            check_stages(self.stages, self.schedule, transport, needs_loss=needs_loss)
            of_model = loss_fn is None and parts.target is not None and not self.is_forward_only
            self._keywords = SplitKeywords(parts.target, is_required=of_model) if parts.digest else None
            common = (
                {"split": parts.digest, "trace": str(trace)}
                | self._common_options()
                | describe_options(parts.ties, check_ties_every)
            )
            check_ranks_agree(transport, self.schedule, common)
            if parts.digest:
                warn_of_different_models(transport, parts.origin)
            self.ties = Ties(parts.ties, self.stages, schedule.placement.rank_of, transport, check_ties_every)
            self.recording = self.trace = Trace(self) if trace else None

    @property
    def rank(self) -> int:
        """This rank in the pipeline."""
        return self.transport.rank

    @property
    def has_first(self) -> bool:
        """Whether the first stage is here."""
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        """Whether the last stage is here."""
        return self.schedule.stages - 1 in self.stages

    @property
    def is_forward_only(self) -> bool:
        """Whether the schedule has no backward."""
        return is_forward_only(self.schedule)

    def state_names(self) -> StateNames:
        """What the state of all stages is called in a checkpoint. All ranks call it."""
        if self._state_names is None:
            is_split = self.split is not None
            self._state_names = agree_on_names(self.stages, self.ties.ties, self.transport, is_split=is_split)
        return self._state_names

    def new_programs(self) -> ProgramCache:
        """Programs for the present transport."""
        return ProgramCache(
            self.schedule, self.stages, self.transport, shapes=self._shapes, loss_fn=self.loss_fn, verify=self._verify
        )

    def use(self, schedule: Schedule) -> None:
        """Switch to another schedule of the same stages, on all ranks or on none; see ``Pipeline.use``."""
        self.begin_call("use()")
        compute: list[Schedule] = []

        def prepare() -> Schedule:
            compute.append(fit_schedule(schedule, self.schedule))
            if is_forward_only(compute[0]) != self.is_forward_only:
                has = "has no backward" if is_forward_only(compute[0]) else "has backwards"
                raise StageError(f"the schedule {has}, unlike that of this pipeline; make another Pipeline for it")
            return self._lower(compute[0])

        lowered = agree(prepare, self.transport)
        keeps_batches = lowered.microbatches == self.schedule.microbatches
        self.compute, self.schedule = compute[0], lowered
        self._reductions = reductions_of(lowered)
        self.programs = self.programs.for_schedule(lowered)
        if not keeps_batches:
            self.batches = self._new_batches(self.batches.specs)
        if self.recording is not None:
            self.recording.use(lowered)

    def settle(self) -> None:
        """Validate the last steps of optimizers."""
        for settle in self.settlers:
            settle()

    def close(self) -> None:
        """Let go of connections and threads."""
        self.programs.clear()
        self.transport.close()

    # A step ---------------------------------------------------------------------------------------------------------

    def begin_call(self, call: str, *, settles: bool = True) -> None:
        """Begin a call, unless the pipeline has failed. Ranks that wait for this one report which call it is in.

        One that `settles` uses the parameters, so that the steps of optimizers must be validated.
        """
        if settles:
            self.settle()
        self.transport.progress.call = call
        failure = self.transport.failure(max_age=_ASKED_EVERY)
        if failure is not None:
            self.failures.drop_gradients()
            raise pipeline_failed_error(failure)

    @contextmanager
    def step_scope(self, *, training: bool) -> Iterator[None]:
        """Around a step: when it ends, gradients are complete on all replicas, and an overflow counts on all ranks."""
        if training:
            self.ties.begin_step()
        for stage in self.stages.values():
            stage.begin()
        elsewhere = self._reductions if ComputationType.REDUCE_GRAD in self.custom_functions else ()
        try:
            with reduction_scope(self.stages.values(), reduce=training, elsewhere=elsewhere):
                yield
        finally:
            for stage in self.stages.values():
                stage.end()
        if training:
            self.ties.finish_step(self.transport)
        if training and self.scaling is not None:
            self.scaling.sync_overflow()

    def find_target(self, target: Any, kwargs: Mapping[str, Any]) -> Any:
        """Get the target of a call: the one that was passed as such, or the keyword argument that the model takes."""
        return kwargs.get(self._target_name) if target is None and self._target_name is not None else target

    def prepare_training(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, keep_outputs: bool, share: float = 1.0
    ) -> Training:
        """Prepare a training step; the first time, all ranks agree on what goes over the links.

        The gradients are multiplied by `share`.
        """
        if not math.isfinite(share):
            raise StageError(f"share must be a finite number, e.g. 1 / 4 if 4 steps make one batch, not {share!r}")
        if torch.is_inference_mode_enabled():
            raise StageError(
                "step() computes gradients, so it cannot run under torch.inference_mode(); call eval() instead"
            )
        self.batch_loss = None
        if self._keywords is not None:
            self._keywords.check(kwargs, self.transport, has_last=self.has_last)
        varying = self.programs.links is None or self._shapes == PER_MICROBATCH
        batch = self.batches.of_step(args, kwargs, target, varying=varying)
        program: Runnable = self.programs.training(batch, self.customize)
        inputs = DetachedInputs(batch.args, batch.kwargs)
        scale, shares = share * self.begin_scale(), self.find_shares(batch)
        weights = self._loss_weights(shares, target)
        self._shares = shares
        self.failures.step = step = Step(
            self.schedule.microbatches,
            args=inputs.args,
            shared_args=inputs.shared,
            kwargs=inputs.kwargs,
            targets=batch.targets,
            shares=[scale * one for one in shares],
            samples=batch.counts.samples or (),
            target_samples=batch.counts.targets or (),
            keep_outputs=keep_outputs and self.has_last,
            on_loss=None if weights is None else weights.note,
            training_check=self._training_check(),
        )
        if self.recording is not None:
            program = self.recording.record(program)
        return Training(program, step, inputs, weights)

    def complete_training(self, training: Training) -> None:
        """Complete a training step whose program has run: gradients of the arguments, and a check of the loss."""
        self._has_trained = True
        self.judges_loss = False
        if training.weights is not None and (mismatch := training.weights.describe_mismatch()):
            warnings.warn(mismatch, stacklevel=3)  # the caller of step()
        training.inputs.backward()

    def prepare_evaluation(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> tuple[Runnable, Step]:
        """Prepare an evaluation: its program and its state."""
        self.batch_loss = None
        batch = self.batches.of_evaluation(args, kwargs, target)
        has_loss = target is not None and self.loss_fn is not None and self.has_last
        self._shares = self._evaluation_shares(batch) if has_loss else ()
        # Without history: a slice of a slice that is made without gradients says that it needs one all the same.
        # And each with its own version: modifying one in place does not modify the others.
        args_of, kwargs_of, targets = map_tensors(lambda tensor: tensor.data, batch[:3])
        missing = self.schedule.microbatches - len(kwargs_of)
        counts = batch.counts
        self.failures.step = step = Step(
            self.schedule.microbatches,
            args=args_of,
            kwargs=[*kwargs_of, *[{}] * missing],
            targets=[*targets, *[None] * missing],
            samples=counts.samples or (),
            target_samples=[*counts.targets, *[0] * missing] if counts.targets else (),
            keep_outputs=self.has_last,
        )
        return self.programs.evaluation(self.customize, with_loss=target is not None), step

    def collect(self, step: Step, losses: MutableSequence[torch.Tensor] | None) -> Any:
        """Append the losses of a step, shared with all ranks if they should be; returns its merged output."""
        found = [loss for loss in step.losses if loss is not None]
        shares = self._shares
        if self._share_losses:
            source = self.schedule.placement.rank_of[-1]
            found, shares = broadcast_losses(found, shares, self.transport, source, device_of(self.stages))
        if found and len(found) == len(shares):
            self.batch_loss = combine_losses(found, shares)
        if losses is not None:
            losses.extend(found)
        if step.outputs is None:
            return None
        output = merge([output for output in step.outputs if output is not ABSENT], self.output_spec)
        if self._replace_loss is not None and self.batch_loss is not None:
            return self._replace_loss(output, self.batch_loss)
        return output

    def customize(self, operations: NativeOperations) -> Custom:
        """Add the user's functions to the operations of a program, and the clock of a recording or trace."""
        if self.recording is not None:
            return self.recording.customize(operations)
        return Custom(self.pipe, operations, self.custom_functions)

    def begin_scale(self) -> float:
        """Get the factor of the gradients of this step; 1 without a scaler."""
        return 1.0 if self.scaling is None else self.scaling.begin_step()

    def find_shares(self, batch: Batch) -> Sequence[float]:
        """Find how much the loss of each microbatch counts; nothing without the last stage."""
        if not self.has_last:
            return ()
        agreed, counts = self.programs.samples, batch.counts
        if agreed and counts.targets and list(counts.targets) != list(agreed):
            varies = f"; if this batch differs in size from the first one, pass shapes={PER_MICROBATCH!r}"
            raise sample_mismatch_error(agreed, counts.targets, varies)
        return find_shares(self._reduction, batch.targets, counts.known or agreed, self._weight)

    def _evaluation_shares(self, batch: Batch) -> Sequence[float]:
        """Find how much the loss of each microbatch of an evaluation counts; nothing if that is not known."""
        try:
            return find_shares(self._reduction, batch.targets, batch.counts.known, self._weight, may_be_empty=True)
        except MicrobatchError:  # the losses are right nevertheless; the loss of the batch is not known
            return ()

    def _loss_weights(self, shares: Sequence[float], target: Any) -> LossWeights | None:
        if not (self.judges_loss and self.has_last):
            return None
        return LossWeights(shares, self._reduction, is_ragged=is_presplit(target))

    def _training_check(self) -> TrainingCheck | None:
        if not self._must_train:
            return None
        return TrainingCheck(self.schedule.stages, self.schedule.microbatches, is_first_step=not self._has_trained)

    # Setting up -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _setup_scope(self) -> Iterator[None]:
        """Report a mistake on this rank to the others, which would wait for it."""
        self.transport.progress.call = "Pipeline(...)"
        try:
            yield
        except BaseException as error:
            self.transport.fail(self.transport.explain(error) or describe_failure(error, self.rank))
            raise

    def _new_batches(self, specs: Mapping[str, Any]) -> Batches:
        microbatches = self.schedule.microbatches
        return Batches(self.rank, first=self.has_first, last=self.has_last, microbatches=microbatches, specs=specs)

    def _lower(self, schedule: Schedule) -> Schedule:
        model = self.transport.model
        if self._shapes == PER_MICROBATCH:
            model = model_with_headers(model)
        if schedule.compute_only:
            return lower(schedule, model=model, verify=self._verify)
        if self._verify:
            prove(schedule, model=model)
        return schedule

    def _common_options(self) -> dict[str, str]:
        """What must be the same on all ranks beside the schedule, by name."""
        return {
            "kind of shapes": self._shapes if isinstance(self._shapes, str) else "given",
            "share_losses": str(bool(self._share_losses)),
            "allow_untrained": str(not self._must_train),
            "scaler": "none" if self.scaling is None else "one",
        }
