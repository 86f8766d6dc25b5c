"""Where torch's package is wrong or hangs, and ours is compared with the unsplit model alone.

docs/drop-in.md tells the same to users.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelining.parity.setting import IN_A_V, MULTI, SCHEDULES, SPLITTING, TRAINING, Case


@dataclass(frozen=True)
class Difference:
    """Scenarios by name, with these schedules on so many ranks; ``static`` if it is about one of both modes."""

    scenarios: tuple[str, ...]
    schedules: tuple[str, ...]
    why: str
    static: bool | None = None
    ranks: tuple[int, ...] = (1, 2, 4)

    def covers(self, case: Case) -> bool:
        return (
            case.scenario in self.scenarios
            and case.schedule in self.schedules
            and self.static in (None, case.static)
            and case.ranks in self.ranks
        )


DIFFERENCES = [
    Difference(
        ("kwargs_with_gradients",),
        SPLITTING,
        "torch's I gives keyword arguments no gradient",
    ),
    Difference(
        ("eval_leaves_gradients",),
        TRAINING,
        "torch's eval() divides the gradients that are there by the number of microbatches",
    ),
    Difference(
        ("orders",),
        ("1F1B",),
        "the pipeline_order of torch's 1F1B has other numbers of microbatches than its step() runs",
    ),
    Difference(
        ("scaled_gradients_add_up",),
        TRAINING,
        "torch divides .grad by the number of microbatches after every step, also what earlier steps have left there",
    ),
    Difference(
        ("uneven_microbatches",),
        TRAINING,
        "torch receives every microbatch into a buffer of the size of the first",
        ranks=(2, 4),
    ),
    Difference(
        ("microbatches_already_split",),
        SCHEDULES,
        "torch 2.13 has no arg_mbs, kwarg_mbs and target_mbs; later versions have",
    ),
    Difference(
        ("buffers",),
        TRAINING,
        "torch infers shapes by a forward that counts: running statistics see the first microbatch twice",
        static=False,
    ),
    Difference(
        ("without_loss", "eval_then_train", "train_then_eval", "without_gradients"),
        IN_A_V,
        "torch's schedules in a V cannot go forward only: the hand-over of gradients on one rank raises",
    ),
    Difference(
        ("without_loss", "eval_then_train", "train_then_eval", "without_gradients"),
        MULTI,
        "the same, where all stages are on one rank",
        ranks=(1,),
    ),
    Difference(
        ("two_tensors",),
        SPLITTING,
        "torch detaches outputs in place in I; a later backward that has saved one raises",
    ),
    Difference(
        ("frozen_stages",),
        SPLITTING,
        "torch's I and W give no weight gradients to a stage whose input needs none, unless it is stage 0",
    ),
    Difference(
        ("deferred_receives",),
        ("InterleavedZeroBubble", "ZBVZeroBubble"),
        "torch's deferred receives may be in another order than the sends: they get each other's data, or hang",
    ),
    Difference(
        ("deferred_receives",),
        ("DualPipeV",),
        "the same, on more ranks",
        ranks=(4,),
    ),
    Difference(
        ("zoo_v_shaped", "zoo_unbalanced"),
        ("GPipe",),
        "torch's PipelineScheduleMulti sends to the own rank, which gloo does not do",
    ),
]


#: Mistakes whose error in torch is an accident of its code; ours is an AssertionError that says what is wrong.
SAID_BETTER = {
    "runtime_without_schedule": "torch: AttributeError, since the order is not there",
    "unknown_stage": "torch: KeyError with the number of the stage alone",
}


def difference(case: Case) -> str | None:
    """Why torch's is not asked, if so."""
    return next((each.why for each in DIFFERENCES if each.covers(case)), None)
