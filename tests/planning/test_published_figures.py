"""Plans are no worse than the best published figures for the same costs, memory and objective, row by row."""

from __future__ import annotations

from typing import NamedTuple

import pytest

import penstock as ps
from penstock.ir.placement import Placement

#: Published bubble rates have four digits.
ROUNDING = 0.00005


class Row(NamedTuple):
    """Costs and sizes, and the bubble rates of the span that are published for them.

    Attributes:
        costs: those of a rank: F, I, W and a transfer.
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        release: the share of an activation that I releases.
        zero_bubble: with one stage per rank and the memory of 1F1B, 1.5 and 2 times as much.
        zb_v: with two stages per rank in a V, and the memory of 1F1B.
        span: the span of ZB-V, rounded up by at most one half.
        makespan: its makespan.
        v_half: in a V, with the memory of V-Half, if activations are held until W.
        v_min: with that of V-Min.
    """

    costs: tuple[float, float, float, float]
    ranks: int
    microbatches: int
    release: float
    zero_bubble: tuple[float, float, float]
    zb_v: float
    span: float
    makespan: float
    v_half: float
    v_min: float

    @property
    def ideal(self) -> float:
        """The time without bubbles."""
        return self.microbatches * sum(self.costs[:3])

    def plan(
        self, memory: float, *, v: bool, objective: str = "span", release: float | None = None, effort: float = 0.3
    ) -> ps.Plan:
        """Plan for this much memory of each rank, in activations of a whole rank."""
        forward, inputs, weights, latency = self.costs
        costs = ps.Costs(
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            latency=latency,
            input_release=self.release if release is None else release,
        )
        placement = Placement.v(self.ranks, 2 * self.ranks) if v else Placement.loop(self.ranks, self.ranks)
        sizes = {"microbatches": self.microbatches, "memory_limit": memory, "objective": objective}
        plan = ps.plan(costs.of_ranks(placement), placement=placement, effort=effort, **sizes)
        assert max(ps.simulate(plan.schedule, plan.costs).peak_memory) <= memory * (1 + 1e-9)
        return plan

    def rate(self, plan) -> float:
        """The share of the span that is idle."""
        return 1 - self.ideal / plan.timeline.span


def released(hidden: int, heads: int) -> float:
    """The share that I releases in a transformer: W needs 32 h of 34 h + 5 a s, for sequences of 1024."""
    return 1 - 32 * hidden / (34 * hidden + 5 * heads * 1024)


ROWS = [
    Row((1, 1, 1, 0), 4, 8, 0.5, (0.1111, 0.0400, 0), 0, 24, 25.5, 0.0943, 0.1864),
    Row((1, 1, 1, 0), 8, 24, 0.5, (0.0886, 0.0400, 0), 0, 72, 75.5, 0.1056, 0.1579),
    Row((1000, 1000, 1000, 10), 4, 12, 0.5, (0.0798, 0.0286, 0.0017), 0.0039, 36140, 37650, 0.0702, 0.1441),
    Row(
        (18522, 18086, 9337, 601), 8, 24, released(2304, 24),
        (0.1585, 0.0719, 0.0433), 0.0703, 1186022, 1188542, 0.1702, 0.3353,
    ),
    Row(
        (29718, 29444, 19927, 527), 8, 24, released(4096, 32),
        (0.1323, 0.0475, 0.0029), 0.0403, 1977884, 2020594, 0.1447, 0.2721,
    ),
]  # fmt: skip
NAMES = ["unit costs, 4 ranks", "unit costs, 8 ranks", "equal costs, transfers", "1.5B", "6.2B"]
every_row = pytest.mark.parametrize("row", ROWS, ids=NAMES)


@every_row
@pytest.mark.parametrize("times", [1, 1.5, 2])
def test_one_stage_per_rank(row, times):
    """Zero-bubble schedules. For 1.5B at twice the memory, the default effort ends 0.01 % above the optimum."""
    plan = row.plan(times * row.ranks, v=False, effort=5)
    assert row.rate(plan) <= row.zero_bubble[(1, 1.5, 2).index(times)] + ROUNDING


