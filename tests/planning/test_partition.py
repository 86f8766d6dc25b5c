"""Cutting layers into stages: equal to trying every way to cut, under the stated objective."""

import math
import random
from fractions import Fraction
from itertools import combinations, pairwise

import pytest

import penstock as ps
from penstock.errors import CostsError, PlanError, SizeError
from penstock.planning.layers import Partition
from penstock.planning.partition import PartitionProblem

PLACEMENTS = [
    *(ps.Placement.loop(stages, stages) for stages in (1, 2, 3, 4)),
    ps.Placement.v(1, 2),
    ps.Placement.v(2, 4),
    ps.Placement.loop(1, 3),
    ps.Placement.loop(2, 4),
    ps.Placement.loop(2, 3),
    ps.Placement.v(2, 3),
    ps.Placement((0, 0, 1, 1), 2),
    ps.Placement((0, 2, 2, 0), 3),
]


def random_problem(source):
    """Draw a chain of up to 12 layers, often with heavy ends, with and without memory limits and groups."""
    placement = source.choice(PLACEMENTS)
    layers = source.randint(placement.stages, 12)

    def draw(least, most):
        if source.random() < 0.3:
            return source.randint(least, most)
        step = source.choice([1, 0.1])
        numbers = [round(source.randint(least, most) * step, 1) for _ in range(layers)]
        numbers[0] = round(numbers[0] * source.choice([1, 3]), 1)
        numbers[-1] = round(numbers[-1] * source.choice([1, 4]), 1)
        return numbers

    costs = ps.Costs(
        forward=draw(0, 4),
        backward_input=draw(1, 4),
        backward_weight=draw(0, 3),
        backward=source.choice([None, draw(1, 8)]),
        static=draw(0, 3),
        activation=draw(0, 4),
        latency=source.choice([0, 0.5, [source.randint(0, 3) for _ in range(layers - 1)]]),
    )
    limit = source.choice([None, source.randint(5, 40), [source.randint(5, 40) for _ in range(placement.ranks)]])
    together = [source.sample(range(layers), min(layers, 2))] if source.random() < 0.2 else []
    return PartitionProblem.of(
        costs,
        placement,
        layers=layers,
        microbatches=source.choice([None, 2, 8]),
        memory_limit=limit,
        splits=source.random() < 0.5,
        together=together,
    )


def literal_score(problem, bounds):
    """Compute the score with fractions, from the definition; None if the partition is not allowed."""
    costs, rank_of = problem.costs, problem.placement.rank_of

    def each(field):
        return [Fraction(str(value)) for value in costs.per_stage(field, problem.layers).tolist()]

    backward = [a + b for a, b in zip(each("backward_input"), each("backward_weight"), strict=True)]
    if not problem.splits:
        backward = each("backward") if costs.backward is not None else backward
    time = [a + b for a, b in zip(each("forward"), backward, strict=True)]
    static, activation = each("static"), each("activation")
    longest = max(sum(time[begin:end]) for begin, end in pairwise(bounds))
    loads, least, held = ([Fraction(0)] * problem.placement.ranks for _ in range(3))
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        rank = rank_of[stage]
        loads[rank] += sum(time[begin:end])
        least[rank] += sum(static[begin:end]) + sum(activation[begin:end])
        flight = Fraction(str(problem.in_flight[stage]))
        held[rank] += sum(static[begin:end]) + flight * sum(activation[begin:end])
    for rank, limit in enumerate(problem.memory_limit):
        if least[rank] > limit * (1 + 1e-9):
            return None
    for group in problem.together:
        stages = {sum(bound <= layer for bound in bounds[1:]) for layer in group}
        if len({rank_of[stage] for stage in stages}) > 1:
            return None
    if all(map(math.isinf, problem.memory_limit)):
        shares = held
    else:
        shares = [
            Fraction(0) if limit in (0, math.inf) else have / Fraction(str(limit))
            for have, limit in zip(held, problem.memory_limit, strict=True)
        ]
    latency = [Fraction(str(value)) for value in costs.per_edge("latency", problem.layers - 1).tolist()]
    crossing = [cut for stage, cut in enumerate(bounds[1:-1]) if rank_of[stage] != rank_of[stage + 1]]
    step = problem.microbatches * max(loads) + (problem.placement.ranks - 1) * longest
    return step, max(shares), 2 * sum((latency[cut - 1] for cut in crossing), Fraction(0))


