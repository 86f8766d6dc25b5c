"""Every scenario once with the installed torch.distributed.pipelining and once with ours, in the same processes.

Both must return the same: outputs, losses, gradients, types of errors. And each must agree with the unsplit model,
except where ``DIFFERENCES`` says why torch's does not; there, ours is compared with the unsplit model alone.

With PENSTOCK_PARITY=torch.distributed.pipelining, torch's package stands on both sides: a check of the suite itself.
"""

import os

import pytest

from pipelining.parity.comparison import Raised, differences
from pipelining.parity.differences import SAID_BETTER, difference
from pipelining.parity.setting import FORWARD_ONLY, IN_A_V, MULTI, OURS, SINGLE, THEIRS, TRAINING, Case, run

MINE = os.environ.get("PENSTOCK_PARITY", OURS)
LIMIT = 30.0

#: For every schedule that trains, with shapes given and inferred.
ALWAYS = [
    "targets",
    "plain_layers",
    "two_tensors",
    "none_gradients",
    "frozen_stages",
    "shared_and_idle_weights",
    "without_loss",
    "kwargs",
    "kwargs_with_gradients",
    "iterations",
    "gradients_add_up",
    "scaled_gradients_add_up",
    "eval_then_train",
    "eval_leaves_gradients",
    "train_then_eval",
    "without_gradients",
    "dw_builder",
    "return_outputs_off",
    "sum_of_losses",
    "loss_kwargs",
    "input_with_gradient",
    "tuple_of_outputs",
    "merged_along_columns",
    "random_numbers",
    "buffers",
    "state_after_a_step",
    "orders",
    "microbatches_already_split",
    "own_stage",
]
#: For those that have several stages a rank.
OF_SEVERAL = [
    "custom_forward",
    "custom_backward",
    "custom_everything",
    "custom_context",
    "csv_of_compute",
    "csv_with_communication",
    "deferred_receives",
]
OF_FORWARDS = [
    "forward",
    "kwargs",
    "two_tensors",
    "none_gradients",
    "without_gradients",
    "merged_along_columns",
    "random_numbers",
    "return_outputs_off",
    "state_after_a_step",
    "eval_then_train",
    "microbatches_already_split",
]
ONCE = [
    "zoo_v_shaped",
    "zoo_unbalanced",
    "zoo_with_w",
    "zoo_v_shaped_lowered",
    "zoo_unbalanced_lowered",
    "zoo_with_w_lowered",
    "zoo_reordered_b",
    "csv_by_hand",
    "chunk_specs",
    "own_step",
]
MISTAKES = [
    "mistakes_of_sizes",
    "mistakes_of_calls",
    "mistakes_of_stages",
    "mistakes_of_schedules",
    "mistakes_of_microbatches",
]

CASES = [
    *(Case(name, schedule, 2, static) for name in ALWAYS for schedule in TRAINING for static in (False, True)),
    *(Case(name, schedule, 2, static) for name in OF_SEVERAL for schedule in MULTI for static in (False, True)),
    *(Case(name, FORWARD_ONLY, 2, static) for name in OF_FORWARDS for static in (False, True)),
    *(Case(name, "GPipe", 2, static) for name in ONCE for static in (False, True)),
    *(Case("custom_overlap", "DualPipeV", 2, static) for static in (False, True)),
    *(Case("uneven_microbatches", schedule, ranks) for schedule in TRAINING for ranks in (1, 2)),
    *(Case(name, "GPipe", 1) for name in MISTAKES),
    Case("mistakes_of_groups", "GPipe", 2),
    *(Case(name, schedule, 4) for name in ("iterations", "train_then_eval") for schedule in TRAINING),
    *(Case("kwargs", schedule, 4, static=True) for schedule in TRAINING),
    Case("forward", FORWARD_ONLY, 4),
    Case("custom_overlap", "DualPipeV", 4),
]
#: The same on four ranks, and alone on one.
MORE = [
    case
    for ranks in (1, 4)
    for case in [
        *(Case(name, schedule, ranks, static) for name in ALWAYS for schedule in TRAINING for static in (False, True)),
        *(Case(name, schedule, ranks, static) for name in OF_SEVERAL for schedule in MULTI for static in (False, True)),
        *(Case(name, FORWARD_ONLY, ranks, static) for name in OF_FORWARDS for static in (False, True)),
    ]
    if case not in CASES
]


def check(workers, case):
    """Run it with both and compare, or with ours alone where torch's is known to be wrong."""
    why = difference(case)
    ours = workers.run(run, case, MINE if why is None else OURS, ranks=case.ranks, limit=LIMIT)
    told = [f"rank {rank}: {problem}" for rank, (_, problems) in enumerate(ours) for problem in problems]
    if why is None:
        theirs = workers.run(run, case, THEIRS, ranks=case.ranks, limit=LIMIT)
        told += [
            f"rank {rank} of torch's: {problem}" for rank, (_, problems) in enumerate(theirs) for problem in problems
        ]
    else:
        theirs = [(None if isinstance(found, Raised) else found, []) for found, _ in ours]
    for rank, ((expected, _), (found, _)) in enumerate(zip(theirs, ours, strict=True)):
        told += [f"rank {rank}: {each}" for each in differences(_comparable(expected), _comparable(found))]
    assert not told, "\n".join(told)


def _comparable(result):
    """Without the errors that are better than torch's; those must still be errors."""
    if not isinstance(result, dict) or not SAID_BETTER.keys() & result.keys():
        return result
    return {name: isinstance(value, Raised) if name in SAID_BETTER else value for name, value in result.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(workers, case):
    if MINE == THEIRS and difference(case) is not None:
        pytest.skip("torch's is known to be wrong")
    check(workers, case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_parity_on_other_ranks(workers, case):
    if MINE == THEIRS and difference(case) is not None:
        pytest.skip("torch's is known to be wrong")
    check(workers, case)


def test_every_schedule_is_there():
    """In each of the lists that issue a promise."""
    assert {case.schedule for case in CASES} == {*SINGLE, *MULTI, FORWARD_ONLY}
    assert set(IN_A_V) <= set(MULTI)
    assert {case.ranks for case in CASES} == {1, 2, 4}
