"""The optimizer of a training script: one object for all stages of this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import RunError, StageError
from penstock.runtime.grad_clipping import parameters_of, report_norm, scale_gradients, without
from penstock.runtime.optimizers.agreement import make_together
from penstock.runtime.optimizers.backup import check_reversible
from penstock.runtime.optimizers.making import Kind, make_optimizer, name_group
from penstock.runtime.optimizers.policy import Policy
from penstock.runtime.optimizers.trial import Trial

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from penstock.runtime.optimizers.groups import GivenGroups
    from penstock.runtime.optimizers.making import Made
    from penstock.runtime.optimizers.policy import Verdict
    from penstock.runtime.pipeline import Pipeline
    from penstock.runtime.transport.protocol import Announcement


class Optimizer(torch.optim.Optimizer):
    """Steps the parameters of all stages of this rank. All ranks make it together, also one without stages.

    >>> import penstock as ps
    >>> from penstock.runtime import Pipeline
    >>> schedule = ps.build("LoopedBFS", ranks=1, microbatches=2, stages_per_rank=2)
    >>> layers = {0: torch.nn.Linear(4, 4), 1: torch.nn.Linear(4, 4)}
    >>> pipe = Pipeline(layers, schedule, loss_fn=torch.nn.functional.mse_loss)
    >>> groups = {"*bias": {"weight_decay": 0.0}}
    >>> optimizer = Optimizer(pipe, torch.optim.AdamW, lr=1e-3, groups=groups, max_norm=1.0)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    >>> _ = pipe.step(torch.ones(6, 4), target=torch.zeros(6, 4))
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> scheduler.step()
    >>> optimizer.grad_norm > 0, [group["weight_decay"] for group in optimizer.param_groups]
    (True, [0.01, 0.0])

    It wraps one of torch's optimizers, and has its parameter groups, state and hooks; learning rate schedulers and
    gradient scalers take it as they take that one. The names of parameters are in the groups, as ``param_names``.

    Args:
        pipe: the pipeline.
        kind: the class, e.g. ``torch.optim.AdamW``, or a function that makes an optimizer of groups and options; or an
            optimizer that exists.
        groups: the parameters that get options of their own: ``{"*.bias": {"weight_decay": 0.0}}``, by pattern of
            their names, or pairs ``(function, options)`` with a function of name and parameter. The first that fits
            counts; what none fits is the first group. A tied parameter has the name of its first holder.
        max_norm: scale the gradients of a step down to this norm, over all stages, as ``pipe.clip_grad_norm_`` does.
        norm_type: the order of the norm.
        skip_nonfinite: leave out a step, on all ranks, if the norm of all gradients is not a finite number.
        post_validate: do not wait for the gradients of other ranks before a step, but before the parameters are used
            next; undo the step if it turns out that gradients must be clipped or the step skipped. The result is the
            same. It takes memory for a copy of the parameters and of what the optimizer keeps, which must be one of
            torch's. Call ``validate`` before you read parameters yourself.
        **options: the options of all groups, e.g. ``lr=1e-3``.

    Attributes:
        wrapped: torch's optimizer.
    """

    def __init__(
        self,
        pipe: Pipeline,
        kind: Kind | torch.optim.Optimizer,
        *,
        groups: GivenGroups | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        skip_nonfinite: bool = False,
        post_validate: bool = False,
        **options: Any,
    ) -> None:
        # Not the constructor of the base class: what that sets up is the wrapped optimizer's.
        engine = pipe._engine
        engine.begin_call("Optimizer(...)")

        def make() -> Made:
            policy = Policy.read(max_norm, norm_type, skip_nonfinite)
            made = make_optimizer(engine, kind, groups, options, policy)
            if post_validate:
                _check_post_validation(made)
            return made

        made = make_together(make, engine)
        self.wrapped = made.optimizer
        self._engine = engine
        self._policy = made.policy
        self._verdict: Verdict | None = None
        self._members = sorted(set(engine.schedule.placement.rank_of))
        self._trial: Trial | None = None
        # Threads that share a tied parameter would see it before the step is validated.
        if post_validate and not engine.ties.has_borrowed:
            self._trial = Trial(made.optimizer, parameters_of(engine.stages), made.policy)
            engine.settlers.append(self.validate)

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients at the last step, before it was clipped.

        It is None without ``max_norm`` and ``skip_nonfinite``, and on a rank without stages.
        """
        self.validate()
        return None if self._verdict is None else self._verdict.norm

    @property
    def skipped(self) -> bool:
        """Whether the last step was left out, because the norm of the gradients was not finite."""
        self.validate()
        return self._verdict is not None and self._verdict.skips

    @property
    def rollbacks(self) -> int:
        """How many steps of this rank were undone, because gradients of other ranks changed what to do."""
        self.validate()
        return 0 if self._trial is None else self._trial.rollbacks

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it does not evaluate the model
        """Update the parameters. All ranks call it; a rank that has no stages may."""
        if closure is not None:
            raise RunError("step() takes no closure; call pipe.step(...) first, and then step()")
        engine = self._engine
        engine.begin_call("optimizer.step()")
        with engine.counter.count(engine.transport.progress), engine.failures:
            if not (self._policy.needs_norm and engine.stages):
                self.wrapped.step()
                return
            announced = self._announce_norm()
            # After one step that was clipped or skipped, the next one is likely to be as well.
            is_likely_plain = self._verdict is None or self._verdict.is_plain
            if self._trial is not None and is_likely_plain and self._trial.step(announced):
                return
            self._verdict = self._policy.judge(announced.collect())
            self._apply(self._verdict)

    def validate(self) -> None:
        """Wait until the last step is known to be right, or undo it and take the right one.

        Calls of the pipeline, and of this optimizer, do so by themselves.
        """
        engine, trial = self._engine, self._trial
        if trial is not None and trial.is_pending:
            engine.transport.progress.call = "optimizer.step()"
            with engine.counter.count(engine.transport.progress), engine.failures, torch.no_grad():
                self._verdict = trial.validate(self._apply)

    def _announce_norm(self) -> Announcement:
        engine, ties = self._engine, self._engine.ties
        parameters = parameters_of(engine.stages)
        report = report_norm(without(parameters, ties.uncounted), parameters, self._policy.norm_type)
        return engine.transport.announce("norm", report, self._members)

    def _apply(self, verdict: Verdict) -> None:
        if verdict.factor is not None:
            engine = self._engine
            scale_gradients(without(parameters_of(engine.stages), engine.ties.borrowed), verdict.factor)
        if not verdict.skips:
            self.wrapped.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or set them to zero."""
        if not set_to_none:
            self.validate()  # which may need them
        self.wrapped.zero_grad(set_to_none)

    # What the wrapped optimizer has ---------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # loading a state replaces the list
        """The groups of parameters, with their options."""
        return self.wrapped.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # loading a state replaces it
        """What the optimizer keeps for each parameter."""
        self.validate()
        return self.wrapped.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # they are the wrapped optimizer's
        """The options of a group that does not say otherwise."""
        return self.wrapped.defaults

    def state_dict(self) -> dict[str, Any]:
        """Get the state and the options, as torch does."""
        self.validate()
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state and the options of ``state_dict``."""
        self.validate()
        self.wrapped.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of this rank's stages."""
        self.validate()
        has_names = any("param_names" in group for group in self.param_groups)
        self.wrapped.add_param_group(name_group(param_group, self._engine) if has_names else param_group)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Call a function before each step: after gradients were clipped, and not if the step is skipped."""
        return self.wrapped.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Call a function after each step."""
        return self.wrapped.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call a function before ``state_dict``."""
        return self.wrapped.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call a function after ``state_dict``."""
        return self.wrapped.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call a function before ``load_state_dict``."""
        return self.wrapped.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call a function after ``load_state_dict``."""
        return self.wrapped.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> dict[str, Any]:
        raise RunError("an optimizer of a pipeline cannot be pickled or copied; use its state_dict()")

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.wrapped!r}"


def _check_post_validation(made: Made) -> None:
    """Refuse post-validation where there is nothing to validate, or a step could not be undone."""
    if not made.policy.needs_norm:
        raise StageError(
            "post_validate=True needs max_norm or skip_nonfinite=True: without them no step waits for other ranks"
        )
    check_reversible(made.optimizer)
