"""Schedules whose weight gradients are placed for given costs: the published figures of ZB-V, and what always holds."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import interpreter
import penstock as ps
from penstock.schedules.registry import RECIPES

FITTING = [recipe for recipe in RECIPES if recipe.fits_costs]

#: (F, I, W) of a rank, transfer, ranks, microbatches; then what ZB-V has: bubble rate of the span, span, makespan.
FIGURES = [
    ((1, 1, 1), 0, 4, 8, 0.0, 24, 25.5),
    ((1, 1, 1), 0, 8, 24, 0.0, 72, 75.5),
    ((1000, 1000, 1000), 10, 4, 12, 0.0039, 36140, 37650),
    ((18522, 18086, 9337), 601, 8, 24, 0.0703, 1186022, 1188542),
    ((29718, 29444, 19927), 527, 8, 24, 0.0403, 1977884, 2020594),
]

#: The share of an activation that I releases: none, or that of the models in the last two rows, 32 h of 34 h + 5 a s.
RELEASES = [0.0, 1 - 32 * 2304 / (34 * 2304 + 5 * 24 * 1024), 1 - 32 * 4096 / (34 * 4096 + 5 * 32 * 1024)]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("costs", "transfer", "p", "m", "rate", "span", "makespan"), FIGURES)
def test_the_published_figures_of_zb_v_are_met(costs, transfer, p, m, rate, span, makespan, release):
    """In the independent evaluator. It holds every activation until W: even so the memory is that of 1F1B."""
    forward, backward_input, backward_weight = (cost / 2 for cost in costs)
    of_stages = ps.Costs(
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        latency=transfer,
        activation=0.5,
        input_release=release,
    )
    schedule = ps.build("ZBVZeroBubble", ranks=p, microbatches=m, costs=of_stages)
    run = interpreter.run(
        [[str(cell) for cell in row] for row in schedule.actions],
        schedule.stages,
        interpreter.Costs(*(Fraction(cost, 2) for cost in costs), Fraction(transfer)),
    )
    assert round(float(1 - m * sum(costs) / run.span), 4) <= rate
    assert run.span < span + 1  # the table leaves out half a unit
    assert run.makespan <= makespan
    assert max(run.peaks) <= 2 * p
    timeline = ps.simulate(schedule, of_stages)
    assert (timeline.span, timeline.makespan, max(timeline.peak_memory)) == (run.span, run.makespan, pytest.approx(p))


def test_a_picture():
    """At costs of 2, 2 and 1, rank 0 has a gap before 0I2 for 3W2; on rank 1 what rank 0 needs goes before 2W1."""
    plain = ps.build("ZBVZeroBubble", ranks=2, microbatches=3)
    costs = ps.Costs(forward=2, backward_input=2, backward_weight=1)
    fitted = ps.build("ZBVZeroBubble", ranks=2, microbatches=3, costs=costs)
    assert plain.grid(steps=range(10, 19)).splitlines() == [
        "step   10  11  12  13  14  15  16  17  18",
        "rank 0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "rank 1 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]
    assert fitted.grid(steps=range(10, 19)).splitlines() == [
        "step   10  11  12  13  14  15  16  17  18",
        "rank 0 0W0 3F2 3I2 0I1 3W2 0W1 0I2 0W2",
        "rank 1 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2",
    ]
    assert fitted.grid(steps=range(10)) == plain.grid(steps=range(10))
    assert (ps.simulate(plain, costs).span, ps.simulate(fitted, costs).span) == (32, 31)
    assert fitted.metadata == {"name": "ZBVZeroBubble, fitted"}


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 13), (8, 24)])
def test_zb_v_is_the_best_there_is_at_two_two_one(p, m):
    """The bound of docs/decisions.md, for all orders that hold activations until W in the memory of 2p stages."""
    costs = ps.Costs(forward=2, backward_input=2, backward_weight=1)
    schedule = ps.build("ZBVZeroBubble", ranks=p, microbatches=m, costs=costs)
    assert ps.simulate(schedule, costs).span - 2 * m * 5 == 2 * (p - 1) * 2 - (2 * p - 1)


@st.composite
def cases(draw):
    recipe, ranks = draw(st.sampled_from(FITTING)), draw(st.integers(1, 6))
    microbatches = draw(st.integers(1, 3 * ranks))
    stages = ranks * recipe.stages_per_rank
    times = st.integers(0, 9) | st.floats(0.1, 9)

    def amount(count, numbers=times):
        return draw(numbers | st.lists(numbers, min_size=count, max_size=count))

    given = {field: amount(stages) for field in ("forward", "backward_input", "backward_weight", "activation")}
    given |= {"latency": amount(stages - 1), "dispatch": draw(st.sampled_from([0, 0, 0.25]))}
    given |= {"input_release": amount(stages, st.floats(0.01, 1) | st.just(0)), "static": amount(stages)}
    if draw(st.booleans()):
        given |= {"bandwidth": 2, "activation_bytes": amount(stages - 1, st.integers(1, 3)), "gradient_bytes": 1}
    return recipe.name, ranks, microbatches, ps.Costs(**given)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_it_runs_and_is_never_worse(case):
    name, ranks, microbatches, costs = case
    plain = ps.build(name, ranks=ranks, microbatches=microbatches)
    fitted = ps.build(name, ranks=ranks, microbatches=microbatches, costs=costs)
    ps.verify(ps.lower(fitted))
    before, after = ps.simulate(plain, costs), ps.simulate(fitted, costs)
    assert after.span <= before.span * (1 + 1e-8)
    for held, was in zip(after.peak_memory, before.peak_memory, strict=True):
        assert held <= was * (1 + 1e-8)
    for row, old in zip(fitted.actions, plain.actions, strict=True):
        assert sorted(map(str, row)) == sorted(map(str, old))
        others = [[str(action) for action in actions if "W" not in str(action)] for actions in (row, old)]
        assert others[0] == others[1]
    assert ps.build(name, ranks=ranks, microbatches=microbatches, costs=costs) == fitted


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 5), (2, 1), (3, 2), (4, 8), (8, 24), (16, 3)])
def test_at_equal_costs_zb_v_is_as_good_as_it_is(ranks, microbatches):
    for unit in (1, 0.1):
        costs = ps.Costs(forward=unit, backward_input=unit, backward_weight=unit)
        plain = ps.build("ZBVZeroBubble", ranks=ranks, microbatches=microbatches)
        fitted = ps.build("ZBVZeroBubble", ranks=ranks, microbatches=microbatches, costs=costs)
        if microbatches >= 2 * ranks:
            assert fitted == plain
            assert fitted.metadata == {"name": "ZBVZeroBubble"}
        assert ps.simulate(fitted, costs).span <= ps.simulate(plain, costs).span * (1 + 1e-8)


def test_only_what_splits_every_backward_can_be_fitted():
    for recipe in RECIPES:
        schedule = ps.build(recipe.name, ranks=4, microbatches=8)
        kinds = {part.computation_type.value for row in schedule.actions for cell in row for part in cell.parts}
        joined = any(cell.sub_actions for row in schedule.actions for cell in row)
        assert recipe.fits_costs is (kinds == {"F", "I", "W"} and not joined), recipe.name


def test_costs_that_cannot_be_used():
    with pytest.raises(ps.CostsError, match="1F1B does not depend on costs; omit costs=, or choose one"):
        ps.build("1F1B", ranks=2, microbatches=2, costs=ps.Costs())
    with pytest.raises(ps.CostsError, match=r"costs must be Costs, e\.g\."):
        ps.build("ZBVZeroBubble", ranks=2, microbatches=2, costs={"forward": 1})
    with pytest.raises(ps.CostsError, match="forward has 3 numbers, but there are 4 stages"):
        ps.build("ZBVZeroBubble", ranks=2, microbatches=2, costs=ps.Costs(forward=[1, 2, 3]))