def busiest_rank(problem, bounds):
    """Return the time of the busiest rank, with fractions."""
    fields = ["forward", "backward_input", "backward_weight"]
    if not problem.splits and problem.costs.backward is not None:
        fields = ["forward", "backward"]
    of_fields = [problem.costs.per_stage(field, problem.layers) for field in fields]
    loads = [Fraction(0)] * problem.placement.ranks
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        loads[problem.placement.rank_of[stage]] += sum(Fraction(str(v)) for each in of_fields for v in each[begin:end])
    return max(loads)


def literal_needs(problem):
    """Return what the fullest rank needs in any schedule, for every partition that keeps groups together."""
    needs = []
    unlimited = PartitionProblem.of(problem.costs, problem.placement, layers=problem.layers, together=problem.together)
    of_fields = [problem.costs.per_stage(field, problem.layers) for field in ("static", "activation")]
    each = [sum(Fraction(str(v)) for v in of) for of in zip(*of_fields, strict=True)]
    for bounds in all_bounds(problem):
        if literal_score(unlimited, bounds) is not None:
            loads = [Fraction(0)] * problem.placement.ranks
            for stage, (begin, end) in enumerate(pairwise(bounds)):
                loads[problem.placement.rank_of[stage]] += sum(each[begin:end])
            needs.append(max(loads))
    return needs


def all_bounds(problem):
    for cuts in combinations(range(1, problem.layers), problem.placement.stages - 1):
        yield (0, *cuts, problem.layers)


@pytest.mark.parametrize("seed", range(10))
def test_the_best_partitions_are_those_of_exhaustive_search(seed):
    """Compare 10 x 50 random problems."""
    source = random.Random(seed)
    for _ in range(50):
        problem, count = random_problem(source), source.choice([1, 3, 10])
        scores = {bounds: literal_score(problem, bounds) for bounds in all_bounds(problem)}
        expected = sorted(score for score in scores.values() if score is not None)[:count]
        if not expected:
            with pytest.raises(PlanError):
                problem.best(count)
            with pytest.raises(PlanError):
                problem.least_busy()
            continue
        busiest = min(busiest_rank(problem, bounds) for bounds, score in scores.items() if score is not None)
        assert problem.least_busy() == (float(busiest), True)
        found = problem.best(count)
        assert found.is_exact
        assert len(set(found.partitions)) == len(found.partitions)
        assert [scores[partition.bounds] for partition in found.partitions] == expected
        assert [tuple(score[:3]) for score in found.scores] == [tuple(map(float, score)) for score in expected]
        assert [problem.score(partition) for partition in found.partitions] == list(found.scores)


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_limit_is_the_smallest_for_which_there_is_a_partition(seed):
    source = random.Random(seed)
    checked = 0
    for _ in range(60):
        problem = random_problem(source)

        sums = literal_needs(problem)
        if not sums:
            continue
        needed = min(sums)
        if needed > 0:
            given = {"layers": problem.layers, "together": problem.together}
            for limit in (needed - Fraction(1, 100), needed / 2):
                with pytest.raises(PlanError, match="needs at least") as caught:
                    PartitionProblem.of(problem.costs, problem.placement, memory_limit=float(limit), **given).best(1)
                assert caught.value.smallest == float(needed)
            assert PartitionProblem.of(problem.costs, problem.placement, memory_limit=float(needed), **given).best(1)
            checked += 1
    assert checked > 20