@every_row
def test_zb_v(row):
    plan = row.plan(row.ranks, v=True)
    assert row.rate(plan) <= row.zb_v + ROUNDING
    assert plan.timeline.span <= row.span + 0.5
    assert row.plan(row.ranks, v=True, objective="makespan").timeline.makespan <= row.makespan


@every_row
def test_v_half_and_v_min(row):
    half, least = (row.plan(memory, v=True, release=0.0) for memory in ((row.ranks + 2) // 2, (row.ranks + 4) // 3))
    assert row.rate(half) <= row.v_half + ROUNDING
    assert row.rate(least) <= row.v_min + ROUNDING


@pytest.mark.parametrize("row", ROWS[3:], ids=NAMES[3:])
def test_there_is_room_above_v_min_where_forwards_and_weight_gradients_differ(row):
    """More than a tenth of the published bubble is gone."""
    plan = row.plan((row.ranks + 4) // 3, v=True, release=0.0)
    assert row.rate(plan) < 0.9 * row.v_min


def test_there_is_room_by_the_makespan():
    """ZB-V takes 75.5, and four stages per rank in a loop less, in the same memory."""
    plan = ps.plan(ranks=8, microbatches=24, memory_limit=8, effort=0.3)
    assert (plan.value, plan.is_optimal) == (73.75, True)


#: (F, I, W) of a rank, ranks and microbatches.
SIZES = [((1, 1, 1), 4, 8), ((4, 4, 2), 4, 12), ((2, 2, 3), 3, 9)]


@pytest.mark.parametrize(("costs", "p", "m"), SIZES)
def test_closed_forms_of_the_makespan(costs, p, m):
    """At the memory of each schedule, one or two stages per rank."""
    f, b, w = costs
    bubbles = [
        (1, m, (p - 1) * (f + b + w)),  # GPipe
        (1, p, (p - 1) * (f + b + w)),  # 1F1B
        (1, p, (p - 1) * (f + b - w) if w <= f else (p - 1) * b),  # ZB-H1
        (2, p + (p - 1) / 2, (p - 1) * (f + b + w) / 2),  # Interleaved 1F1B
        (2, m, (p - 1) * (f + b + w) / 2),  # LoopedBFS
        *([(2, p, (p - 1) * (f + b - w) / 2)] if w <= f else []),  # the same with zero bubbles
    ]
    for stages, memory, bubble in bubbles:
        placement = Placement.loop(p, stages * p)
        of_ranks = ps.Costs(forward=f, backward_input=b, backward_weight=w).of_ranks(placement)
        plan = ps.plan(of_ranks, placement=placement, microbatches=m, memory_limit=memory, effort=0.1)
        assert plan.value <= m * (f + b + w) + bubble + 1e-9


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24)])
def test_the_closed_form_of_the_v_family(p, m):
    """(6p - 1 - 3k) / 2 of a rank's F, with the memory of k stages, from V-Min to three quarters of ZB-V's.

    Above that, the best known are up to 1 longer. With 4 ranks and k = 7, 40 s of exact search found nothing better.
    """
    placement = Placement.v(p, 2 * p)
    for held in range(2 * ((p + 4) // 3), 3 * p // 2 + 1):
        sizes = {"microbatches": m, "memory_limit": held / 2, "objective": "span", "effort": 0.3}
        plan = ps.plan(ps.Costs().of_ranks(placement), placement=placement, **sizes)
        assert plan.value <= 3 * m + max(0, 6 * p - 1 - 3 * held) / 2, held


@pytest.mark.parametrize(("costs", "p", "m"), SIZES)
def test_the_closed_form_of_zb_h2(costs, p, m):
    """A bubble of the span, in almost twice the memory."""
    f, b, w = costs
    of_ranks = ps.Costs(forward=f, backward_input=b, backward_weight=w)
    sizes = {"ranks": p, "microbatches": m, "memory_limit": 2 * p - 1, "stages_per_rank": 1}
    plan = ps.plan(of_ranks, **sizes, objective="span", effort=0.3)
    assert plan.value <= m * (f + b + w) + max(0, (p - 1) * (f + b - 2 * w)) + 1e-9
