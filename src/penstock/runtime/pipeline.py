"""The pipeline of a training script: the stages of this rank, a schedule, and ``step``."""

from __future__ import annotations

from contextlib import ExitStack
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, Self

import torch
import torch.distributed as dist

from penstock.errors import StageError, StepError
from penstock.ir.actions import ComputationType
from penstock.runtime.checkpoints.state import collect_state, restore_state
from penstock.runtime.engine import Engine
from penstock.runtime.failure_scope import describe_failure
from penstock.runtime.generation import generate
from penstock.runtime.generation.request import Sampling
from penstock.runtime.grad_clipping import clip_grad_norm_
from penstock.runtime.parity import Parity, check_parity
from penstock.runtime.program_cache import INFERRED
from penstock.runtime.recording import Recording
from penstock.runtime.setup_checks import check_schedule
from penstock.runtime.shared_values import broadcast, gather
from penstock.runtime.trace import wants_trace
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.runtime.transport.threads import thread_transports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence

    from penstock.execution.stage import Stage
    from penstock.execution.ties import Tie
    from penstock.ir.edges import Edge
    from penstock.ir.schedule import Schedule
    from penstock.runtime.custom_functions import CustomFunction
    from penstock.runtime.losses import Weight
    from penstock.runtime.splits import GivenStages, Split, Wrapper
    from penstock.runtime.statistics import Statistics
    from penstock.runtime.ties import GivenTie
    from penstock.runtime.trace import Trace
    from penstock.runtime.transport.protocol import Transport