def test_spare_layers_go_where_little_is_in_flight():
    """All cuts of 4 equal layers into 3 stages have a stage of 2; the last stage holds the fewest microbatches."""
    found = PartitionProblem.of(ps.Costs(), ps.Placement.loop(3, 3), layers=4).best()
    assert [partition.sizes for partition in found.partitions] == [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    assert [score.time for score in found.scores] == [6, 6, 6]
    assert [score.memory for score in found.scores] == [3, 4, 6]


def test_heavy_ends_get_few_layers():
    costs = ps.Costs(forward=[2, *[1] * 12, 4], backward_input=0, backward_weight=0)
    assert PartitionProblem.of(costs, ps.Placement.loop(4, 4)).best(1).scores[0].time == 5
    found = PartitionProblem.of(costs, ps.Placement.v(2, 4)).best(1)
    assert found.scores[0].time == 9


def test_large_problems_say_when_they_are_not_exact():
    costs = ps.Costs(forward=[random.Random(layer).randint(50, 150) for layer in range(48)], backward_weight=0)
    loop = PartitionProblem.of(costs, ps.Placement.loop(8, 24)).best(2, most_states=50)
    assert not loop.is_exact
    assert len(loop.partitions) == 2
    assert PartitionProblem.of(costs, ps.Placement.loop(8, 8)).best(2, most_states=50).is_exact
    assert PartitionProblem.of(costs, ps.Placement.v(8, 16)).best(2).is_exact


def test_numbers_may_have_any_number_of_digits():
    """In integers, these take far more than 64 bits."""
    source = random.Random(7)
    costs = ps.Costs(forward=[source.uniform(1e-20, 1e12) for _ in range(10)], activation=[1 / 3] * 10)
    problem = PartitionProblem.of(costs, ps.Placement.v(2, 4))
    scores = sorted(literal_score(problem, bounds) for bounds in all_bounds(problem))
    assert [score[:3] for score in problem.best(3).scores] == [tuple(map(float, score)) for score in scores[:3]]


def test_tied_layers_share_a_rank():
    costs = ps.Costs(forward=[1] * 8)
    found = PartitionProblem.of(costs, ps.Placement.v(2, 4), together=[(0, 7)]).best()
    assert found.partitions == PartitionProblem.of(costs, ps.Placement.v(2, 4)).best().partitions
    loop = PartitionProblem.of(costs, ps.Placement.loop(2, 3), together=[(0, 7)])
    assert all(loop.score(partition) is not None for partition in loop.best().partitions)
    with pytest.raises(PlanError, match=r"no partition of 8 layers into 4 stages has .* on one rank: \(0, 7\)"):
        PartitionProblem.of(costs, ps.Placement.loop(2, 4), together=[(7, 0)]).best()


def test_a_message_names_the_rank_that_binds_and_what_it_needs():
    costs = ps.Costs(static=[10, 1, 1, 1], activation=[2, 1, 1, 1])
    with pytest.raises(PlanError, match=r"rank 0 needs at least 12 of its limit 8, .* \(layers 0 to 0\)") as caught:
        PartitionProblem.of(costs, ps.Placement.loop(2, 2), memory_limit=[8, 100]).best()
    assert (caught.value.rank, caught.value.smallest, caught.value.field) == (0, 12, "memory_limit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 3}, "4 stages need at least 4 layers, but there are 3"),
        ({}, "pass layers="),
        ({"layers": 8, "memory_limit": [1, 2]}, "memory_limit has 2 numbers, but there are 4 ranks"),
        ({"layers": 8, "memory_limit": -1}, "memory_limit must be at least 0, got -1"),
        ({"layers": 8, "memory_limit": "much"}, "memory_limit must be a number, got 'much'"),
        ({"layers": 8, "in_flight": math.inf}, "in_flight must be finite"),
        ({"layers": 8, "together": [(0, 8)]}, "together must be at most 7, got 8"),
        ({"layers": 8, "microbatches": 0}, "microbatches must be at least 1"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises((SizeError, CostsError), match=message):
        PartitionProblem.of(ps.Costs(), ps.Placement.loop(4, 4), **arguments)


def test_a_partition_of_other_sizes_has_no_score():
    problem = PartitionProblem.of(ps.Costs(), ps.Placement.loop(4, 4), layers=8)
    with pytest.raises(SizeError, match="the partition has 8 layers in 2 stages, but there are 8 layers and 4 stages"):
        problem.score(Partition.even(8, 2))


def test_the_stages_of_a_rank_are_of_even_length_where_possible():
    """Every cut that gives both ranks 8 layers has the same busiest rank."""
    costs = ps.Costs(forward=[1] * 16)
    for placement in (ps.Placement.v(2, 4), ps.Placement.loop(2, 4)):
        found = PartitionProblem.of(costs, placement).best(3)
        assert found.partitions[0].sizes == (4, 4, 4, 4)
        assert [(score.time, score.longest) for score in found.scores] == [(24, 12), (24, 15), (24, 15)]
        assert [score.step for score in found.scores] == [8 * 24 + 12, 8 * 24 + 15, 8 * 24 + 15]
