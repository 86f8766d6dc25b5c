"""Measures the two halves of a backward through a PipelineStage, called as by a schedule."""

from __future__ import annotations

from time import thread_time
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode

from penstock.pipelining import PipelineStage as OurStage
from penstock.pipelining._utils import InferenceMode as OurInferenceMode
from runtime_parts.allocations import mark
from runtime_parts.splitting import Halves

if TYPE_CHECKING:
    from torch import nn

#: Of a step.
MICROBATCHES = 8


class StageHalves:
    """The middle stage of three, which gets its input and its gradient from this rank."""

    def __init__(self, kind: Any, mode: Any, *, whole: bool = False) -> None:
        self.kind, self.mode, self.whole = kind, mode, whole
        self.module: nn.Module | None = None
        self.microbatch = 0

    def prepare(self, module: nn.Module, x: torch.Tensor) -> Any:
        """Create a stage of this module that knows its shapes, once."""
        if module is not self.module:
            sample = x.detach().requires_grad_()
            stage = self.kind(module, 1, 3, torch.device("cpu"), input_args=sample, output_args=module(sample))
            stage.has_backward, stage._inference_mode = True, self.mode.STATIC
            stage._prepare_forward_infra(MICROBATCHES, None, has_backward=True)
            stage._prepare_backward_infra(MICROBATCHES)
            self.module, self.stage, self.microbatch = module, stage, 0
        return self.stage

    def __call__(self, module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Halves:
        """Run one microbatch."""
        stage, microbatch = self.prepare(module, x), self.microbatch
        if microbatch == 0:
            stage.clear_runtime_states()  # a step begins
        self.microbatch = (microbatch + 1) % MICROBATCHES
        stage.set_local_fwd_input(x, microbatch)
        begin = thread_time()
        stage.forward_one_chunk(microbatch, ())
        forwarded = thread_time()
        stage.set_local_bwd_input((gradient,), microbatch)
        stage.backward_one_chunk(microbatch, full_backward=self.whole)
        stage.get_local_bwd_output(microbatch)
        halfway = thread_time()
        if not self.whole:
            stage.backward_weight_one_chunk(microbatch)
        return Halves(forwarded - begin, halfway - forwarded, thread_time() - halfway)


def of_torch() -> StageHalves:
    """Torch's stage."""
    return StageHalves(PipelineStage, InferenceMode)


def of_ours() -> StageHalves:
    """Ours."""
    return StageHalves(OurStage, OurInferenceMode)


def of_ours_whole() -> StageHalves:
    """Run ours, with a full backward."""
    return StageHalves(OurStage, OurInferenceMode, whole=True)


#: The ways with a stage around them.
WAYS = {"whole": of_ours_whole, "torch": of_torch, "ours": of_ours}

#: Prepared in a first run, which does not count.
_PREPARED = of_ours()


def marked(module: nn.Module, x: torch.Tensor) -> None:
    """Run F, I and W of our stage, with marks in the trace of allocations."""
    stage = _PREPARED.prepare(module, x)
    stage.clear_runtime_states()
    stage.set_local_fwd_input(x, 0)
    stage.forward_one_chunk(0, ())
    mark("F")
    stage.set_local_bwd_input((x.detach(),), 0)
    stage.backward_one_chunk(0, full_backward=False)
    stage.get_local_bwd_output(0)
    mark("I")
    stage.backward_weight_one_chunk(0)
