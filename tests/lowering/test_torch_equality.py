"""Every pass, and all of them together, give what the installed torch gives, action by action."""

import pytest
from torch.distributed.pipelining import schedules as upstream

import penstock as ps
import torch_oracle
from penstock.lowering.defer_receives import defer_receives
from penstock.lowering.merge_backward import merge_backward
from penstock.lowering.reduce_gradients import reduce_gradients
from penstock.lowering.send_receive import send_receive
from penstock.lowering.unshard_reshard import unshard_reshard
from penstock.schedules.registry import RECIPES


def ours(schedule):
    return [[str(action) for action in row] for row in schedule.actions]


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("Interleaved1F1B", [1, 2, 3, 4]),
        ("LoopedBFS", [1, 2, 3, 4]),
        ("InterleavedZeroBubble", [1, 2, 3, 4]),
        ("ZBVZeroBubble", [2]),
        ("DualPipeV", [2]),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("defer", [False, True])
def test_the_whole_lowering(name, stages, ranks, defer):
    """What torch's constructor makes of sizes that it accepts."""
    compared = 0
    for stages_per_rank in stages:
        for microbatches in (1, 2, 4, 5, 8, 12, 16):
            try:
                theirs = torch_oracle.instance(name, ranks, microbatches, stages_per_rank, lowered=True, defer=defer)
            except ValueError:
                continue
            schedule = ps.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
            lowered = ps.lower(schedule, defer_receives=defer)
            assert ours(lowered) == torch_oracle.text(theirs.pipeline_order_with_comms)
            compared += 1
    assert compared > 0


def compare_passes(schedule, max_active_stages):
    rank_of = schedule.placement.rank_of.__getitem__
    rows = torch_oracle.upstream_rows(schedule)
    merged = {rank: upstream._merge_bw(list(row)) for rank, row in rows.items()}
    assert ours(merge_backward(schedule)) == torch_oracle.text(merged)

    rows = {rank: upstream._add_unshard_reshard(row, max_active_stages) for rank, row in rows.items()}
    schedule = unshard_reshard(schedule, max_active_stages)
    assert ours(schedule) == torch_oracle.text(rows)

    rows = {rank: upstream._add_reduce_grad(row, schedule.microbatches) for rank, row in rows.items()}
    schedule = reduce_gradients(schedule)
    assert ours(schedule) == torch_oracle.text(rows)

    rows = upstream._add_send_recv({rank: list(row) for rank, row in rows.items()}, rank_of, schedule.stages)
    schedule = send_receive(schedule)
    assert ours(schedule) == torch_oracle.text(rows)

    rows = upstream._defer_recv_ops(rows, rank_of)
    assert ours(defer_receives(schedule)) == torch_oracle.text(rows)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.name != "ForwardOnly"], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("max_active_stages", [1, 2, 3, 4])
def test_pass_by_pass(recipe, max_active_stages):
    """Also for the schedules and sizes that torch has not: its passes take any order."""
    for ranks in (1, 2, 3, 5):
        for stages in (1, 2, 3, 5) if recipe.any_stages else [recipe.stages_per_rank]:
            for microbatches in (1, 2, 3, 7, 8):
                schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages)
                compare_passes(schedule, max_active_stages)


def test_a_grid_with_idle_steps_and_overlaps_of_three_stages():
    schedule = ps.Schedule.from_text("""
        0F0 . 0F1 1F0 2F0 . (1F1;2B0)OVERLAP_F_B . (2F1;1B0)OVERLAP_F_B 2I1 . 2W1 1I1 1W1 (0B0;0I1)OVERLAP_F_B 0W1
    """)
    for max_active_stages in (1, 2, 3):
        compare_passes(schedule, max_active_stages)
