"""Refuses a step that leaves stages untrained although they have something to train.

torch goes on in such a step, and the gradients stay None. A schedule whose ``allow_untrained`` is True does so, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.execution.autograd import needs_gradient
from penstock.pipelining._stage.messages import StageMessages
from penstock.pipelining._utils import InferenceMode, flatten_args

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CUT_OFF: Final = (
    "is its output detached, or computed under no_grad or by reentrant checkpointing of an input that requires no grad "
    "(use_reentrant=False)?"
)
_INTENDED: Final = "set schedule.allow_untrained = True if it is intended"


class TrainingCheck(StageMessages):
    """A stage that checks, where no backward can begin, whether one should.

    An earlier stage is checked in the first step only: it may leave out its layers in a later one, e.g. by stochastic
    depth.
    """

    _allows_untrained = False
    #: How many steps with backwards have begun.
    _training_steps = 0
    #: How many microbatches of this step gave nothing that requires a gradient.
    _without_root = 0
    #: Whether a stage before this one had something to train when the stages voted.
    _is_trained_before = False
    #: Whether no stage up to this one had.
    _trains_nothing = False

    def clear_runtime_states(self) -> None:
        """Begin a step: forget the one before."""
        super().clear_runtime_states()
        self._without_root = 0
        self._training_steps += self._has_backward

    def _note_training(self, before: bool, microbatches: Iterable[Any]) -> bool:
        """Note whether a stage before this one has something to train; return whether one up to this one has.

        Args:
            before: whether one before has.
            microbatches: what the microbatches of this stage are called with.
        """
        module: Any = self.submod
        mine = (
            not isinstance(module, torch.nn.Module)  # a stand-in, of which nothing is known
            or self.dw_builder is not None
            or _has_parameters(module)
            or any(map(needs_gradient, flatten_args(list(microbatches))))
        )
        self._is_trained_before, self._trains_nothing = before, not (before or mine)
        return before or mine

    def _check_trained(self, loss: Any, outputs: Sequence[Any], has_inputs: bool) -> None:
        """Refuse a microbatch without a root for its backward, if there should be one.

        Args:
            loss: its loss, for the last stage.
            outputs: what the stage returned.
            has_inputs: whether an input that it received requires a gradient.
        """
        if self._allows_untrained or self.dw_builder or (self.is_last and not isinstance(loss, torch.Tensor)):
            return
        self._without_root += 1
        has_parameters = isinstance(self.submod, torch.nn.Module) and _has_parameters(self.submod)
        # By examples, inputs require a gradient even if nothing before is trained.
        by_examples = getattr(self, "_inference_mode", None) == InferenceMode.STATIC and not self._is_trained_before
        has_inputs = has_inputs and not self.is_first and not by_examples
        if self.is_last:
            self._refuse_loss(outputs, has_parameters, has_inputs)
        elif (has_parameters or has_inputs) and self._training_steps <= 1 and self._without_root == self.chunks:
            cut, lost = (
                ("parameters", "they are not trained")
                if has_parameters
                else ("inputs", "the stages before it are not trained")
            )
            raise RuntimeError(
                f"stage {self.stage_index} has {cut} that require grad, but its output does not, so {lost}: "
                f"{_CUT_OFF} Freeze parameters that are not to be trained, or {_INTENDED}"
            )

    def _refuse_loss(self, outputs: Sequence[Any], has_parameters: bool, has_inputs: bool) -> None:
        if any(map(needs_gradient, outputs)):
            raise RuntimeError(
                f"stage {self.stage_index}: the loss does not require grad, although the output of the last stage "
                f"does; does loss_fn detach it, call .item() or run under no_grad? Or {_INTENDED}"
            )
        if has_parameters or has_inputs:
            what = "parameters" if has_parameters else "inputs"
            raise RuntimeError(
                f"stage {self.stage_index}: neither the output of the last stage nor the loss requires grad, although "
                f"{what} of the stage do, so nothing is trained: {_CUT_OFF} Or {_INTENDED}"
            )
        if self._without_root == self.chunks:
            raise RuntimeError(
                f"stage {self.stage_index}: the loss does not require grad, so the step trains nothing; is every "
                f"parameter frozen? Call eval() if you only need losses, or {_INTENDED}"
            )

    def _is_lost(self, loss: torch.Tensor, received: Iterable[Any]) -> bool:
        """Whether a loss requires a gradient only because examples say so of what was received.

        The loss function may have parameters of its own.
        """
        if not self._trains_nothing or self._allows_untrained or self._training_steps > 1:
            return False
        return _leaves_of(loss) <= {id(value) for value in received}


def _has_parameters(module: torch.nn.Module) -> bool:
    return any(one.requires_grad for one in module.parameters())


def _leaves_of(tensor: torch.Tensor) -> set[int]:
    """Find the identities of the leaves that a tensor was computed from."""
    if tensor.is_leaf:
        return {id(tensor)}
    leaves, seen, left = set(), set(), [tensor.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        left += [following for following, _ in node.next_functions]
    return leaves
