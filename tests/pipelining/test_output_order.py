"""Outputs and losses come in the order of the microbatches, in whichever order the last stage runs them."""

import pytest
import torch

from penstock.pipelining import PipelineStage
from penstock.pipelining.schedules import (
    FORWARD,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
)
from pipelining.contracts import CPU, OURS, WIDTH, Package, layers, numbers, summed, unsplit

pytestmark = pytest.mark.usefixtures("one_rank")

ROW = "0F0 0F1 0F2 1F2 1B2 1F0 1F1 1B0 1B1 0B2 0B1 0B0"
MICROBATCHES = 3


class FromOrder(PipelineScheduleMulti):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pipeline_order = Package(OURS).rows(ROW)


class Lowered(_PipelineScheduleRuntime):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._prepare_schedule_with_comms(Package(OURS).rows(ROW))


class WithFunction(Lowered):
    """With a function of the program for the forwards."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_custom_function(FORWARD, self.run_forward)

    def run_forward(self, action, context):
        stages, microbatch = {stage.stage_index: stage for stage in self._stages}, action.microbatch_index
        stage = stages[action.stage_index]
        output = stage.forward_one_chunk(microbatch, context.arg_mbs[microbatch], context.kwarg_mbs[microbatch])
        self._maybe_compute_loss(stage, output, context.target_mbs, microbatch)
        if not stage.is_last:
            stages[action.stage_index + 1].set_local_fwd_input(output, microbatch)


class Stage(PipelineStage):
    """One whose methods are called: it is not as we wrote it."""

    def forward_one_chunk(self, *args, **kwargs):
        return super().forward_one_chunk(*args, **kwargs)


@pytest.mark.parametrize("stage_class", [PipelineStage, Stage])
@pytest.mark.parametrize("schedule_class", [FromOrder, Lowered, WithFunction])
def test_an_order_of_the_program(schedule_class, stage_class):
    model, x, target = layers(2), numbers(1, 2 * MICROBATCHES, WIDTH), numbers(2, 2 * MICROBATCHES, WIDTH)
    expected = unsplit(model, x, target)
    stages = [stage_class(module, index, 2, CPU) for index, module in enumerate(model)]
    schedule = schedule_class(stages, MICROBATCHES, loss_fn=summed, scale_grads=False)
    for run in (schedule.step, schedule.eval, schedule.step):
        losses = []
        torch.testing.assert_close(run(x, target=target, losses=losses), expected.output)
        torch.testing.assert_close(torch.cat(stages[-1].output_chunks), expected.output)
        for loss, output, part in zip(losses, expected.output.chunk(3), target.chunk(3), strict=True):
            torch.testing.assert_close(loss, summed(output, part))


class Backwards(PipelineScheduleSingle):
    """A schedule of the program, which runs the last microbatch first."""

    def _step_microbatches(
        self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, return_outputs=True, loss_kwargs=None
    ):
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0])
        for microbatch in reversed(range(self._n_microbatches)):
            self._stage.forward_one_chunk(microbatch, arg_mbs[microbatch], kwarg_mbs[microbatch])


def test_a_schedule_of_the_program():
    model, x = layers(1), numbers(1, 2 * MICROBATCHES, WIDTH)
    stage = PipelineStage(model[0], 0, 1, CPU)
    torch.testing.assert_close(Backwards(stage, MICROBATCHES).step(x), model[0](x))
