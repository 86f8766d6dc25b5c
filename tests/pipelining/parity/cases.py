"""Which scenarios run with which schedules, on how many ranks, with shapes given or inferred."""

from __future__ import annotations

from pipelining.parity.differences import difference
from pipelining.parity.setting import FORWARD_ONLY, MULTI, TRAINING, Case

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
#: Those to which torch's answer is right.
RECORDED = [case for case in CASES if difference(case) is None]
