"""Our CSV against the installed torch: it reads what we write, and we read what it writes."""

import logging

import pytest
from torch.distributed.pipelining import schedules as upstream

import penstock as ps
import torch_oracle


def runtime(ranks, stages_per_rank, microbatches):
    stage = torch_oracle.counting_stage(ranks, ranks * stages_per_rank)
    return upstream._PipelineScheduleRuntime([stage] * stages_per_rank, microbatches)


def as_text(rows):
    return [[None if action is None else str(action) for action in rows[rank]] for rank in sorted(rows)]


@pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [
        ("Interleaved1F1B", 3),
        ("LoopedBFS", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
def test_both_ways(tmp_path, name, stages_per_rank):
    theirs = torch_oracle.instance(name, 4, 8, stages_per_rank, lowered=True)
    for kind in ("compute_only", "compute_comms"):
        theirs._dump_csv(str(tmp_path / "theirs.csv"), format=kind)
        rows = theirs.pipeline_order if kind == "compute_only" else theirs.pipeline_order_with_comms
        schedule = ps.read(tmp_path / "theirs.csv")
        assert [[None if a is None else str(a) for a in row] for row in schedule.actions] == as_text(rows)
        assert schedule.lowered is (kind == "compute_comms")

        schedule.write(tmp_path / "ours.csv")
        assert (tmp_path / "ours.csv").read_bytes() == (tmp_path / "theirs.csv").read_bytes()

        again = runtime(4, stages_per_rank, 8)
        again._load_csv(str(tmp_path / "ours.csv"), format=kind)
        assert as_text(again.pipeline_order_with_comms) == as_text(theirs.pipeline_order_with_comms)


@pytest.mark.parametrize("name", ["ZB-H1", "ZB-H2", "V-Half", "V-Min", "GPipe", "1F1B"])
def test_torch_takes_the_schedules_that_it_does_not_have(tmp_path, name):
    """Its loader validates and lowers what we wrote."""
    logging.getLogger(upstream.__name__).setLevel(logging.ERROR)
    schedule = ps.build(name, ranks=4, microbatches=6)
    schedule.write(tmp_path / "ours.csv")
    loaded = runtime(4, schedule.stages // 4, 6)
    loaded._load_csv(str(tmp_path / "ours.csv"))
    assert as_text(loaded.pipeline_order) == [[str(action) for action in row] for row in schedule.actions]
    assert loaded.stage_index_to_group_rank == dict(enumerate(schedule.placement.rank_of))


def test_an_idle_row_of_one_cell(tmp_path):
    """The csv module writes a lone empty cell as two quotes."""
    (tmp_path / "it.csv").write_bytes(b'""\r\n0F0\r\n')
    with pytest.raises(ps.FormatError, match="rank 0 has no actions"):
        ps.read(tmp_path / "it.csv")
