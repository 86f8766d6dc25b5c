"""A step that a rank takes before it knows the gradients of all others, and undoes if they say otherwise.

"Zero Bubble Pipeline Parallelism" (Qi et al., 2023) calls this post-validation. A rank announces the norm of its
gradients, steps by those that it knows, and looks at the rest before it uses the parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from penstock.errors import RunError
from penstock.runtime.optimizers.backup import Backup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from penstock.runtime.optimizers.policy import Policy, Verdict
    from penstock.runtime.transport.protocol import Announcement


class _Gradient(NamedTuple):
    """A gradient that a step was taken with; the version shows whether it was modified."""

    parameter: torch.nn.Parameter
    tensor: torch.Tensor | None
    version: int


class Trial:
    """Steps an optimizer before it is known what to do, where that is likely to be right.

    Attributes:
        rollbacks: how many steps were undone.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter], policy: Policy
    ) -> None:
        """`parameters` are those of this rank, whose gradients count."""
        self.rollbacks = 0
        self._optimizer = optimizer
        self._parameters = parameters
        self._policy = policy
        self._backup = Backup(optimizer)
        self._gradients: Sequence[_Gradient] = ()
        self._announced: Announcement | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a step has yet to be validated."""
        return self._announced is not None

    def step(self, announced: Announcement) -> bool:
        """Step with the gradients as they are, if nothing that is known speaks against it; returns whether it did.

        It does not if all is known: then the step can be the right one. Functions that are called around a step would
        be called for one that is undone, so it does not if there are any.
        """
        known = announced.known()
        reports = [report for report in known if report is not None]
        if len(reports) == len(known) or not self._policy.judge(reports).is_plain or self._has_hooks():
            return False
        self._backup.take()
        self._gradients = [
            _Gradient(one, one.grad, 0 if one.grad is None else one.grad._version) for one in self._parameters
        ]
        self._announced = announced
        self._optimizer.step()
        return True

    def validate(self, apply: Callable[[Verdict], None]) -> Verdict:
        """Wait for what the step did not know; if it was not right, undo it and take the right one with `apply`."""
        assert self._announced is not None
        announced, self._announced = self._announced, None
        gradients, self._gradients = self._gradients, ()
        try:
            verdict = self._policy.judge(announced.collect())
        except BaseException:
            self._backup.restore()
            raise
        if not verdict.is_plain:
            self.rollbacks += 1
            self._backup.restore()
            self._redo(gradients, lambda: apply(verdict))
        return verdict

    def _redo(self, gradients: Sequence[_Gradient], apply: Callable[[], None]) -> None:
        """Take a step with the gradients and the options that it had."""
        for parameter, gradient, version in gradients:
            if gradient is not None and gradient._version != version:
                raise RunError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} was modified in place after "
                    "optimizer.step(), before the step was validated; drop gradients with optimizer.zero_grad(), or "
                    "call optimizer.validate() first"
                )
        present = [parameter.grad for parameter, *_ in gradients]
        self._backup.swap_options()
        try:
            for parameter, gradient, _ in gradients:
                parameter.grad = gradient
            apply()
        finally:
            self._backup.swap_options()
            for (parameter, *_), gradient in zip(gradients, present, strict=True):
                parameter.grad = gradient

    def _has_hooks(self) -> bool:
        return bool(
            self._optimizer._optimizer_step_pre_hooks
            or self._optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )
