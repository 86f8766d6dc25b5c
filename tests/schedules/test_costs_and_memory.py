"""What the papers promise, exactly, in an independent evaluator and in the simulator: bubbles, activations held.

A rank's costs for one microbatch are (F, I, W), shared equally by its stages; activations are held until W, and counted
in those of a whole rank.
"""

from fractions import Fraction

import pytest

import interpreter
import penstock as ps

COSTS = [(1, 1, 1), (4, 4, 2), (3, 4, 2), (6, 5, 3)]


def evaluate(name, ranks, microbatches, costs=(1, 1, 1), transfer=0, stages_per_rank=None):
    """The bubble of the makespan, the bubble of the span, the largest and the smallest peak of a rank."""
    schedule = ps.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    share = schedule.stages // ranks
    rows = [[str(cell) for cell in row] for row in schedule.actions]
    run = interpreter.run(
        rows, schedule.stages, interpreter.Costs(*(Fraction(cost, share) for cost in costs), Fraction(transfer))
    )
    ideal = microbatches * sum(costs)
    peaks = [Fraction(peak, share) for peak in run.peaks]
    simulated(schedule, costs, transfer, run)
    return run.makespan - ideal, run.span - ideal, max(peaks), min(peaks)


def simulated(schedule, costs, transfer, run):
    """The simulator gives the same, exactly: whole numbers are exact in floating point, so a rank costs share times."""
    share = schedule.stages // schedule.ranks
    forward, backward_input, backward_weight = costs
    timeline = ps.simulate(
        schedule,
        ps.Costs(
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            latency=transfer * share,
        ),
    )
    assert Fraction(timeline.makespan) == run.makespan * share
    assert Fraction(timeline.span) == run.span * share
    assert [Fraction(peak) for peak in timeline.peak_memory] == run.peaks
    assert timeline.ideal == schedule.microbatches * sum(costs) * share
    assert timeline.bubble_rate == pytest.approx(float(1 - timeline.ideal / timeline.makespan))


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (4, 13), (8, 24)])
def test_one_stage_per_rank(p, m, costs):
    f, b, w = costs
    assert evaluate("GPipe", p, m, costs)[::2] == ((p - 1) * (f + b + w), m)
    assert evaluate("1F1B", p, m, costs)[::2] == ((p - 1) * (f + b + w), p)
    assert evaluate("ZB-H1", p, m, costs)[::2] == ((p - 1) * (f + b - w), p)
    makespan, span, most, least = evaluate("ZB-H2", p, 2 * m, costs)
    assert (span, most, least) == ((p - 1) * (f + b - 2 * w), 2 * p - 1, 2 * p - 1)
    assert makespan >= (p - 1) * f


def test_zb_h1_with_dear_weight_gradients():
    assert evaluate("ZB-H1", 4, 8, (2, 2, 3))[0] == 3 * 2


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("p", "rounds"), [(2, 3), (4, 2), (4, 3), (8, 3)])
def test_interleaved(p, rounds, v, costs):
    f, b, w = costs
    bubble, _, most, _ = evaluate("Interleaved1F1B", p, p * rounds, costs, stages_per_rank=v)
    assert (bubble, most) == (Fraction((p - 1) * (f + b + w), v), p + Fraction(p - 1, v))


@pytest.mark.parametrize("costs", [(1, 1, 1), (4, 4, 2)])
@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 12, 3), (8, 24, 2)])
def test_interleaved_zero_bubble(p, m, v, costs):
    f, b, w = costs
    bubble, _, most, _ = evaluate("InterleavedZeroBubble", p, m, costs, stages_per_rank=v)
    assert (bubble, most) == (Fraction((p - 1) * (f + b - w), v), p)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_looped_bfs(p, m):
    bubble, _, most, _ = evaluate("LoopedBFS", p, m, (2, 2, 2))
    assert (bubble, most) == (Fraction((p - 1) * 6, 2), m)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 24)])
def test_zb_v(p, m):
    assert evaluate("ZBVZeroBubble", p, m) == (Fraction(p - 1, 2), 0, p, p)
    assert evaluate("ZBVZeroBubble", p, m, (4, 4, 2))[:2] == (2 * (p - 1), 2 * (p - 1))


#: The activations that every rank holds: the fraction that gives the schedule its name.
MEMORY = {"V-Half": lambda p: p // 2 + 1, "V-Min": lambda p: (p + 4) // 3}


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("p", range(1, 21))
@pytest.mark.parametrize("m", [1, 2, 7, 60])
def test_memory_of_v_half_and_v_min(name, p, m):
    most, least = evaluate(name, p, m)[2:]
    assert most <= MEMORY[name](p)
    if m >= 3 * p:
        assert least == most == MEMORY[name](p)


@pytest.mark.parametrize("p", range(1, 21))
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_bubble_of_v_half_and_v_min(p, rounds):
    """(6p - 1 - 3k)F/2 on any number of ranks, if each holds the activations of k stages; at most 0 is no bubble."""
    for name in ("V-Half", "V-Min"):
        makespan, span, _, _ = evaluate(name, p, rounds * p)
        if (p, rounds) != (2, 1):  # with 2 microbatches there is too little work to fill both ends
            closed_form = Fraction(6 * p - 1 - 3 * 2 * MEMORY[name](p), 2)
            assert span == max(closed_form, 0), name
            assert makespan == max(closed_form, Fraction(p - 1, 2)), name


#: The makespans, in forwards of a stage, that public schedulers reach in the same memory.
KNOWN = {
    "V-Half": {(5, 20): 131, (9, 36): 239, (13, 52): 347, (17, 68): 455},
    "V-Min": {(5, 20): 134, (8, 32): 218, (11, 44): 302, (14, 56): 386, (17, 68): 470, (20, 80): 554},
}


@pytest.mark.parametrize(("name", "p", "m"), [(name, *sizes) for name, figures in KNOWN.items() for sizes in figures])
def test_known_makespans_are_met(name, p, m):
    makespan, _, most, _ = evaluate(name, p, m)
    assert 2 * (makespan + 3 * m) <= KNOWN[name][p, m]
    assert most == MEMORY[name](p)


#: (F, I, W), transfer, ranks, microbatches; then the bubble rates of the span to meet or beat.
FIGURES = [
    (
        (1, 1, 1),
        0,
        4,
        8,
        {"1F1B": 0.2727, "ZB-H1": 0.1111, "ZB-H2": 0.0, "ZBVZeroBubble": 0.0, "V-Half": 0.0943, "V-Min": 0.1864},
    ),
    (
        (1, 1, 1),
        0,
        8,
        24,
        {"1F1B": 0.2258, "ZB-H1": 0.0886, "ZB-H2": 0.0, "ZBVZeroBubble": 0.0, "V-Half": 0.1056, "V-Min": 0.1579},
    ),
    (
        (1000, 1000, 1000),
        10,
        4,
        12,
        {"1F1B": 0.2039, "ZB-H1": 0.0798, "ZB-H2": 0.0017, "V-Half": 0.0702, "V-Min": 0.1441},
    ),
    ((18522, 18086, 9337), 601, 8, 24, {"1F1B": 0.2431, "ZB-H1": 0.1585, "V-Half": 0.1702, "V-Min": 0.3353}),
    ((29718, 29444, 19927), 527, 8, 24, {"1F1B": 0.2347, "ZB-H1": 0.1323, "V-Half": 0.1447, "V-Min": 0.2721}),
]


@pytest.mark.parametrize(("costs", "transfer", "p", "m", "figures"), FIGURES)
def test_published_figures_are_met(costs, transfer, p, m, figures):
    for name, figure in figures.items():
        bubble = evaluate(name, p, m, costs, transfer)[1]
        assert float(bubble / (bubble + m * sum(costs))) <= figure + 0.00005, name
