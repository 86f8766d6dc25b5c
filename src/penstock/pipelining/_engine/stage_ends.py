"""The two ends of the drop-in's pipeline: they leave on stages and schedules what torch's leave there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch

from penstock.execution.autograd import gradient_edge
from penstock.execution.links import LastEnd
from penstock.pipelining._stage.forward import flat
from penstock.pipelining._stage.gradients import kept_gradients
from penstock.pipelining._stage.transfers import _normalize_model_output_as_tuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.autograd.graph import GradientEdge

    from penstock.execution.links import Give, GiveGradients, Take, TakeGradients
    from penstock.execution.step import Step
    from penstock.pipelining._engine.methods import CallConvention


class StageInputs:
    """The end of the first stage: the arguments of the step, whose gradients stay with the user's tensors."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""
        return lambda step: (step.args[microbatch], (), None)

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Show the gradients of the arguments in ``bwd_cache``."""
        stage = self._stage

        def give(step: Step, _gradients: object, _inputs: object) -> None:
            stage.bwd_cache[microbatch] = stage._agreed(kept_gradients(flat(step.args[microbatch], {})))

        return give


class StageLoss(LastEnd):
    """The end of the last stage: outputs and losses, where the schedule and the stage keep them.

    Args:
        stage: the last stage.
        calls: how the schedule calls it.
        trains: whether there are backwards.
        split: the microbatches whose backward is split: it may begin at a loss of any size.
    """

    def __init__(self, stage: Any, calls: CallConvention, *, trains: bool, split: Collection[int]) -> None:
        self._stage = stage
        self._calls = calls
        self._trains = trains
        self._split = split

    def give(self, microbatch: int) -> Give:
        """Keep an output, and compute its loss."""
        stage, trains = self._stage, self._trains
        keeps_all, computes_loss, is_only = not self._calls.saves_outputs, self._calls.computes_loss, stage.is_first

        def give(step: Any, output: Any) -> Sequence[GradientEdge]:
            schedule = step.schedule
            if keeps_all or step.return_outputs:
                # The output of an only stage keeps its history in torch.
                stage._keep_output(microbatch, output if is_only or not trains else _detached(output))
            if computes_loss:
                schedule._maybe_compute_loss(stage, output, step.targets, microbatch, step.loss_kwargs)
            return self._root(step, output, microbatch) if trains else ()

        return give

    def _root(self, step: Any, output: Any, microbatch: int) -> Sequence[GradientEdge]:
        schedule = step.schedule
        loss = schedule._maybe_get_loss(self._stage, microbatch)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            step.training_check.unrooted = loss, _normalize_model_output_as_tuple(output)
            return ()
        if self._stage._is_lost(loss, step.operands[1]):
            self._stage._check_trained(loss, (), has_inputs=False)
        step.living_losses.append(weakref.ref(loss))
        schedule._replace_loss(microbatch, loss.detach())  # a loss that is kept would keep its graph
        if loss.numel() == 1 or microbatch in self._split:
            step.seeds[microbatch] = (torch.ones_like(loss),)
        else:
            step.seeds[microbatch] = self._stage._loss_failure(loss, step.operands[1])
        return (gradient_edge(loss),)

    def take_gradients(self, microbatch: int) -> TakeGradients:
        """Get the gradient of the loss."""

        def take(step: Step) -> Sequence[torch.Tensor | None]:
            seed: Any = step.seeds.pop(microbatch, ())
            if isinstance(seed, Exception):
                raise seed
            return cast("Sequence[torch.Tensor | None]", seed)

        return take


def _detached(output: Any) -> Any:
    """Detach an output where the methods of a stage do: not in a dict, and not of a view."""
    if isinstance(output, torch.Tensor):
        return output if output.grad_fn is None or output._is_view() else output.detach()
    return type(output)(map(_detached, output)) if type(output) in (tuple, list) else output