#: Arguments of a Pipeline whose names say that they are not for a stage.
_OF_CONSTRUCTOR: Final = frozenset(
    {
        "loss_fn",
        "loss_reduction",
        "loss_weight",
        "wrap",
        "share_losses",
        "ties",
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
        stages: the stages of this rank: modules by the index of their stage, or ``Stage`` objects; or a split of the
            model, from which this rank's stages, their edges and ties, and the loss are taken.
        schedule: compute-only, and lowered here; or lowered, and run as it is. The same on every rank.
        edges: which values stages pass to which later ones, if they are not a chain and the schedule does not say:
            ``[Edge(0, (1,)), Edge(0, (3,)), ...]``.
        loss_fn: gets the output of the last stage and the target of a microbatch, returns a number. Needed on the rank
            of the last stage if the schedule has backwards; by default, what the model of a split computes.
        group: the process group of the pipeline, one process for each rank; by default the default group.
        transport: what to run on instead of a process group, e.g. one that ``run_in_threads`` passes.
        shapes: ``"inferred"``: what goes over the links is found once, by a dry run in the first step;
            ``"per_microbatch"``: it may vary, and is described with every microbatch; or an example of the output of
            each stage, by its index.
        loss_reduction: ``"mean"``, ``"sum"`` or ``"weighted"``: what ``loss_fn`` computes for a microbatch, so that
            gradients are those of the whole batch; by default ``"mean"``, or what the loss of a split is.
        loss_weight: with ``"weighted"``: how much a microbatch counts, given its target.
        wrap: called with the module of each stage on this rank, returns what to run instead, e.g. ``fully_shard``,
            ``DistributedDataParallel`` or ``torch.compile`` around it.
        args_spec: how positional arguments are split, e.g. ``(TensorChunkSpec(1), Replicate)``; by default along
            dimension 0.
        kwargs_spec: the same for keyword arguments.
        target_spec: the same for the target.
        output_spec: how outputs are merged; by default along dimension 0.
        share_losses: give the losses to every rank, not only to that of the last stage.
        scaler: multiplies the gradients; each rank has one, and calls its ``step`` and ``update`` as usual.
        ties: parameters that several stages hold as one: names, ``("wte.weight", "lm_head.weight")``, for all stages
            that have a parameter of one of these names; or a ``penstock.Tie``. Members on one rank become one tensor,
            so create the optimizer afterwards.
        check_ties_every: after how many steps to check again that tied parameters are equal, beside the first steps; 0
            turns it off.
        allow_untrained: accept a step that trains nothing, or leaves a stage untrained whose parameters require
            gradients, e.g. because its output is detached.
        verify: prove the schedule for this transport before anything runs; also the one that ``eval`` runs.
        timeout: how many seconds a rank may wait for another before the step ends on all ranks with a report.
        trace: take the times of the actions of every step; ``pipe.trace.timeline()`` shows the last ones. By default
            only under ``penstock run --trace``.
    """

    def __init__(
        self,
        stages: GivenStages | Split,
        schedule: Schedule,
        *,
        edges: Iterable[Edge] | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        shapes: str | Mapping[int, Any] = INFERRED,
        loss_reduction: str | None = None,
        loss_weight: Weight | None = None,
        wrap: Wrapper | None = None,
        args_spec: Any = None,
        kwargs_spec: Any = None,
        target_spec: Any = None,
        output_spec: Any = None,
        share_losses: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        ties: Iterable[GivenTie] = (),
        check_ties_every: int = 100,
        allow_untrained: bool = False,
        verify: bool = True,
        timeout: float = 300.0,
        trace: bool | None = None,
    ) -> None:
        with ExitStack() as unless_done:
            if transport is None:
                transport = _transport(schedule, group, timeout)
                unless_done.callback(transport.close)  # at once: its watchdog may hold it a while longer
            self._engine = Engine(
                self,
                stages,
                schedule,
                transport,
                edges=edges,
                loss_fn=loss_fn,
                shapes=shapes,
                loss_reduction=loss_reduction,
                loss_weight=loss_weight,
                wrap=wrap,
                specs={"args_spec": args_spec, "kwargs_spec": kwargs_spec, "target_spec": target_spec},
                output_spec=output_spec,
                share_losses=share_losses,
                scaler=scaler,
                ties=ties,
                check_ties_every=check_ties_every,
                allow_untrained=allow_untrained,
                verify=verify,
                trace=wants_trace(trace),
            )
            unless_done.pop_all()

    @property
    def transport(self) -> Transport:
        """What connects the ranks."""
        return self._engine.transport

    @property
    def compute(self) -> Schedule:
        """The schedule as it was given."""
        return self._engine.compute

    @property
    def schedule(self) -> Schedule:
        """The lowered schedule, which runs."""
        return self._engine.schedule

    @property
    def rank(self) -> int:
        """This rank in the pipeline."""
        return self._engine.rank

    @property
    def stages(self) -> Mapping[int, Stage]:
        """The stages of this rank, by index."""
        return dict(self._engine.stages)

    @property
    def has_first(self) -> bool:
        """Whether the first stage is here: then ``step`` needs the arguments."""
        return self._engine.has_first

    @property
    def has_last(self) -> bool:
        """Whether the last stage is here: then ``step`` needs the target, and returns the output."""
        return self._engine.has_last

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of this rank's stages, each once, with their names in the stages' modules."""
        seen = set()
        for stage in self._engine.stages.values():
            for name, parameter in stage.module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of this rank's stages, each once: what an optimizer takes."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The parameters that several stages hold as one."""
        return self._engine.ties.ties

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss of the batch of the last ``step`` or ``eval``: the one that the gradients are of, unscaled.

        The microbatches' losses count in it as ``loss_reduction`` says, as in the gradients. It is on the rank of the
        last stage; with ``share_losses`` on all ranks. Elsewhere, without a loss, and if the samples of an evaluation
        cannot be counted, it is None.

        >>> from penstock import build
        >>> model, loss_fn = torch.nn.Linear(4, 4), torch.nn.functional.mse_loss
        >>> pipe = Pipeline({0: model}, build("GPipe", ranks=1, microbatches=2), loss_fn=loss_fn)
        >>> x, target = torch.randn(3, 4), torch.randn(3, 4)
        >>> _ = pipe.step(x, target=target)  # in microbatches of 2 and 1
        >>> torch.allclose(pipe.loss, loss_fn(model(x), target))
        True
        """
        return self._engine.batch_loss

    @property
    def statistics(self) -> Statistics:
        """How this rank has spent its time in training steps so far; ``.bubble`` is the part of it that it waited.

        Only waits in which this process blocks count. Transfers of an accelerator are waited for on the device, so
        there ``recording`` shows what this does not. See docs/training.md for the bubble of an interval.
        """
        return self._engine.counter.total

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: MutableSequence[torch.Tensor] | None = None,
        return_outputs: bool = True,
        share: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward and backward; gradients are added to ``.grad``.

        Args:
            *args: what the first stage is called with; needed on its rank, and ignored elsewhere.
            target: needed on the rank of the last stage, and ignored elsewhere. With the loss of a split, the keyword
                argument that the model takes for it, e.g. ``labels``, will do.
            losses: gets the loss of each microbatch, in order: at the last stage; with ``share_losses`` on all ranks.
                The loss of the batch is in ``loss``.
            return_outputs: whether to keep and merge the outputs.
            share: how much the batch counts in the gradients, if several steps make one: e.g. 1 / 4 for each of 4
                equal ones. It counts on the rank of the last stage. ``loss`` and ``losses`` are those of this batch.
            **kwargs: keyword arguments, for every stage on this rank.

        Returns:
            The merged output on the rank of the last stage, None on the others.
        """
        engine = self._engine
        engine.begin_call("step()")
        counted = engine.counter.count(engine.transport.progress, steps=1)
        with counted, engine.failures, torch.enable_grad(), engine.step_scope(training=True):
            self._check_keywords("step()", kwargs)
            target = engine.find_target(target, kwargs)
            training = engine.prepare_training(args, kwargs, target, keep_outputs=return_outputs, share=share)
            training.program.run(training.step, engine.transport.progress)
            engine.complete_training(training)
            return engine.collect(training.step, losses)

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
        engine = self._engine
        engine.begin_call("eval()")
        with engine.failures, torch.no_grad(), engine.step_scope(training=False):
            self._check_keywords("eval()", kwargs)
            target = engine.find_target(target, kwargs)
            program, step = engine.prepare_evaluation(args, kwargs, target)
            program.run(step, engine.transport.progress)
            return engine.collect(step, losses)

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        microbatches: int | None = None,
        report: Callable[[str], object] | None = None,
    ) -> torch.Tensor:
        """Generate tokens with a decoder of transformers that ``penstock.split`` has split. All ranks call it alike.

        Modules run in eval mode, and are then in the mode in which they were; random generators, gradients and buffers
        are left as they are. Each stage keeps the keys and values of its own layers.

        Args:
            input_ids: the prompts, ``[sequences, tokens]``, padded on the left or on the right.
            attention_mask: which tokens count; by default all but those that equal the token for padding, unless it
                also ends sequences.
            max_new_tokens: how many tokens are generated for each sequence at most.
            temperature: 0 for the most probable token; else tokens are drawn, from logits divided by it.
            top_k: draw among this number of the most probable tokens.
            top_p: draw among the most probable tokens that together have this probability.
            seed: of the draws. The tokens are the same for any number of ranks, stages and microbatches.
            eos_token_id: the tokens that end a sequence, ``()`` for none; by default those of the model.
            pad_token_id: what follows then; by default that of the model, or the first that ends a sequence.
            microbatches: how many microbatches of sequences are in flight; by default as many as there are ranks, so
                that each has work.
            report: called with a line of text for each new token.

        Returns:
            The prompts with the new tokens, on every rank.

        Raises:
            GenerationError: the model cannot generate, or arguments are wrong or differ between ranks; on every rank.
        """
        self._engine.begin_call("generate()")
        return generate(
            self._engine,
            report,
            Sampling(temperature, top_k, top_p, seed),
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            microbatches=microbatches,
        )

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
        return check_parity(self._engine, self.step, args, kwargs, self._engine.find_target(target, kwargs))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients of the pipeline down, so that their norm is `max_norm` at most. All ranks call it.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: the order of the norm; ``inf`` for the largest gradient.
            error_if_nonfinite: whether to raise if the norm is not a finite number.

        Returns:
            The norm before: over all stages, and shards of them, with tied parameters counted once; the same on every
            rank.
        """
        engine = self._engine
        engine.begin_call("clip_grad_norm_()")
        with engine.counter.count(engine.transport.progress):
            return clip_grad_norm_(
                engine.stages,
                engine.transport,
                max_norm,
                norm_type,
                error_if_nonfinite=error_if_nonfinite,
                uncounted=engine.ties.uncounted,
                unscaled=engine.ties.borrowed,
            )

    def broadcast(self, values: Any = None, *, rank: int | None = None) -> Any:
        """Share plain data of one rank with all, e.g. metrics of the outputs that the last stage returned.

        All ranks call it, and wait for that one.

        Args:
            values: numbers, text, tensors, or lists and mappings of them with text as keys; ignored on other ranks.
            rank: whose; by default that of the last stage.

        Returns:
            The values as plain data on every rank, with tensors as numbers or lists.
        """
        engine = self._engine
        engine.begin_call("broadcast()", settles=False)
        source = engine.schedule.placement.rank_of[-1] if rank is None else rank
        with engine.failures:
            return broadcast(values, source, engine.transport)

    def gather(self, values: Any) -> list[Any]:
        """Share plain data of every rank with all; returns what each has passed, in the order of ranks.

        All ranks call it, and wait for each other. Values are like those of ``broadcast``.
        """
        engine = self._engine
        engine.begin_call("gather()", settles=False)
        with engine.failures:
            return gather(values, engine.transport)

    def use(self, schedule: Schedule) -> None:
        """Switch to another schedule between two steps. All ranks call it with the same one, as they call ``step``.

        Stages, optimizers, gradients and connections stay as they are; all it costs is proving and compiling the new
        schedule, and a dry run if the number of microbatches changes. If any rank refuses it, all raise, and the
        current schedule stays in force.

        Args:
            schedule: a schedule with the same placement as ``pipe.schedule``, compute-only, or lowered for the same
                edges. Its number of microbatches may differ.

        Raises:
            StageError: the placement is another one, or ranks were given different schedules.
            EdgeError: it was lowered for other edges.
            VerificationError: it would not run on this transport.
        """
        self._engine.use(schedule)

    def state_dict(self, optimizer: Any = None) -> dict[str, Any]:
        """Return the state of this rank's stages for ``torch.distributed.checkpoint``. All ranks call it.

        Names are those of the unsplit model, so the state can be loaded on any layout. Stages that were made by hand
        and use one name for different parameters have ``stages.<index>.`` before it. A parameter that several stages
        hold has one name. Tensors are those of the pipeline, not copies.

        Args:
            optimizer: the optimizer of this rank, or a list of several, whose state is added.

        Returns:
            ``{"model": {name: tensor}}``, with an optimizer also ``{"optimizer": {"state": {name: {key: tensor}},
            "param_groups": {name: options}}}``, where options are pairs: what the parameter's group has.
        """
        engine = self._engine
        engine.begin_call("state_dict()")
        return collect_state(engine.stages.values(), engine.state_names(), optimizer)

    def load_state_dict(self, state: Mapping[str, Any], optimizer: Any = None) -> None:
        """Load this rank's stages with what ``state_dict`` has returned, on this layout or another one.

        Values are copied. The state may hold more than the stages of this rank. All ranks call it.

        Args:
            state: as ``state_dict`` returns it; a parameter with several names may have any of them.
            optimizer: the optimizer of this rank, or a list of several, to load as well.

        Raises:
            CheckpointError: a name is missing, or a shape differs; nothing has been changed then.
        """
        engine = self._engine
        engine.begin_call("load_state_dict()")
        restore_state(engine.stages.values(), engine.state_names(), state, optimizer)

    def register_custom_function(self, kind: ComputationType, function: CustomFunction) -> None:
        """Run your own function for every action of a type; see ``penstock.runtime.custom_functions``."""
        if not isinstance(kind, ComputationType):
            raise StageError(f"expected a ComputationType to register a function for, got {kind!r}")
        self._engine.custom_functions[kind] = function
        self._engine.programs.clear()

    def recording(self) -> Recording:
        """Measure steps: ``with pipe.recording() as record:``, on all ranks together; see ``Recording``."""
        return Recording(self._engine)

    @property
    def trace(self) -> Trace | None:
        """The trace of all steps, if there is one: ``pipe.trace.timeline()`` shows what happened in the last ones."""
        return self._engine.trace

    def close(self) -> None:
        """Validate the last steps of optimizers, wait for the last save, and release connections and threads.

        ``with Pipeline(...) as pipe:`` does so at its end.
        """
        engine = self._engine
        try:
            engine.settle()
            if engine.saves is not None:
                engine.saves.settle()
        finally:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and not isinstance(error, StepError):
            self.transport.fail(describe_failure(error, self.rank))  # or the others would wait for this rank
        if error is None:
            self.close()
        else:
            self._engine.close()

    def _check_keywords(self, call: str, kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments of the constructor, unless a stage has such an argument."""
        for name in _OF_CONSTRUCTOR.intersection(kwargs):
            if not any(name in signature(stage.module.forward).parameters for stage in self._engine.stages.values()):
                raise StageError(f"pass {name} to Pipeline(...), not to {call}")


def _transport(schedule: Schedule, group: dist.ProcessGroup | None, timeout: float) -> Transport:
    if dist.is_available() and dist.is_initialized():
        return DistributedTransport(group, timeout=timeout)
    check_schedule(schedule)
    if schedule.ranks == 1:
        return thread_transports(1)[0]
    raise StageError(
        f"the schedule is for {schedule.ranks} ranks, but there is no process group; start with "
        "'penstock run --ranks N script.py' or torchrun, and call torch.distributed.init_process_group"
    )
