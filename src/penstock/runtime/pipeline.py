"""What a training script holds: the stages of this rank, a schedule, and ``step``."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self

import torch
import torch.distributed as dist

from penstock.errors import ScheduleError, StageError, StepError
from penstock.execution.data_parallel import gradient_sharing, reductions_of
from penstock.execution.edges import ABSENT
from penstock.execution.microbatches.merge import merge
from penstock.execution.microbatches.split import is_presplit
from penstock.execution.stage import Stage, device_of
from penstock.execution.step import Step, sample_mismatch_error
from penstock.execution.training_check import TrainingCheck
from penstock.execution.trees import map_tensors
from penstock.ir import packed
from penstock.ir.actions import COMPUTE, FORWARD, ComputationType
from penstock.ir.schedule import Schedule
from penstock.lowering.pipeline import lower
from penstock.runtime.batches import Batches
from penstock.runtime.custom_functions import Custom, CustomFunction
from penstock.runtime.ends import DetachedInputs
from penstock.runtime.failure_scope import FailureScope, describe_failure
from penstock.runtime.grad_clipping import clip_grad_norm_
from penstock.runtime.grad_scaling import Scaling
from penstock.runtime.loss_weights import LossWeights
from penstock.runtime.losses import MEAN, Weight, check_reduction, find_shares
from penstock.runtime.parity import Parity, check_parity
from penstock.runtime.program_cache import INFERRED, PER_MICROBATCH, ProgramCache, check_shapes, model_with_headers
from penstock.runtime.recording import Recording
from penstock.runtime.shared_losses import broadcast_losses
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.runtime.transport.failure_messages import pipeline_failed_error
from penstock.runtime.transport.threads import thread_transports
from penstock.verification.check import verify as prove

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, MutableSequence, Sequence

    from penstock.execution.native import NativeOperations
    from penstock.graph.comm_model import CommModel
    from penstock.ir.actions import Action
    from penstock.runtime.batches import Batch
    from penstock.runtime.transport.protocol import Transport

#: In seconds: more often than this, the beginning of a step does not ask whether another rank has failed; in the step
#: it is noticed all the same.
_ASKED_EVERY: Final = 0.05
_BACKWARDS: Final = COMPUTE - {FORWARD}
#: Arguments of a Pipeline whose names say that they are not for a stage.
_OF_CONSTRUCTOR: Final = frozenset(
    {
        "loss_fn",
        "loss_reduction",
        "loss_weight",
        "share_losses",
        "allow_untrained",
        "args_spec",
        "kwargs_spec",
        "target_spec",
        "output_spec",
    }
)


class Pipeline:
    """The part of a pipeline that runs on this rank.

    >>> import penstock as ps
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> schedule = ps.build("LoopedBFS", ranks=1, microbatches=2, stages_per_rank=2)
    >>> pipe = Pipeline(dict(enumerate(model)), schedule, loss_fn=torch.nn.functional.mse_loss)
    >>> losses = []
    >>> out = pipe.step(torch.ones(6, 4), target=torch.zeros(6, 4), losses=losses)
    >>> out.shape, len(losses), model[0].weight.grad is not None
    (torch.Size([6, 4]), 2, True)

    Args:
        stages: the stages of this rank: modules by the index of their stage, or ``Stage`` objects.
        schedule: compute-only, and lowered here; or lowered, and run as it is. The same on every rank.
        loss_fn: gets the output of the last stage and the target of a microbatch, returns a number. Needed on the rank
            of the last stage if the schedule has backwards.
        group: the process group of the pipeline, one process for each rank; by default the default group.
        transport: what to run on instead of a process group, e.g. one that ``run_in_threads`` hands out.
        shapes: ``"inferred"``: what goes over the edges is found once, by a dry run when the first step is taken;
            ``"per_microbatch"``: it may vary, and is described with every microbatch; or an example of the output of
            each stage, by its index.
        loss_reduction: ``"mean"``, ``"sum"`` or ``"weighted"``: what ``loss_fn`` computes for a microbatch, so that
            gradients are those of the whole batch.
        loss_weight: with ``"weighted"``: how much a microbatch counts, given its target.
        args_spec: how positional arguments are split, e.g. ``(TensorChunkSpec(1), Replicate)``; by default along
            dimension 0.
        kwargs_spec: the same for keyword arguments.
        target_spec: the same for the target.
        output_spec: how outputs are merged; by default along dimension 0.
        share_losses: give the losses to every rank, not only to that of the last stage.
        scaler: multiplies the gradients; each rank has one, and calls its ``step`` and ``update`` as ever.
        allow_untrained: accept a step that trains nothing, or leaves a stage untrained whose parameters require
            gradients, e.g. because its output is detached.
        verify: prove the schedule for this transport before anything runs; also the one that ``eval`` runs.
        timeout: how many seconds a rank may wait for another before the step ends on all ranks with a report.
    """

    def __init__(
        self,
        stages: Mapping[int, torch.nn.Module | Stage] | Iterable[Stage],
        schedule: Schedule,
        *,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        shapes: str | Mapping[int, Any] = INFERRED,
        loss_reduction: str = MEAN,
        loss_weight: Weight | None = None,
        args_spec: Any = None,
        kwargs_spec: Any = None,
        target_spec: Any = None,
        output_spec: Any = None,
        share_losses: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        allow_untrained: bool = False,
        verify: bool = True,
        timeout: float = 300.0,
    ) -> None:
        self.transport = transport or _transport(schedule, group, timeout)
        self._loss_fn, self._reduction, self._weight = loss_fn, loss_reduction, loss_weight
        specs = {"args_spec": args_spec, "kwargs_spec": kwargs_spec, "target_spec": target_spec}
        self._output_spec = output_spec
        self._shapes = shapes
        self._verify = verify
        self._custom: dict[ComputationType, CustomFunction] = {}
        self._record: Recording | None = None
        self._share_losses = share_losses
        self._has_trained = False
        self._judges_loss = True
        with self._setting_up():
            _check_schedule(schedule)
            check_reduction(loss_reduction, loss_weight)
            check_shapes(shapes)
            self._stages = _stages(stages)
            if self.transport.in_one_process:
                for stage in self._stages.values():
                    stage.share_process()
            self._telling = FailureScope(self.transport, self._stages.values(), self._action)
            self.compute = schedule
            self.schedule = self._lowered(schedule, self._model())
            self._programs = self._new_programs()
            self._batches = Batches(
                self.rank, first=self.has_first, last=self.has_last, microbatches=schedule.microbatches, specs=specs
            )
            self._reductions = reductions_of(self.schedule)
            self._must_train = not (allow_untrained or self._forward_only)
            self._scaling = None if scaler is None else Scaling(scaler, self._stages, self.transport)
            self._check_stages()
            self._check_ranks_agree()

    @property
    def rank(self) -> int:
        """This rank in the pipeline."""
        return self.transport.rank

    @property
    def stages(self) -> Mapping[int, Stage]:
        """The stages of this rank, by index."""
        return dict(self._stages)

    @property
    def has_first(self) -> bool:
        """Whether the first stage is here: then ``step`` needs the arguments."""
        return 0 in self._stages

    @property
    def has_last(self) -> bool:
        """Whether the last stage is here: then ``step`` needs the target, and returns the output."""
        return self.schedule.stages - 1 in self._stages

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: MutableSequence[torch.Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward and backward; gradients are added to ``.grad``.

        Args:
            *args: what the first stage is called with; needed on its rank, and ignored elsewhere.
            target: needed on the rank of the last stage, and ignored elsewhere.
            losses: gets the loss of each microbatch, in order: at the last stage; with ``share_losses`` on all ranks.
            return_outputs: whether to keep and merge the outputs.
            **kwargs: keyword arguments, for every stage on this rank.

        Returns:
            The merged output on the rank of the last stage, None on the others.
        """
        self._begin_call("step()")
        with self._telling, torch.enable_grad(), self._step_scope(training=True):
            self._check_keywords("step()", kwargs)
            if torch.is_inference_mode_enabled():
                raise StageError(
                    "step() computes gradients, so it cannot run under torch.inference_mode(); call eval() instead"
                )
            varying = self._programs.edges is None or self._shapes == PER_MICROBATCH
            batch = self._batches.of_step(args, kwargs, target, varying=varying)
            program = self._programs.training(batch, self._customized)
            detached = DetachedInputs(batch.args, batch.kwargs)
            shares = self._shares(batch)
            weights = self._loss_weights(shares, target)
            step = Step(
                self.schedule.microbatches,
                args=detached.args,
                shared_args=detached.shared,
                kwargs=detached.kwargs,
                targets=batch.targets,
                shares=shares,
                samples=batch.counts.samples or (),
                target_samples=batch.counts.targets or (),
                keep_outputs=return_outputs and self.has_last,
                on_loss=None if weights is None else weights.note,
                training_check=self._training_check(),
            )
            self._telling.step = step
            if self._record is None:
                program.run(step, self.transport.progress)
            else:
                self._record.run(program, step)
            self._has_trained = True
            self._judges_loss = False
            if weights is not None and (mismatch := weights.describe_mismatch()):
                warnings.warn(mismatch, stacklevel=2)
            detached.backward()
            self._report(step, losses)
            return self._merged(step)

    def eval(
        self, *args: Any, target: Any = None, losses: MutableSequence[torch.Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """Run one batch forward only, without gradients. It may have any size, and other shapes than in training.

        Modules stay in the mode in which they are: call ``eval()`` on them for dropout and statistics to be off.

        Args:
            *args: what the first stage is called with; needed on its rank.
            target: if given on the rank of the last stage, and there is a loss function, losses are computed.
            losses: gets the loss of each microbatch.
            **kwargs: keyword arguments of the stages on this rank.

        Returns:
            The merged output on the rank of the last stage, None on the others.
        """
        self._begin_call("eval()")
        with self._telling, torch.no_grad(), self._step_scope(training=False):
            self._check_keywords("eval()", kwargs)
            batch = self._batches.of_evaluation(args, kwargs, target)
            # Without history: a slice of a slice that is made without gradients says that it needs one all the same.
            # And each with a version of its own: a change of one in place is no change of the others.
            args_of, kwargs_of, targets = map_tensors(lambda tensor: tensor.data, batch[:3])
            missing = self.schedule.microbatches - len(kwargs_of)
            counts = batch.counts
            step = Step(
                self.schedule.microbatches,
                args=args_of,
                kwargs=[*kwargs_of, *[{}] * missing],
                targets=[*targets, *[None] * missing],
                samples=counts.samples or (),
                target_samples=[*counts.targets, *[0] * missing] if counts.targets else (),
                keep_outputs=self.has_last,
            )
            program = self._programs.evaluation(self._customized, with_loss=target is not None)
            self._telling.step = step
            program.run(step, self.transport.progress)
            self._report(step, losses)
            return self._merged(step)

    def check_parity(self, *args: Any, target: Any = None, **kwargs: Any) -> Parity:
        """Compare this pipeline with the unsplit model, for one batch. All ranks call it, as they call ``step``.

        Each rank runs its stages without a schedule and with whole backwards, then with backwards in two halves, then
        ``step``. Random numbers are replayed; parameters, of which a copy is made, gradients, buffers and the random
        state are left as they were. Hooks of parameters do run. All of these count a microbatch's loss as
        ``loss_reduction`` says; so ``loss_fn`` is also called for the merged outputs and the whole target, and must
        give what the microbatches' losses make together.
        Where that cannot be done, the report says that the reduction was not checked, and why.

        Returns:
            How close gradients and losses are.

        Raises:
            StageError: if they differ by more than rounding, or the losses of the microbatches do not make that of the
                whole batch, or a hook has changed a parameter; on every rank. It names the parameters and their
                modules.
        """
        return check_parity(self, args, kwargs, target)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients of the pipeline down, so that their norm is `max_norm` at most. All ranks call it.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: the order of the norm; ``inf`` for the largest gradient.
            error_if_nonfinite: whether to raise if the norm is not a finite number.

        Returns:
            The norm before: over all stages, and shards of them; the same on every rank.
        """
        self._begin_call("clip_grad_norm_()")
        return clip_grad_norm_(self._stages, self.transport, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def register_custom_function(self, kind: ComputationType, function: CustomFunction) -> None:
        """Run a function of your own for every action of a type; see ``penstock.runtime.custom_functions``."""
        if not isinstance(kind, ComputationType):
            raise StageError(f"expected a ComputationType to register a function for, got {kind!r}")
        self._custom[kind] = function
        self._programs.clear()

    def recording(self) -> Recording:
        """Measure steps: ``with pipe.recording() as record:``, on all ranks together; see ``Recording``."""
        return Recording(self)

    def close(self) -> None:
        """Let go of connections and threads. Also done by ``with Pipeline(...) as pipe:``."""
        self._programs.clear()
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and not isinstance(error, StepError):
            self.transport.fail(describe_failure(error, self.rank))  # or the others would wait for this rank
        self.close()

    # Setting up -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _setting_up(self) -> Iterator[None]:
        """A mistake on one rank is told to the others, or they would wait for it."""
        self.transport.progress.call = "Pipeline(...)"
        try:
            yield
        except BaseException as error:
            self.transport.fail(self.transport.explain(error) or describe_failure(error, self.rank))
            raise

    def _check_keywords(self, call: str, kwargs: Mapping[str, Any]) -> None:
        """Arguments of the constructor are not meant for the stages, unless one of them has such an argument."""
        for name in _OF_CONSTRUCTOR.intersection(kwargs):
            if not any(name in signature(stage.module.forward).parameters for stage in self._stages.values()):
                raise StageError(f"pass {name} to Pipeline(...), not to {call}")

    def _model(self) -> CommModel:
        """How communication behaves for the verifier."""
        model = self.transport.model
        return model_with_headers(model) if self._shapes == PER_MICROBATCH else model

    def _lowered(self, schedule: Schedule, model: CommModel) -> Schedule:
        if schedule.compute_only:
            return lower(schedule, model=model, verify=self._verify)
        if self._verify:
            prove(schedule, model=model)
        return schedule

    def _new_programs(self) -> ProgramCache:
        """Programs for the transport that there is now."""
        return ProgramCache(
            self.schedule,
            self._stages,
            self.transport,
            shapes=self._shapes,
            loss_fn=self._loss_fn,
            verify=self._verify,
        )

    def _check_stages(self) -> None:
        schedule, rank = self.schedule, self.transport.rank
        if self.transport.ranks != schedule.ranks:
            raise StageError(
                f"the schedule is for {schedule.ranks} ranks, but the group has {self.transport.ranks}; build it with "
                f"ranks={self.transport.ranks}, or start {schedule.ranks} processes"
            )
        wanted = schedule.placement.stages_of(rank)
        if sorted(self._stages) != sorted(wanted):
            raise StageError(
                f"rank {rank} must be given stages {sorted(wanted)}, not {sorted(self._stages)}; see "
                f"schedule.placement.stages_of({rank})"
            )
        if self.has_last and self._loss_fn is None and not self._forward_only:
            raise StageError(
                f"rank {rank} has the last stage and the schedule has backwards; pass loss_fn",
                stage=schedule.stages - 1,
            )

    @property
    def _forward_only(self) -> bool:
        return not packed.kind_mask(_BACKWARDS).take(packed.types(self.schedule.codes)).any()

    def _check_ranks_agree(self) -> None:
        """Make sure that all ranks have been given the same, and that the edges come up."""
        mine = self._fingerprint()
        for rank, data in enumerate(self.transport.exchange("\n".join(mine.values()).encode())):
            theirs = data.decode(errors="replace").split("\n")
            for (name, value), other in zip(mine.items(), [*theirs, *[""] * len(mine)], strict=False):
                if value != other:
                    fact = f"rank {rank} was given a different {name} from rank {self.rank}"
                    raise StageError(f"{fact}: {other[:100]!r} there, {value!r} here")
        rank_of = self.schedule.placement.rank_of
        pairs = {tuple(sorted(pair)) for pair in pairwise(rank_of) if pair[0] != pair[1]}
        self.transport.connect(sorted(pairs))  # type: ignore[arg-type]

    def _fingerprint(self) -> dict[str, str]:
        """What must be the same on all ranks, by name."""
        schedule = self.schedule
        digest = hashlib.sha256(schedule.codes.tobytes() + schedule.offsets.tobytes()).hexdigest()[:16]
        size = f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
        size = f"{schedule.metadata.get('name', 'no name')}, {size}"
        return {
            "schedule": f"{size}, {len(schedule.codes)} actions, sha256 {digest}",
            "kind of shapes": self._shapes if isinstance(self._shapes, str) else "given",
            "share_losses": str(bool(self._share_losses)),
            "allow_untrained": str(not self._must_train),
            "scaler": "none" if self._scaling is None else "one",
        }

    # In a step ------------------------------------------------------------------------------------------------------

    def _customized(self, operations: NativeOperations) -> Custom:
        """What makes the operations of a program: with the user's functions, and by the clock while recording."""
        if self._record is not None:
            return self._record.custom(operations, self._custom)
        return Custom(self, operations, self._custom)

    def _shares(self, batch: Batch) -> Sequence[float]:
        scale = 1.0 if self._scaling is None else self._scaling.begin_step()
        if not self.has_last:
            return ()
        agreed, counts = self._programs.samples, batch.counts
        if agreed and counts.targets and list(counts.targets) != list(agreed):
            varies = f"; if this batch differs in size from the first one, pass shapes={PER_MICROBATCH!r}"
            raise sample_mismatch_error(agreed, counts.targets, varies)
        found = find_shares(self._reduction, batch.targets, counts.known or agreed, self._weight)
        return [scale * share for share in found]

    @contextmanager
    def _step_scope(self, *, training: bool) -> Iterator[None]:
        """Around a step: when it ends, gradients are complete on all replicas, and an overflow is one everywhere."""
        for stage in self._stages.values():
            stage.begin()
        elsewhere = self._reductions if ComputationType.REDUCE_GRAD in self._custom else ()
        try:
            with gradient_sharing(self._stages.values(), reduce=training, elsewhere=elsewhere):
                yield
        finally:
            for stage in self._stages.values():
                stage.end()
        if training and self._scaling is not None:
            self._scaling.sync_overflow()

    def _loss_weights(self, shares: Sequence[float], target: Any) -> LossWeights | None:
        if not (self._judges_loss and self.has_last):
            return None
        return LossWeights(shares, self._reduction, is_ragged=is_presplit(target))

    def _training_check(self) -> TrainingCheck | None:
        if not self._must_train:
            return None
        return TrainingCheck(self.schedule.stages, self.schedule.microbatches, is_first_step=not self._has_trained)

    def _report(self, step: Step, losses: MutableSequence[torch.Tensor] | None) -> None:
        found = [loss for loss in step.losses if loss is not None]
        if self._share_losses:
            found = broadcast_losses(
                found, self.transport, self.schedule.placement.rank_of[-1], device_of(self._stages)
            )
        if losses is not None:
            losses.extend(found)

    def _merged(self, step: Step) -> Any:
        if step.outputs is None:
            return None
        return merge([output for output in step.outputs if output is not ABSENT], self._output_spec)

    # When something goes wrong --------------------------------------------------------------------------------------

    def _begin_call(self, call: str) -> None:
        """Begin a call, unless the pipeline has failed; if another rank waits for this one, it is told which call."""
        self.transport.progress.call = call
        failure = self.transport.failure(max_age=_ASKED_EVERY)
        if failure is not None:
            self._telling.drop_gradients()
            raise pipeline_failed_error(failure)

    def _action(self) -> Action | None:
        """The action under way."""
        return self._programs.action()


def _stages(stages: Mapping[int, torch.nn.Module | Stage] | Iterable[Stage]) -> dict[int, Stage]:
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


def _transport(schedule: Schedule, group: dist.ProcessGroup | None, timeout: float) -> Transport:
    if dist.is_available() and dist.is_initialized():
        return DistributedTransport(group, timeout=timeout)
    _check_schedule(schedule)
    if schedule.ranks == 1:
        return thread_transports(1)[0]
    raise StageError(
        f"the schedule is for {schedule.ranks} ranks, but there is no process group; start with "
        "'penstock run --ranks N script.py' or torchrun, and call torch.distributed.init_process_group"
    )


def _check_schedule(schedule: object) -> None:
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"expected a Schedule, e.g. penstock.build('1F1B', ...), got {schedule!r}")
