"""Stages that are stand-ins: schedules are driven in one process, and what they call is written down."""

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from pipelining.contracts import OURS, UPSTREAM, Package, fake_group, summed

SINGLE = ["GPipe", "1F1B"]
MULTI = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
SIGNATURES = {
    "forward_one_chunk": "(chunk, args, kwargs=None, save_forward_output=True)",
    "backward_one_chunk": "(chunk, loss=None, full_backward=True, last_backward=False)",
    "backward_weight_one_chunk": "(chunk, last_backward=False)",
    "perform_reduce_grad": "(grad_scale_factor)",
    "scale_grads": "(grad_scale_factor)",
}


def recording_stage(package, index, stages, ranks, rank, calls):
    """A stage that writes down what is called on it, and computes nothing."""

    def bound(name):
        signature = inspect.signature(eval(f"lambda {SIGNATURES[name][1:-1]}: None"))

        def method(self, *args, **kwargs):
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            calls.append((index, name, *call.arguments.values()))
            return f"output {index} {args[0]}" if name == "forward_one_chunk" else None

        return method

    def transfer(name):
        def method(self, chunk):
            calls.append((index, name, chunk))
            return []

        return method

    def prepare_forward(self, microbatches, args, kwargs=None, has_backward=False):
        calls.append((index, "forward infra", microbatches, args, kwargs, has_backward))
        self.args_recv_info = dict.fromkeys(range(microbatches), ())
        self.act_send_info = {}

    def prepare_backward(self, microbatches, loss_fn=None, target=None, received_grad_meta=None, loss_kwargs=None):
        calls.append((index, "backward infra", microbatches, target, loss_kwargs))

    def construct(self):
        self.submod = None
        self.stage_index = index
        self.num_stages = stages
        self.group_size = ranks
        self.group_rank = rank
        self.group = None
        self.device = "cpu"

    methods = {name: bound(name) for name in SIGNATURES}
    methods |= {f"get_{way}_ops": transfer(way) for way in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send")}
    methods |= {
        "__init__": construct,
        "_get_init_p2p_neighbors_ops": lambda self: [],
        "_prepare_forward_infra": prepare_forward,
        "_prepare_backward_infra": prepare_backward,
        "_create_grad_recv_info": lambda self, *_: (),
        "clear_runtime_states": lambda self: calls.append((index, "clear")),
        "set_local_fwd_input": lambda self, output, chunk: calls.append((index, "local forward", output, chunk)),
        "get_local_bwd_output": lambda self, chunk: f"gradient {index} {chunk}",
        "set_local_bwd_input": lambda self, grads, chunk: calls.append((index, "local backward", grads, chunk)),
    }
    return type("Recording", (package.stage._PipelineStageBase,), methods)()


def driven(package, name, microbatches, rank, *, train=True, scale_grads=True, return_outputs=True):
    """What one step of a schedule of four stages on two ranks calls on the stages of a rank, in order."""
    calls = []
    kind = package.schedule_class(name)
    single = name in SINGLE
    ranks = 4 if single else 2
    v = name in ("ZBVZeroBubble", "DualPipeV")
    indices = [rank] if single else [rank, 3 - rank if v else rank + 2]
    stages = [recording_stage(package, index, 4, ranks, rank, calls) for index in indices]
    options = {"loss_fn": lambda output, target: f"loss of {output} and {target}"} if train else {}
    schedule = kind(stages[0] if single else stages, microbatches, scale_grads=scale_grads, **options)
    schedule._step_microbatches(
        [(f"x{i}",) for i in range(microbatches)],
        [{"k": i} for i in range(microbatches)],
        [f"t{i}" for i in range(microbatches)],
        return_outputs=return_outputs,
    )
    return calls


def computations(calls):
    return [call for call in calls if call[1] in (*SIGNATURES, "local forward", "local backward")]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
@pytest.mark.parametrize("options", [{}, {"scale_grads": False, "return_outputs": False}])
def test_computations_are_called_as_torch_calls_them(name, rank, options):
    found, expected = (computations(driven(Package(each), name, 8, rank, **options)) for each in (OURS, UPSTREAM))
    assert found == expected


@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
def test_without_a_loss_nothing_is_reduced(name):
    """Stages are asked for their backwards, and do nothing then. torch divides gradients of earlier steps once more."""
    for rank in (0, 1):
        found, expected = (driven(Package(each), name, 8, rank, train=False) for each in (OURS, UPSTREAM))
        compared = [call for call in computations(expected) if call[1] not in ("perform_reduce_grad", "local backward")]
        assert [call for call in computations(found) if call[1] != "local backward"] == compared


@pytest.mark.parametrize("name", SINGLE)
def test_the_last_stage_gets_its_loss_and_its_scale(package, name):
    calls = driven(package, name, 4, 3)
    loss = "loss of output 3 2 and t2"
    assert (3, "backward_one_chunk", 2, loss, True, False) in calls
    assert [call[2:] for call in calls if call[1] == "perform_reduce_grad"] == [(4,)]
    assert [call[-1] for call in calls if call[1] == "backward_one_chunk"] == [False, False, False, True]


@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
def test_transfers_are_asked_for_once_and_around_their_computation(package, name):
    for rank in (0, 1):
        calls = driven(package, name, 8, rank)
        at = {
            call[:3]: position for position, call in enumerate(calls) if isinstance(call[2:3], tuple) and len(call) > 2
        }
        for stage, transfer, microbatch in [key for key in at if key[1].endswith(("_recv", "_send"))]:
            assert sum(call[:3] == (stage, transfer, microbatch) for call in calls) == 1
            compute = "forward_one_chunk" if transfer.startswith("fwd") else "backward_one_chunk"
            before = at[stage, transfer, microbatch] < at[stage, compute, microbatch]
            assert before == transfer.endswith("recv")


@pytest.mark.parametrize("name", ["Interleaved1F1B", "DualPipeV"])
def test_stages_are_prepared_in_order_and_once(package, name):
    calls = driven(package, name, 8, 1)
    prepared = [call for call in calls if "infra" in call[1]]
    stages = [1, 2] if name == "DualPipeV" else [1, 3]
    assert prepared == [
        *((stage, "forward infra", 8, None, {"k": 0}, True) for stage in stages),
        *((stage, "backward infra", 8, "t0", None) for stage in reversed(stages)),
    ]


def test_a_computation_that_is_missed_is_refused(package):
    """A received input must have been waited for: a schedule without its RECV_F does not run."""
    calls = []
    stage = recording_stage(package, 1, 2, 2, 1, calls)
    schedule = package.schedules._PipelineScheduleRuntime([stage], 1, loss_fn=summed)
    schedule.pipeline_order_with_comms = package.rows("0F0 0SEND_F0", "1F0 1B0 1SEND_B0")
    with pytest.raises(AssertionError, match="1F0"):
        schedule._step_microbatches(target_mbs=["t"])


@pytest.mark.parametrize("way", ["F", "B"])
def test_a_receive_is_posted_once(package, way):
    stage = recording_stage(package, 1, 3, 3, 1, [])
    schedule = package.schedules._PipelineScheduleRuntime([stage], 1, loss_fn=summed)
    schedule.pipeline_order_with_comms = {1: package.actions(f"1RECV_{way}0 1RECV_{way}0")}
    with pytest.raises(AssertionError, match=r"(?i)twice"):
        schedule._step_microbatches()


# Stand-ins with less --------------------------------------------------------------------------------------------------


def namespace(index=0, stages=4, ranks=2):
    return SimpleNamespace(
        submod=None, num_stages=stages, group_size=ranks, group_rank=index % ranks, group=None, stage_index=index
    )


@pytest.mark.parametrize("name", MULTI)
def test_a_schedule_is_made_of_anything_that_counts(package, name):
    stages = [namespace(0), namespace(2)]
    schedule = package.schedule_class(name)(stages, 4)
    assert schedule._stages is stages
    assert schedule._num_stages == 4
    assert schedule.pp_group_size == 2
    assert schedule.rank == 0
    assert schedule._n_microbatches == 4
    assert schedule.scale_grads is True
    assert schedule._has_backward is False
    assert all(stage.stage_index_to_group_rank == schedule.stage_index_to_group_rank for stage in stages)
    assert set(schedule.pipeline_order) == {0, 1}
    assert set(schedule.pipeline_order_with_comms) == {0, 1}


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_stage_schedule_is_made_of_anything_that_counts(package, name):
    stage = namespace(1, stages=2)
    schedule = package.schedule_class(name)(stage, 4, loss_fn=summed)
    assert schedule._stage is stage
    assert schedule._num_stages == 2
    assert schedule._has_backward is True
    assert (schedule._stage_forward_initialized, schedule._stage_backward_initialized) == (False, False)
    assert set(schedule.pipeline_order) == {0, 1}


def test_mocks_of_a_stage_will_do(package):
    """As the picture of a schedule is made upstream: a stage with a specification, and nothing behind it."""
    stage = mock.create_autospec(package.stage.PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, 2, 4, None
    schedule = package.schedules.ScheduleInterleaved1F1B([stage, stage], 4)
    assert len(schedule.pipeline_order[1]) > 0


# Neighbours -----------------------------------------------------------------------------------------------------------


def step_with(package, index, stages, received, sent):
    """One step of a schedule without computations, for a stage that receives from and sends to these stages."""
    stage = recording_stage(package, index, stages, stages, index, [])
    infos = tuple(package.stage._RecvInfo("x", source, None, None) for source in received)

    def prepare(microbatches, *args, **kwargs):
        stage.args_recv_info, stage.act_send_info = {0: infos}, {0: sent}

    stage._prepare_forward_infra = prepare
    schedule = package.schedules.PipelineScheduleMulti([stage], n_microbatches=1)
    schedule.pipeline_order = {rank: [None] for rank in range(stages)}
    return schedule.step()


@pytest.mark.parametrize(("index", "received", "sent"), [(0, [], [2]), (3, [0], []), (1, [0], [2, 3])])
def test_stages_that_are_no_neighbours_are_refused(package, index, received, sent):
    with pytest.raises(RuntimeError, match="adjacent-stage communication"):
        step_with(package, index, 4, received, sent)


@pytest.mark.parametrize(("index", "received", "sent"), [(0, [], [1]), (1, [], [2]), (1, [0], [2]), (2, [1], [3])])
def test_neighbours_are_not(package, index, received, sent):
    assert step_with(package, index, 4, received, sent) is None


# torch.compile --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_compiled_stages_of_a_split_backward_are_refused(package, name):
    with fake_group():
        module = torch.compile(torch.nn.Linear(2, 2))
        stage = package.stage.PipelineStage(module, 0, 1, torch.device("cpu"))
        with pytest.raises(RuntimeError):
            package.schedule_class(name)([stage], 2)
