"""Messages: how lists of them are sent, which names a program may replace, and what stages ask for."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipelining.contracts import CPU, WIDTH, fake_group, layers, numbers, summed


def operation(kind, peer=0, group="group"):
    return SimpleNamespace(op=kind, tensor=torch.zeros(1), group=group, tag=7, group_peer=peer, peer=peer)


def test_no_messages_are_no_work(s):
    assert s._batch_p2p([]) == []
    assert s._sorted_batch_p2p([]) == {}
    s._wait_batch_p2p([])


@pytest.mark.parametrize(("name", "side"), [("isend", "group_dst"), ("irecv", "group_src")])
def test_messages_of_one_direction_go_one_by_one(package, s, name, side):
    """Through the names in the module of the package, at the time of the call."""
    where = f"{package.name}.schedules.dist"
    with mock.patch(f"{where}.{name}") as call, mock.patch(f"{where}.batch_isend_irecv") as batch:
        operations = [operation(call, peer) for peer in range(3)]
        works = s._batch_p2p(operations, desc="fwd_recv")
        batch.assert_not_called()
        assert works == [call.return_value] * 3
        assert call.call_args_list == [
            mock.call(each.tensor, group=each.group, tag=each.tag, **{side: each.group_peer}) for each in operations
        ]


def test_messages_of_both_directions_go_together(package, s):
    where = f"{package.name}.schedules.dist"
    with (
        mock.patch(f"{where}.isend") as send,
        mock.patch(f"{where}.irecv") as receive,
        mock.patch(f"{where}.batch_isend_irecv", return_value=["one", "two"]) as batch,
    ):
        operations = [operation(send, 0), operation(receive, 1)]
        assert s._batch_p2p(operations) == ["one", "two"]
        batch.assert_called_once_with(operations)
        send.assert_not_called()
        receive.assert_not_called()


def test_messages_are_sorted_by_peer(package, s):
    with mock.patch(f"{package.name}.schedules._batch_p2p", side_effect=lambda ops, desc=None: [desc, *ops]):
        operations = [operation(dist.isend, peer) for peer in (2, 0, 2)]
        found = s._sorted_batch_p2p(operations, desc="fwd_send")
    assert list(found) == [0, 2]
    assert found == {0: ["fwd_send", operations[1]], 2: ["fwd_send", operations[0], operations[2]]}


def test_work_is_waited_for(s):
    works = [mock.Mock(), mock.Mock()]
    s._wait_batch_p2p(works)
    assert [work.wait.call_count for work in works] == [1, 1]


def static_stage(package, rank, ranks, **options):
    given = numbers(0, 2, WIDTH).requires_grad_(rank > 0)
    module = layers(ranks)[rank]
    return package.stage.PipelineStage(module, rank, ranks, CPU, input_args=given, output_args=module(given), **options)


def step(schedule, rank, ranks, batch):
    x, target = numbers(2, batch, WIDTH), numbers(3, batch, WIDTH)
    return schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank == ranks - 1 else {}))


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("GPipe", 0, {"fwd_send": 4, "bwd_recv": 4}),
        ("GPipe", 2, {"fwd_recv": 4, "bwd_send": 4}),
        ("1F1B", 0, {"fwd_send": 2, "fwd_send_bwd_recv": 2, "bwd_recv": 2}),
        ("1F1B", 1, {"fwd_recv": 2, "fwd_send": 1, "fwd_send_bwd_recv": 3, "bwd_send_fwd_recv": 2, "bwd_send": 2,
                     "bwd_recv": 1}),
        ("1F1B", 2, {"fwd_recv": 1, "bwd_send_fwd_recv": 3, "bwd_send": 1}),
    ],
)  # fmt: skip
def test_a_program_may_replace_how_messages_go(package, s, name, rank, expected):
    """The function is found in the module by every call, and gets a description of what the messages are for."""
    original = s._batch_p2p
    posted = {}

    def ordered(operations, desc=None):
        if operations:
            posted[desc] = posted.get(desc, 0) + 1
        return original(operations, desc)

    with fake_group(rank, 3):
        schedule = package.schedule_class(name)(static_stage(package, rank, 3), 4, loss_fn=summed)
        with mark_warm_up(package), mock.patch.object(s, "_batch_p2p", ordered):
            step(schedule, rank, 3, 8)
    assert posted == expected


def mark_warm_up(package):
    """Leave the agreement of ranks out, as a program does that knows it: the shapes are given."""

    def warm_up(self, stages, has_backward, p2p_done):
        for stage in stages:
            stage._inference_mode = package._utils.InferenceMode.STATIC

    return mock.patch.object(package.schedules._PipelineSchedule, "_warmup_p2p", warm_up)


def test_messages_are_what_torch_distributed_takes(package):
    """One for each tensor, with the rank in the whole world and the group of the stage."""
    with fake_group(1, 3), mark_warm_up(package):
        stage = static_stage(package, 1, 3)
        schedule = package.schedules.ScheduleGPipe(stage, 2, loss_fn=summed)
        schedule._has_backward = stage.has_backward = True
        schedule._initialize_stage((), {})
        receives = stage.get_fwd_recv_ops(0)
        assert [(op.op, op.peer, tuple(op.tensor.shape)) for op in receives] == [(dist.irecv, 0, (2, WIDTH))]
        assert all(isinstance(op, dist.P2POp) for op in receives)
        output = stage.forward_one_chunk(0, (), {})
        sends = stage.get_fwd_send_ops(0)
        assert [(op.op, op.peer) for op in sends] == [(dist.isend, 2)]
        torch.testing.assert_close(sends[0].tensor, output.detach())
        assert not sends[0].tensor.requires_grad
        assert [(op.op, op.peer) for op in stage.get_bwd_recv_ops(0)] == [(dist.irecv, 2)]
        stage.backward_one_chunk(0)
        assert [(op.op, op.peer) for op in stage.get_bwd_send_ops(0)] == [(dist.isend, 0)]
        assert 0 not in stage.bwd_cache


def test_neighbours_are_greeted_in_both_directions(package):
    with fake_group(1, 3):
        operations = static_stage(package, 1, 3)._get_init_p2p_neighbors_ops()
        assert sorted((op.op.__name__, op.group_peer) for op in operations) == [
            ("irecv", 0), ("irecv", 2), ("isend", 0), ("isend", 2),
        ]  # fmt: skip
