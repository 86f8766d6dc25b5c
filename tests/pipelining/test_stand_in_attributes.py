"""A stand-in for a stage needs no attribute that torch's schedules do not read.

The stand-in is run by torch's schedules first, with all that the constructor of a stage would give it, and writes down
what is read. Then ours run one that has nothing else.
"""

import pytest
import torch

from pipelining.contracts import OURS, UPSTREAM, Package, fake_group

MICROBATCHES = 4
SINGLE = ["GPipe", "1F1B", "forward only"]
MULTI = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "multi", "runtime"]


def ignore(*_args, **_kwargs):
    return None


#: What a stand-in does in place of a stage; for a name that is left out here, the base class.
METHODS = {
    "forward_one_chunk": lambda self, *_args, **_kwargs: torch.ones(1),
    "backward_one_chunk": ignore,
    "backward_weight_one_chunk": ignore,
    "perform_reduce_grad": ignore,
    "scale_grads": ignore,
    "get_fwd_recv_ops": lambda self, _: [],
    "get_fwd_send_ops": lambda self, _: [],
    "get_bwd_recv_ops": lambda self, _: [],
    "get_bwd_send_ops": lambda self, _: [],
    "clear_runtime_states": ignore,
    "set_local_fwd_input": ignore,
    "get_local_bwd_output": lambda self, _: (),
    "set_local_bwd_input": ignore,
    "_get_init_p2p_neighbors_ops": lambda self: [],
    "_prepare_forward_infra": ignore,
    "_prepare_backward_infra": ignore,
}
PREPARATIONS = ("_prepare_forward_infra", "_prepare_backward_infra")
#: What schedules write.
WRITTEN = ("has_backward", "stage_index_to_group_rank")
ABSTRACT = {"_create_grad_recv_info": lambda self, _: ()}
VOTES = {
    "_warmup_forward_vote": lambda self, *_args, **_kwargs: torch.ones(1),
    "_warmup_backward_result": lambda self, *_args, **_kwargs: torch.ones(1),
    "_post_metadata_inference_cleanup": ignore,
}


class Doubled(torch.nn.Module):
    def forward(self, x=1.0):
        return torch.ones(1) * 2 * x


def attributes(package, index, stages, ranks, rank):
    """What the constructor of a stage would set, and what is found out before the first step."""
    microbatches = range(MICROBATCHES)
    return {
        "submod": Doubled(),
        "stage_index": index,
        "num_stages": stages,
        "device": "cpu",
        "group": None,
        "dw_builder": None,
        "backward_state": {},
        "dw_runner": {},
        "group_rank": rank,
        "group_size": ranks,
        "fwd_cache": {},
        "bwd_cache": {},
        "output_chunks": [torch.ones(1)],
        "log_prefix": "",
        "args_recv_info": dict.fromkeys(microbatches, ()),
        "act_send_info": {0: [None]},
        "grad_recv_info": dict.fromkeys(microbatches, ()),
        "grad_send_info": None,
        "chunks": MICROBATCHES,
        "stage_index_to_group_rank": {stage: stage % ranks for stage in range(stages)},
        "_stage_meta": package._utils._StageMeta(),
        "_runtime_validate": False,
        "_inference_mode": None,
    }


def stand_in(base, methods, attributes, reads, *, has_slots):
    """An object of a class on ``base``, whose constructor never runs, with these attributes; it writes down reads."""

    def read(self, name):
        value = super(kind, self).__getattribute__(name)
        reads.add(name)
        return value

    slots = {"__slots__": (*attributes, *WRITTEN)} if has_slots else {}
    kind = type("StandIn", (base,), {**methods, **slots, "__getattribute__": read})
    made = object.__new__(kind)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def bases(package):
    """On nothing, with or without slots; on the class of all stages; and on the class that programs construct."""
    return {
        "nothing": object,
        "slots": object,
        "base": package.stage._PipelineStageBase,
        "stage": package.stage.PipelineStage,
    }


def schedule_class(package, name):
    own = {
        "forward only": "_ScheduleForwardOnly",
        "multi": "PipelineScheduleMulti",
        "runtime": "_PipelineScheduleRuntime",
    }
    return getattr(package.schedules, own[name]) if name in own else package.schedule_class(name)


def row(package, *stages):
    forwards = [f"{stage}F{number}" for stage in stages for number in range(MICROBATCHES)]
    backwards = [f"{stage}B{number}" for stage in reversed(stages) for number in range(MICROBATCHES)]
    return package.actions(" ".join(forwards + backwards))


def run(name, made_by, base, left_out, *, trains, rank, known=None):
    """One step of a schedule of four stages; returns what it reads of them. They have what is ``known``, or all."""
    package, reads = Package(made_by), set()
    is_v, is_single = name in ("ZBVZeroBubble", "DualPipeV"), name in SINGLE
    ranks = 4 if is_single else 2
    kind = bases(package)[base]
    methods = {method: function for method, function in METHODS.items() if method not in left_out}
    methods |= ABSTRACT if kind is not object else {}
    methods |= VOTES if base == "stage" else {}
    stages = []
    for index in [rank] if is_single else [rank, 3 - rank if is_v else rank + 2]:
        found = attributes(package, index, 4, ranks, rank)
        if kind is object:
            found |= {"is_first": index == 0, "is_last": index == 3}
        found = {one: found[one] for one in found if known is None or one in known}
        stages.append(stand_in(kind, methods, found, reads, has_slots=base == "slots"))
    loss = {"loss_fn": lambda output, _: output.sum()} if trains else {}
    schedule = schedule_class(package, name)(stages[0] if is_single else stages, MICROBATCHES, **loss)
    rows = {0: row(package, 0, 2), 1: row(package, 1, 3)}
    if name == "multi":
        schedule.pipeline_order = rows
        schedule._validate_and_set_stage_mapping(rows)
    elif name == "runtime":
        schedule._prepare_schedule_with_comms(rows)
    x = torch.ones(MICROBATCHES, 1)
    target = {} if name == "forward only" else {"target": x}
    with fake_group(rank, ranks):
        schedule.step(x, **target)
    return reads


@pytest.mark.parametrize("base", ["nothing", "slots", "base", "stage"])
@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
def test_no_attribute_is_needed_that_torch_does_not_read(name, base):
    for rank in (0, 1):
        for trains in [False] if name == "forward only" else [True, False]:
            expected = run(name, UPSTREAM, base, (), trains=trains, rank=rank)
            run(name, OURS, base, (), trains=trains, rank=rank, known=expected)


#: Methods that are left to the base class; those of a pair need what the other one does.
LEFT_OUT = [
    *[(method,) for method in METHODS if method not in ("get_fwd_send_ops", *PREPARATIONS)],
    ("forward_one_chunk", "get_fwd_send_ops"),
    ("forward_one_chunk", "backward_one_chunk", "get_fwd_send_ops"),
]


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=" ".join)
@pytest.mark.parametrize("base", ["base", "stage"])
@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble", "multi"])
def test_a_method_that_is_left_to_the_base_class_needs_no_more_than_torchs(name, base, left_out):
    compared = 0
    for rank in (0, 1):
        for trains in (True, False):
            try:
                expected = run(name, UPSTREAM, base, left_out, trains=trains, rank=rank)
            except (ArithmeticError, AssertionError, LookupError, ValueError, RuntimeError):
                continue  # torch's method needs more than a stand-in does
            run(name, OURS, base, left_out, trains=trains, rank=rank, known=expected)
            compared += 1
    assert compared > 0
