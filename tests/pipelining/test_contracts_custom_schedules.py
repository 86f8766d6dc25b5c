"""Schedules that users write: subclasses with an order of their own, on two ranks."""

from itertools import product

import pytest
import torch

from pipelining.contracts import (
    CPU,
    OURS,
    UPSTREAM,
    WIDTH,
    Package,
    assert_gradients,
    layers,
    no_tensors_in_cycles,
    numbers,
    step_arguments,
    summed,
    unsplit,
)

BATCH = 8


def order_of(package, kind):
    """An order, by the name of the base class and of the attribute that holds it, and the stages of each rank."""
    return {
        "v": ("PipelineScheduleMulti", "pipeline_order", [[0, 3], [1, 2]], 1, package.rows(
            "0F0 . . 3F0 3B0 . . 0B0",
            ". 1F0 2F0 . . 2B0 1B0 .",
        )),
        "unbalanced": ("PipelineScheduleMulti", "pipeline_order", [[0, 1, 4], [2, 3]], 1, package.rows(
            "0F0 1F0 . . 4F0 4B0 . . 1B0 0B0",
            ". . 2F0 3F0 . . 3B0 2B0 . .",
        )),
        "halves": ("PipelineScheduleMulti", "pipeline_order", [[0, 2], [1, 3]], 2, package.rows(
            "0F0 0F1 2F0 2F1 . 2I0 2W0 0I0 2I1 0W0 0I1 2W1 0W1",
            ". 1F0 1F1 3F0 3I0 3F1 1I0 3I1 3W0 1I1 1W0 3W1 1W1",
        )),
        "reordered": ("_PipelineScheduleRuntime", "pipeline_order_with_comms", [[0], [1]], 2, package.rows(
            "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
        )),
        "lowered v": ("_PipelineScheduleRuntime", None, [[0, 3], [1, 2]], 2, package.rows(
            "0F0 0F1 . . 3F0 3B0 3F1 3B1 0B0 0B1",
            ". 1F0 2F0 1F1 2F1 . 2B0 1B0 2B1 1B1",
        )),
        "lowered pairs": ("_PipelineScheduleRuntime", None, [[0, 3], [1, 2]], 2, package.rows(
            "0F0 0F1 3F0 (3F1;3I0)OVERLAP_F_B 3W0 3B1 0B0 0B1",
            "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
        )),
    }[kind]  # fmt: skip


def custom(package, kind, stages, **options):
    """A subclass as users write it: the order is made in the constructor."""
    base, attribute, _, microbatches, order = order_of(package, kind)

    class Custom(getattr(package.schedules, base)):
        def __init__(self, stages, n_microbatches, loss_fn=None, scale_grads=True):
            super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
            if kind == "halves":
                self.use_full_backward = False
            if attribute is None:
                self.pipeline_order = order
                self._prepare_schedule_with_comms(order)
            else:
                setattr(self, attribute, order)
            if attribute == "pipeline_order":
                self._validate_and_set_stage_mapping(self.pipeline_order)

    return Custom(stages, microbatches, **options)


def train(rank, ranks, name, kind, *, group):
    package = Package(name)
    _, _, placement, microbatches, _ = order_of(package, kind)
    model = layers(sum(map(len, placement)))
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    expected = unsplit(model, x, target)
    stages = [
        package.stage.PipelineStage(model[index], index, len(model), CPU, group=group) for index in placement[rank]
    ]
    schedule = custom(package, kind, stages, loss_fn=summed, scale_grads=False)
    with no_tensors_in_cycles():
        for _ in range(3):
            model.zero_grad()
            losses = []
            args, kwargs = step_arguments(stages, x, target, losses)
            output = schedule.step(*args, **kwargs)
    if any(stage.is_last for stage in stages):
        torch.testing.assert_close(output, expected.output)
        torch.testing.assert_close(sum(losses), expected.loss)
        assert len(losses) == microbatches
    else:
        assert output is None
    assert_gradients(model, placement[rank], expected.gradients)
    return "right"


KINDS = ["halves", "reordered", "lowered v", "lowered pairs"]
NEIGHBOURS = ["v", "unbalanced"]
"""In these, torch's ``PipelineScheduleMulti`` sends to its own rank, which only NCCL can do; ours hands over."""


