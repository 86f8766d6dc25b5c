"""Mistakes that torch leaves to a hang, to an error elsewhere, or to silence raise an error that explains them."""

import pytest
import torch

from penstock.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from penstock.pipelining._stage.announcement import decode
from penstock.pipelining._utils import PipeliningMetadataError
from pipelining.contracts import CPU, WIDTH, averaged, fake_group, layers, numbers


@pytest.mark.parametrize(
    ("kind", "mine", "message"),
    [
        (ScheduleZBVZeroBubble, [0, 2], r"holds stages \[0, 2\], but its schedule runs stages \[0, 3\]"),
        (ScheduleInterleaved1F1B, [0, 3], r"holds stages \[0, 3\], but its schedule runs stages \[0, 2\]"),
    ],
)
def test_stages_of_another_placement_are_refused_before_anybody_waits(kind, mine, message):
    with fake_group(ranks=2):
        stages = [PipelineStage(torch.nn.Linear(WIDTH, WIDTH), stage, 4, CPU) for stage in mine]
        schedule = kind(stages, 4, loss_fn=averaged)
        with pytest.raises(AssertionError, match=message):
            schedule.step(numbers(1, 8, WIDTH))


def test_a_warning_says_that_microbatches_of_different_sizes_count_alike():
    with fake_group():
        stage = PipelineStage(layers(1)[0], 0, 1, CPU)
        x, target = numbers(1, 7, WIDTH), numbers(2, 7, WIDTH)
        with pytest.warns(UserWarning, match="microbatches have 2, 2, 2, 1 samples but equal weight"):
            Schedule1F1B(stage, 4, loss_fn=averaged).step(x, target=target)
        Schedule1F1B(stage, 4, loss_fn=averaged, scale_grads=False).step(x, target=target)


def test_losses_without_a_loss_function_are_explained():
    with fake_group():
        stage = PipelineStage(layers(1)[0], 0, 1, CPU)
        with pytest.raises(RuntimeError, match="Expecting 2 losses but got 0; the schedule has no loss_fn"):
            ScheduleGPipe(stage, 2).step(numbers(1, 4, WIDTH), losses=[])


def test_one_stage_in_place_of_a_list_is_reported():
    with fake_group(), pytest.raises(TypeError, match=r"must be a list of the stages of this rank.*write \[stage\]"):
        ScheduleInterleaved1F1B(PipelineStage(layers(1)[0], 0, 1, CPU), 2)


def test_a_peer_that_ends_while_shapes_are_agreed_is_not_taken_for_another_version():
    def receive(_tensor):
        raise RuntimeError("[/build/gloo/transport/tcp/pair.cc:537] Connection closed by peer. Check the logs.")

    with pytest.raises(
        PipeliningMetadataError, match=r"failed or exited, check its output \(Connection closed by peer\)$"
    ) as raised:
        decode(receive)
    assert "version" not in str(raised.value)


def test_a_failure_of_one_stage_per_rank_names_the_stage(caplog):
    class Failing(torch.nn.Module):
        def forward(self, x):
            raise ValueError("broken")

    example = (numbers(1, 2, WIDTH),)
    with fake_group():
        stage = PipelineStage(Failing(), 0, 1, CPU, input_args=example, output_args=example)
        schedule = ScheduleGPipe(stage, 2)
        with pytest.raises(RuntimeError, match="broken"):
            schedule.step(numbers(1, 4, WIDTH))
    assert "rank 0: ScheduleGPipe of stage 0 failed" in caplog.text


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_a_loss_that_is_detached_is_refused(kind):
    with fake_group():
        stage = PipelineStage(layers(1)[0], 0, 1, CPU)
        stages = [stage] if kind is ScheduleInterleaved1F1B else stage
        schedule = kind(stages, 2, loss_fn=lambda output, target: averaged(output.detach(), target))
        with pytest.raises(RuntimeError, match="the loss does not require grad"):
            schedule.step(numbers(1, 4, WIDTH), target=numbers(2, 4, WIDTH))


def test_a_detached_loss_is_refused_in_halves_too():
    with fake_group():
        stages = [PipelineStage(layers(1)[0], index, 2, CPU) for index in range(2)]
        schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=lambda y, target: averaged(y.detach(), target))
        with pytest.raises(RuntimeError, match="the output of the last stage does; does loss_fn detach it"):
            schedule.step(numbers(1, 4, WIDTH), target=numbers(2, 4, WIDTH))


def test_a_batch_that_is_too_small_is_reported():
    with fake_group(), pytest.raises(ValueError, match="Expecting 4 arg_mbs but got 2: a batch needs at least one"):
        ScheduleGPipe(PipelineStage(layers(1)[0], 0, 1, CPU), 4, loss_fn=averaged).step(numbers(1, 2, WIDTH))
