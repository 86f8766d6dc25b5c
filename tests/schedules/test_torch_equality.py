"""The same compute order as the installed torch, for every size that it accepts."""

import pytest
from torch.distributed.pipelining import schedules as upstream

import penstock as ps
import torch_oracle

RANKS, STAGES, MICROBATCHES = range(1, 9), range(1, 5), range(1, 33)


def order(schedule):
    return [[str(action) for action in row if action is not None] for row in schedule.actions]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("Interleaved1F1B", STAGES),
        ("LoopedBFS", STAGES),
        ("InterleavedZeroBubble", STAGES),
        ("ZBVZeroBubble", [2]),
        ("DualPipeV", [2]),
        ("GPipe", [1]),
    ],
)
def test_generated_order(name, stages, ranks):
    compared = 0
    for stages_per_rank in stages:
        for microbatches in MICROBATCHES:
            try:
                theirs = torch_oracle.generated_order(name, ranks, microbatches, stages_per_rank)
            except ValueError:
                continue  # torch forbids this size; test_any_size.py has it
            ours = ps.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
            assert order(ours) == theirs, (ranks, stages_per_rank, microbatches)
            compared += 1
    assert compared >= 32 - 2 * ranks + 1


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("1F1B", upstream.Schedule1F1B),
        ("GPipe", upstream.ScheduleGPipe),
        ("ForwardOnly", upstream._ScheduleForwardOnly),
    ],
)
def test_executed_order(name, kind, ranks):
    """What step() calls; for 1F1B it is not what torch's own IR says."""
    first = ranks if name == "1F1B" else 1
    for microbatches in range(first, 33):
        theirs = torch_oracle.executed_order(kind, ranks, microbatches)
        assert order(ps.build(name, ranks=ranks, microbatches=microbatches)) == theirs, microbatches


def test_the_ir_of_torch_for_1f1b_is_wrong():
    """Why 1F1B is compared with step(): on the last rank torch's IR counts its microbatches from 1."""
    theirs = torch_oracle.generated_order("1F1B", 2, 2, 1)
    assert theirs[1] == ["1F1", "1B0", "1F2", "1B1"]
    assert order(ps.build("1F1B", ranks=2, microbatches=2))[1] == ["1F0", "1B0", "1F1", "1B1"]