@pytest.mark.parametrize(
    ("name", "kind"), [*product([UPSTREAM], KINDS), *product([OURS], [*KINDS, *NEIGHBOURS])], ids=lambda each: each
)
def test_an_order_of_ones_own_trains(workers, name, kind):
    assert workers.run(train, name, kind, ranks=2) == ["right"] * 2


def from_file(rank, ranks, name, kind, file, *, group):
    """The order is in a file, with communication or without; the schedule is the plain class."""
    package = Package(name)
    model = layers(4)
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    expected = unsplit(model, x, target)
    placement = [[0, 3], [1, 2]][rank]
    stages = [package.stage.PipelineStage(model[index], index, 4, CPU, group=group) for index in placement]
    schedule = package.schedules._PipelineScheduleRuntime(stages, 2, loss_fn=summed, scale_grads=False)
    schedule._load_csv(file, format=kind)
    args, kwargs = step_arguments(stages, x, target, [])
    schedule.step(*args, **kwargs)
    assert_gradients(model, placement, expected.gradients)
    return schedule.stage_index_to_group_rank


V_COMPUTE = "0F0,0F1,,,3F0,3B0,3F1,3B1,0B0,0B1\n,1F0,2F0,1F1,2F1,,2B0,1B0,2B1,1B1\n"
V_COMMUNICATION = (
    "0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,3RECV_F1,3F1,3B1,3SEND_B1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,2F0,2SEND_F0,1RECV_F1,1F1,2F1,2SEND_F1,2RECV_B0,2B0,1B0,1SEND_B0,2RECV_B1,2B1,1B1,1SEND_B1\n"
)


@pytest.mark.parametrize(("kind", "rows"), [("compute_only", V_COMPUTE), ("compute_comms", V_COMMUNICATION)])
def test_an_order_from_a_file_trains(package, workers, tmp_path, kind, rows):
    file = tmp_path / "v.csv"
    file.write_text(rows)
    found = workers.run(from_file, package.name, kind, str(file), ranks=2)
    assert found == [{0: 0, 1: 1, 2: 1, 3: 0}] * 2


def single(rank, ranks, name, *, group):
    """A schedule of one stage whose step is written anew: last microbatch first, as its author wants it."""
    package = Package(name)
    s = package.schedules

    class Backwards(s.PipelineScheduleSingle):
        def _step_microbatches(
            self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, return_outputs=True, loss_kwargs=None
        ):
            arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            self._initialize_stage(arg_mbs[0], kwarg_mbs[0], target_mbs and target_mbs[0], loss_kwargs)
            stage, works = self._stage, []
            for microbatch in range(self._n_microbatches):
                for work in s._sorted_batch_p2p(stage.get_fwd_recv_ops(microbatch), desc="fwd_recv").values():
                    s._wait_batch_p2p(work)
                output = stage.forward_one_chunk(microbatch, arg_mbs[microbatch], kwarg_mbs[microbatch])
                works += s._sorted_batch_p2p(stage.get_fwd_send_ops(microbatch), desc="fwd_send").values()
                self._maybe_compute_loss(stage, output, target_mbs, microbatch, loss_kwargs)
            for microbatch in reversed(range(self._n_microbatches)):
                for work in s._sorted_batch_p2p(stage.get_bwd_recv_ops(microbatch), desc="bwd_recv").values():
                    s._wait_batch_p2p(work)
                loss = self._maybe_get_loss(stage, microbatch)
                stage.backward_one_chunk(microbatch, loss=loss, last_backward=microbatch == 0)
                works += s._sorted_batch_p2p(stage.get_bwd_send_ops(microbatch), desc="bwd_send").values()
            for work in works:
                s._wait_batch_p2p(work)
            self._update_losses(stage, losses)
            stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)

    model = layers(2)
    x, target = numbers(1, BATCH, WIDTH), numbers(2, BATCH, WIDTH)
    expected = unsplit(model, x, target)
    stage = package.stage.PipelineStage(model[rank], rank, 2, CPU, group=group)
    schedule = Backwards(stage, 4, loss_fn=summed, scale_grads=False)
    assert schedule.pipeline_order is None
    for _ in range(2):
        model.zero_grad()
        losses = []
        args, kwargs = step_arguments([stage], x, target, losses)
        schedule.step(*args, **kwargs)
    assert_gradients(model, [rank], expected.gradients)
    return sum(losses).item() if rank else None


def test_a_step_that_is_written_anew_trains(package, workers):
    first, last = workers.run(single, package.name, ranks=2)
    assert first is None
    assert last > 0
