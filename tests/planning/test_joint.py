"""Partitions improved against schedules: never worse than the dynamic program alone, nor than an even split."""

import random
from itertools import product

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.planning.joint import default_starts, improve, neighbours
from penstock.planning.layers import Partition, stage_costs
from penstock.planning.partition import PartitionProblem

GENERATORS = {
    "loop": {1: ("1F1B", "ZB-H1", "GPipe"), 2: ("Interleaved1F1B", "InterleavedZeroBubble")},
    "v": {2: ("ZBVZeroBubble", "V-Half", "V-Min")},
}


def best_generator(costs, ranks, stages_per_rank, kind, microbatches, limit):
    """Return a function from a partition to the makespan of the best generator that fits into memory."""
    schedules = [ps.build(name, ranks=ranks, microbatches=microbatches) for name in GENERATORS[kind][stages_per_rank]]

    def evaluate(partition):
        of_stages = stage_costs(costs, partition)
        timelines = [ps.simulate(schedule, of_stages) for schedule in schedules]
        return min(
            (each.makespan for each in timelines if limit is None or max(each.peak_memory) <= limit + 1e-9),
            default=None,
        )

    return evaluate


def random_case(source):
    kind, stages_per_rank = source.choice([("loop", 1), ("loop", 1), ("loop", 2), ("v", 2)])
    ranks = source.choice([2, 3, 4])
    stages = ranks * stages_per_rank
    layers = stages + source.randint(1, 10)
    forward = [source.choice([1, 1, 1, 2])] * layers
    forward[0], forward[-1] = source.uniform(0, 3), source.uniform(1, 5)
    costs = ps.Costs(
        forward=forward,
        backward_input=forward,
        backward_weight=source.choice([1, 0.5]),
        activation=source.choice([1, forward]),
        static=source.choice([0, 1]),
        latency=source.choice([0, 0.3]),
    )
    microbatches = source.randint(2, 2 * ranks)
    unlimited = best_generator(costs, ranks, stages_per_rank, kind, microbatches, None)
    even = stage_costs(costs, Partition.even(layers, stages))
    schedule = ps.build(GENERATORS[kind][stages_per_rank][0], ranks=ranks, microbatches=microbatches)
    limit = source.choice([None, None, max(ps.simulate(schedule, even).peak_memory) * source.uniform(0.7, 1.3)])
    problem = PartitionProblem.of(costs, schedule.placement, microbatches=microbatches, memory_limit=limit)
    evaluate = unlimited if limit is None else best_generator(costs, ranks, stages_per_rank, kind, microbatches, limit)
    return problem, evaluate


def check_cases(cases, seed):
    """Return how many cases were improved beyond every start."""
    source = random.Random(seed)
    improved = 0
    for _ in range(cases):
        problem, evaluate = random_case(source)
        try:
            starts = default_starts(problem)
        except PlanError:
            continue
        known = [value for value in map(evaluate, starts) if value is not None]
        try:
            found = improve(problem, evaluate, evaluations=60)
        except PlanError:
            assert not known
            continue
        assert found.value == evaluate(found.partition)
        assert problem.score(found.partition) is not None
        assert found.evaluations <= 60
        assert all(found.value <= value for value in known)
        improved += bool(known) and found.value < min(known)
        if found.is_local_optimum:
            near = [evaluate(each) for each in neighbours(found.partition) if problem.score(each) is not None]
            assert all(value is None or value >= found.value for value in near)
    return improved


def test_never_worse_than_where_it_started():
    assert check_cases(20, seed=1) > 0


@pytest.mark.full
def test_never_worse_than_where_it_started_on_many_chains():
    assert check_cases(200, seed=2) > 20


def test_the_default_starts_are_the_best_ones_and_the_even_one():
    problem = PartitionProblem.of(ps.Costs(forward=[1] * 11 + [9]), ps.Placement.loop(3, 3))
    starts = default_starts(problem)
    assert starts[:-1] == problem.best().partitions
    assert starts[-1] == Partition.even(12, 3)
    limited = PartitionProblem.of(ps.Costs(activation=[1] * 11 + [9]), ps.Placement.loop(3, 3), memory_limit=10)
    assert Partition.even(12, 3) not in default_starts(limited)


def test_an_optimum_that_scores_do_not_show_is_found():
    """The evaluation wants the cuts at 2 and 7, far from those of the scores."""
    problem = PartitionProblem.of(ps.Costs(), ps.Placement.loop(3, 3), layers=12)
    found = improve(
        problem, lambda partition: float(sum(abs(a - b) for a, b in zip(partition.cuts, (2, 7), strict=True)))
    )
    assert (found.partition.cuts, found.value, found.is_local_optimum) == ((2, 7), 0.0, True)


def test_the_best_so_far_is_returned_whenever_it_is_over():
    problem = PartitionProblem.of(ps.Costs(), ps.Placement.loop(3, 3), layers=12)
    seen = []

    def evaluate(partition):
        seen.append(partition)
        return float(abs(partition.cuts[0] - 1))

    for most, stop in product((1, 4, 9), (1, 3, 20)):
        seen.clear()
        found = improve(problem, evaluate, evaluations=most, is_over=lambda stop=stop: len(seen) >= stop)
        assert found.evaluations == len(seen) == min(most, stop)
        assert found.value == min(abs(partition.cuts[0] - 1) for partition in seen)
        assert len(set(seen)) == len(seen)


def test_values_may_have_several_numbers():
    problem = PartitionProblem.of(ps.Costs(), ps.Placement.loop(2, 2), layers=6)
    found = improve(problem, lambda partition: (1.0, float(partition.cuts[0])))
    assert found.partition.cuts == (1,)


def test_it_finds_its_way_out_of_where_nothing_fits():
    problem = PartitionProblem.of(ps.Costs(), ps.Placement.loop(2, 2), layers=30)
    found = improve(problem, lambda partition: None if partition.cuts[0] > 3 else 1.0)
    assert found.partition.cuts == (3,)
    with pytest.raises(PlanError, match="no schedule fits into memory for any of 29 partitions; raise memory_limit"):
        improve(problem, lambda partition: None)


def test_layers_that_belong_together_stay_together():
    problem = PartitionProblem.of(ps.Costs(), ps.Placement.v(2, 4), layers=8, together=[(0, 7), (3, 4)])
    found = improve(problem, lambda partition: float(partition.cuts[0]))
    assert problem.score(found.partition) is not None
