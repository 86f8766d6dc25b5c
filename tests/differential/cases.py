"""Cases: a model cut into stages, a schedule and some calls, all drawn from one number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import penstock as ps
from differential.forms import DROP_IN, FORMS, NATIVE
from differential.orders import random_order
from differential.pieces import MIXING, PIECES, ROUGH, ROUGHEST

THREADS, PROCESSES = "threads", "processes"
CUSTOM = "an order of its own"
#: How the stages of a schedule are placed: one on a rank, in a loop, in a V.
ONE, LOOP, V = "one", "loop", "V"
NATIVE_SCHEDULES = {
    "GPipe": ONE, "1F1B": ONE, "ZB-H1": ONE, "ZB-H2": ONE, "Interleaved1F1B": LOOP, "LoopedBFS": LOOP,
    "InterleavedZeroBubble": LOOP, "ZBVZeroBubble": V, "V-Half": V, "V-Min": V, "DualPipeV": V,
}  # fmt: skip
DROP_IN_SCHEDULES = {
    "GPipe": ONE, "1F1B": ONE, "Interleaved1F1B": LOOP, "LoopedBFS": LOOP, "InterleavedZeroBubble": LOOP,
    "ZBVZeroBubble": V, "DualPipeV": V,
}  # fmt: skip


@dataclass(frozen=True)
class StagePlan:
    """What a stage does."""

    takes: str
    pieces: tuple[str, ...]
    gives: str
    frozen: bool = False
    detaches: bool = False
    tied: bool = False

    def __str__(self) -> str:
        notes = [name for name in ("frozen", "detaches", "tied") if getattr(self, name)]
        reported = f" ({', '.join(notes)})" if notes else ""
        return f"{self.takes} > {' '.join(self.pieces) or 'nothing'} > {self.gives}{reported}"


@dataclass(frozen=True)
class Call:
    """A step or an evaluation, and what happens to gradients and parameters after it."""

    kind: str
    samples: int
    after: str = "keep"
    losses: bool = True
    outputs: bool = True

    def __str__(self) -> str:
        without = [name for name in ("losses", "outputs") if not getattr(self, name)]
        reported = f" without {' and '.join(without)}" if without else ""
        return f"{self.kind} of {self.samples}{reported}{'' if self.after == 'keep' else f', then {self.after}'}"


@dataclass(frozen=True)
class Case:
    """Everything that a run needs to know."""

    seed: int
    door: str
    place: str
    ranks: int
    schedule: str
    rank_of: tuple[int, ...]
    microbatches: int
    order: tuple[tuple[str, ...], ...] | None
    given: str
    needs_gradient: bool
    scaled_ranks: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    calls: tuple[Call, ...]
    reduction: str
    loss: str
    shapes: str
    shares_losses: bool
    allows_untrained: bool

    @property
    def marks(self) -> frozenset[str]:
        """What is special about the values on its edges."""
        inner = [FORMS[stage.gives].marks for stage in self.stages[:-1]]
        return frozenset().union(*inner)

    @property
    def mixes(self) -> bool:
        """Whether the samples of a microbatch depend on each other."""
        pieces = {piece for stage in self.stages for piece in stage.pieces}
        return "mixes" in self.marks or not pieces.isdisjoint(MIXING)

    @property
    def has_unused(self) -> bool:
        """Whether some output of a stage gets no gradient from the next one."""
        return "unused" in self.marks or any(stage.detaches for stage in self.stages)

    @property
    def has_containers(self) -> bool:
        """Whether more than tensors and tuples of them go from stage to stage."""
        return any(DROP_IN not in FORMS[stage.gives].doors for stage in self.stages[:-1])

    @property
    def tolerance(self) -> dict[str, float]:
        """How much results may differ: by the type in which some of it is computed."""
        pieces = {piece for stage in self.stages for piece in stage.pieces}
        if not pieces.isdisjoint(ROUGHEST):
            return {"rtol": 2e-2, "atol": 1e-2}
        if not pieces.isdisjoint(ROUGH) or any("rough" in FORMS[stage.gives].marks for stage in self.stages):
            return {"rtol": 2e-4, "atol": 1e-5}
        return {"rtol": 1e-9, "atol": 1e-11}

    @property
    def first_step(self) -> int | None:
        """The first call that trains."""
        return next((number for number, call in enumerate(self.calls) if call.kind == "step"), None)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, its in enumerate(self.rank_of) if its == rank]

    def crosses(self, stage: int) -> bool:
        """Whether what a stage returns goes to another rank."""
        return self.rank_of[stage] != self.rank_of[stage + 1]

    def __str__(self) -> str:
        options = [
            f"{self.reduction} loss{self.loss and ', ' + self.loss}",
            f"shapes {self.shapes}",
            *(["the input needs a gradient"] if self.needs_gradient else []),
            *([f"scale= on ranks {self.scaled_ranks}"] if self.scaled_ranks else []),
            *(["share_losses"] if self.shares_losses else []),
            *(["allow_untrained"] if self.allows_untrained else []),
        ]
        lines = [
            f"seed {self.seed}: {self.door} in {self.place}, {self.ranks} ranks, {self.schedule}, "
            f"{self.microbatches} microbatches; {'; '.join(options)}",
            *(f"  stage {index} on rank {self.rank_of[index]}: {stage}" for index, stage in enumerate(self.stages)),
            f"  calls: {'; '.join(map(str, self.calls))}",
            *(f"  rank {rank}: {' '.join(row)}" for rank, row in enumerate(self.order or ())),
        ]
        return "\n".join(lines)


def place_of(seed: int) -> tuple[str, str]:
    """The door that a case goes through, and where its ranks are: known before it is drawn."""
    last = seed % 10
    if last == 9:
        return NATIVE, PROCESSES
    return (DROP_IN, PROCESSES) if last % 2 else (NATIVE, THREADS)


def draw(seed: int) -> Case:
    """The case of a number."""
    random = Random(seed)
    door, place = place_of(seed)
    ranks = random.choice([1, 2, 2, 3])
    known = NATIVE_SCHEDULES if door == NATIVE else DROP_IN_SCHEDULES
    schedule = CUSTOM if random.random() < 0.25 else random.choice(list(known))
    microbatches = _microbatches(random, door, schedule, ranks)
    order = None
    if schedule == CUSTOM:
        rank_of, rows = _custom(random, door, ranks, microbatches)
        order = tuple(map(tuple, rows))
    else:
        rank_of = _placed(known[schedule], ranks, random.choice([2, 2, 3]))
    return Case(
        seed, door, place, ranks, schedule, rank_of, microbatches, order,
        **_settings(random, door, schedule, ranks, microbatches, len(rank_of)),
    )  # fmt: skip


def _microbatches(random: Random, door: str, schedule: str, ranks: int) -> int:
    if door == DROP_IN and schedule == "DualPipeV":
        return 2 * ranks + random.randrange(2)
    if door == DROP_IN and schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return ranks * random.choice([1, 2])  # these need a multiple, as in torch
    least = ranks if (door, schedule) == (DROP_IN, "1F1B") else 1
    return least + random.choice([0, 1, 2, 2, 3, 4])


def _custom(random: Random, door: str, ranks: int, microbatches: int) -> tuple[tuple[int, ...], list[list[str]]]:
    """Stages on any ranks, in an order that cannot hang."""
    while True:
        stages = random.randint(max(ranks, 2), 4)
        rank_of = tuple(random.randrange(ranks) for _ in range(stages))
        if door == DROP_IN and set(rank_of) != set(range(ranks)):
            continue
        rows = random_order(random, rank_of, ranks, microbatches, split=random.random() < 0.5)
        placement = ps.Placement(rank_of, ranks)
        try:
            ps.lower(ps.Schedule(rows, placement=placement))
        except ps.ScheduleError:
            continue
        return rank_of, rows


def _placed(kind: str, ranks: int, per_rank: int) -> tuple[int, ...]:
    if kind == ONE:
        return tuple(range(ranks))
    if kind == LOOP:
        return tuple(range(ranks)) * per_rank
    return (*range(ranks), *reversed(range(ranks)))


def _settings(random: Random, door: str, schedule: str, ranks: int, microbatches: int, stages: int) -> dict[str, Any]:
    given = random.choice(["x", "x", "x", "ids", "columns", "two", "split", *(["a dict"] if door == NATIVE else [])])
    if (door, schedule, given) == (DROP_IN, "LoopedBFS", "columns"):
        given = "x"  # it takes no spec
    needs_gradient = given in ("x", "columns", "two") and random.random() < 0.3
    if given == "x" and not needs_gradient and random.random() < 0.15:
        given = "changed x"
    shapes = random.choice(["inferred"] * 3 + (["per_microbatch", "given"] if door == NATIVE else ["given"]))
    even = shapes == "given" or given == "split" or random.random() < 0.4
    samples = microbatches * random.choice([1, 2]) if even else microbatches + random.randrange(2 * microbatches + 2)
    reduction = random.choice(["mean", "mean", "sum", *(["weighted"] if door == NATIVE else [])])
    plans = tuple(_plans(random, door, stages, given))
    if door == DROP_IN and shapes == "given":
        # By examples all inputs require a gradient, so that it trains what is not trained without.
        plans = tuple(replace(plan, pieces=tuple(map(_with_input_to_train, plan.pieces))) for plan in plans)
    return {
        "given": given,
        "needs_gradient": needs_gradient,
        "scaled_ranks": tuple(rank for rank in range(ranks) if random.random() < 0.15) if given != "split" else (),
        "stages": plans,
        "calls": tuple(_calls(random, door, samples, microbatches, shapes, given)),
        "reduction": reduction,
        "loss": random.choice([""] * 6 + ["its gradient doubled in place", "of shape [1]"]),
        "shapes": shapes,
        "shares_losses": door == NATIVE and random.random() < 0.2,
        "allows_untrained": door == NATIVE and random.random() < 0.3,
    }


def _with_input_to_train(piece: str) -> str:
    return "ReentrantLater" if piece == "Reentrant" else piece


def _plans(random: Random, door: str, count: int, given: str) -> Iterator[StagePlan]:
    inner = [name for name, form in FORMS.items() if door in form.doors]
    # What is often refused is rare, so that most cases show more than that.
    usual = [name for name in inner if FORMS[name].marks.isdisjoint({"shared", "changes" if door == DROP_IN else ""})]
    outer = [name for name in inner if "output" in FORMS[name].marks]
    containers = [name for name in FORMS if name not in inner and "list" not in name]  # a list is taken for a tuple
    frozen = random.random() < 0.15
    tied = random.random() < 0.2
    takes = given
    for index in range(count):
        is_last = index == count - 1
        gives = random.choice(outer if is_last else inner if random.random() < 0.2 else usual)
        if random.random() < 0.4:
            gives = "tensor"
        if containers and not is_last and random.random() < 0.01:
            gives = random.choice(containers)  # which is refused
        pieces = tuple(random.choices(list(PIECES), k=random.choice([0, 1, 1, 2, 2, 3])))
        yield StagePlan(
            takes,
            pieces,
            gives,
            frozen=frozen and random.random() < 0.5,
            detaches=random.random() < 0.02,
            tied=tied and random.random() < 0.7,
        )
        takes = gives


def _calls(random: Random, door: str, samples: int, microbatches: int, shapes: str, given: str) -> Iterator[Call]:
    # The drop-in takes no fewer samples than there are microbatches.
    least = 1 if door == NATIVE else microbatches
    has_one_size = given == "split" or (door == DROP_IN and shapes == "given")
    size_in_evaluation = random.randint(least, 2 * microbatches + 2)
    for _ in range(random.choice([1, 1, 2, 3])):
        evaluates = random.random() < 0.3
        if door == NATIVE:  # the other expects the size of the evaluation before
            size_in_evaluation = random.randint(least, 2 * microbatches + 2)
        size = samples if has_one_size else size_in_evaluation
        evaluation = Call("eval", size, losses=random.random() < 0.8)
        size = samples
        if shapes == "per_microbatch" and not has_one_size and random.random() < 0.5:
            size = microbatches + random.randrange(2 * microbatches)
        after = random.choice(["keep", "zero", "update"])
        training = Call("step", size, after, losses=random.random() < 0.8, outputs=random.random() < 0.8)
        comes_first = random.random() < 0.3
        if evaluates and comes_first:
            yield evaluation
        if not (evaluates and random.random() < 0.1):
            yield training
        if evaluates and not comes_first:
            yield evaluation
