"""Rows of actions beside those of the installed torch, and their picture."""

import io
from contextlib import redirect_stdout
from types import SimpleNamespace

import matplotlib
import pytest
import torch.distributed.pipelining._schedule_visualizer as upstream

from penstock.pipelining import _schedule_visualizer as ours
from penstock.pipelining.schedules import PipelineScheduleMulti, ScheduleGPipe, ScheduleInterleaved1F1B, _Action

SINGLE = ["GPipe", "1F1B"]
MULTI = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
STAGE = SimpleNamespace(submod=None, stage_index=0, num_stages=2, group_size=2, group_rank=0, group=None)
SIZES = [(2, 4), (3, 8), (4, 8)]
#: Where torch defers a receive behind one that would then get its message.
OTHER_ORDER = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def rows(module, *args, **settings):
    """The rows as text, or the types of the error."""
    try:
        with redirect_stdout(io.StringIO()):
            return [list(map(str, row)) for row in module.get_schedule_ops(*args, **settings)]
    except Exception as error:
        return type(error).__mro__


def same(found, expected):
    return found == expected or (isinstance(expected, tuple) and expected[0] in found)


@pytest.mark.parametrize("name", ["GPipe", *MULTI])
@pytest.mark.parametrize("stages", [None, 1, 2, 3])
def test_rows_are_those_of_torch(name, stages):
    for ranks, microbatches in SIZES:
        found = rows(ours, name, ranks, microbatches, stages)
        assert same(found, rows(upstream, name, ranks, microbatches, stages))


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("deferred", [False, True])
def test_rows_with_communication_are_those_of_torch(name, deferred):
    for ranks, microbatches in SIZES[:2]:
        settings = {"with_comms": True, "defer_pp_recv": deferred}
        found, expected = (rows(module, name, ranks, microbatches, **settings) for module in (ours, upstream))
        if deferred and name in OTHER_ORDER:
            found, expected = (list(map(sorted, each)) for each in (found, expected))
        assert same(found, expected)


@pytest.mark.parametrize("name", [name for name in MULTI if name != "ZBVZeroBubble"])
def test_spaced_rows_are_those_of_torch(name):
    for ranks, microbatches in SIZES:
        found = rows(ours, name, ranks, microbatches, add_spacing=True)
        assert same(found, rows(upstream, name, ranks, microbatches, add_spacing=True))


def stages_of(row):
    return {_Action.from_str(text).stage_index for text in row if text != "None"}


def test_torch_draws_actions_on_another_rank_when_the_first_has_ended():
    found, wrong = (rows(module, "ZBVZeroBubble", 2, 4, add_spacing=True) for module in (ours, upstream))
    assert [stages_of(row) for row in found] == [{0, 3}, {1, 2}]
    assert [stages_of(row) for row in wrong] != [{0, 3}, {1, 2}]


def test_torch_counts_the_microbatches_of_the_last_rank_from_one():
    assert rows(ours, "1F1B", 2, 2)[1] == ["1F0", "1B0", "1F1", "1B1", "1REDUCE_GRAD"]
    assert rows(upstream, "1F1B", 2, 2)[1] == ["1F1", "1B0", "1F2", "1B1", "1REDUCE_GRAD"]


def test_ours_draws_schedules_with_one_stage_on_a_rank_too():
    assert rows(ours, "1F1B", 2, 2, add_spacing=True) == [
        ["0F0", "0F1", "None", "None", "0B0", "None", "0B1"],
        ["None", "1F0", "1B0", "1F1", "1B1", "None"],
    ]
    assert rows(ours, "GPipe", 2, 1, with_comms=True) == [
        ["0UNSHARD", "0F0", "0SEND_F0", "0RECV_B0", "0B0", "0REDUCE_GRAD", "0RESHARD"],
        ["1UNSHARD", "1RECV_F0", "1F0", "1B0", "1SEND_B0", "1REDUCE_GRAD", "1RESHARD"],
    ]


class Own(PipelineScheduleMulti):
    """A schedule of a user's."""

    def __init__(self, stages, n_microbatches):
        super().__init__(stages, n_microbatches)
        self.pipeline_order = {
            rank: [_Action.from_str(f"{rank}F0"), None, _Action.from_str(f"{rank}B0")]
            for rank in range(self.pp_group_size)
        }


def test_schedules_are_named_or_given():
    assert rows(ours, ScheduleInterleaved1F1B, 2, 4) == rows(ours, "Interleaved1F1B", 2, 4)
    assert rows(ours, Own, 2, 1) == [["0F0", "None", "0B0"], ["1F0", "None", "1B0"]]
    for module in (ours, upstream):
        with pytest.raises(ValueError, match=r"schedule|Unknown"):
            module.get_schedule_ops("none of them", 2, 2)
        with pytest.raises(ValueError, match=r"(?i)spacing"):
            module.get_schedule_ops("GPipe", 2, 2, add_spacing=True, with_comms=True)


@pytest.mark.parametrize("with_comms", [True, False])
def test_mistakes_raise_what_they_raise_in_torch(package, with_comms):
    for given, error in (
        (package.schedules.ScheduleGPipe(STAGE, 2), TypeError),
        (3, TypeError),
        (None, TypeError),
        (int, ValueError),
        (package.schedules._PipelineSchedule, ValueError),
        (package.schedules.PipelineScheduleSingle, TypeError),
        (package.schedules._ScheduleForwardOnly, AssertionError),
    ):
        with pytest.raises(error):
            package._schedule_visualizer.get_schedule_ops(given, 2, 2, with_comms=with_comms)


def test_mistakes_say_what_to_pass():
    with pytest.raises(TypeError, match=r"ScheduleGPipe object .* is not a class .* 'GPipe' or type\(schedule\)"):
        ours.get_schedule_ops(ScheduleGPipe(STAGE, 2), 2, 2)
    with pytest.raises(AssertionError, match="PipelineScheduleMulti has no pipeline_order"):
        ours.get_schedule_ops(PipelineScheduleMulti, 2, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([["0F0", "0B0"], ["1F0"]], "0B0 on rank 0"),
        ([["0F0", "0SEND_F0"]], "0SEND_F0 is not a compute action"),
    ],
)
def test_rows_that_cannot_be_spaced(given, message):
    for module, action in ((ours, _Action), (upstream, upstream._Action)):
        read = [[action.from_str(text) for text in row] for row in given]
        with redirect_stdout(io.StringIO()), pytest.raises(RuntimeError) as raised:
            module.add_schedule_op_spacing(read)
        assert module is upstream or message in str(raised.value)
    assert ours.add_schedule_op_spacing([]) == []


def test_a_picture_is_written(tmp_path, monkeypatch):
    matplotlib.use("agg")
    drawn = ours.get_schedule_ops("DualPipeV", 2, 4, add_spacing=True)
    ours.visualize_schedule(drawn, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append([text.get_text() for text in plt.gca().texts]))
    ours.visualize_schedule(ours.get_schedule_ops("GPipe", 2, 1))
    plt.close("all")
    assert shown == [["0F0", "0B0", "0REDUCE_GRAD", "1F0", "1B0", "1REDUCE_GRAD"]]
