"""Many samples: each is what one simulation gives, and chance begins where the seed says."""

import numpy as np
import pytest

import penstock as ps

SCHEDULE = ps.build("1F1B", ranks=4, microbatches=8)


def test_a_list_of_costs():
    given = [ps.Costs(forward=f, latency=f / 4) for f in (1, 2, 3)]
    samples = ps.simulate_many(SCHEDULE, given)
    timelines = [ps.simulate(SCHEDULE, costs) for costs in given]
    assert samples.makespan.tolist() == [timeline.makespan for timeline in timelines]
    assert samples.span.tolist() == [timeline.span for timeline in timelines]


def test_without_chance_all_are_alike():
    assert set(ps.simulate_many(SCHEDULE, samples=5).makespan.tolist()) == {33.0}


def test_noise_and_stragglers():
    noisy = ps.simulate_many(SCHEDULE, noise=0.1, samples=300, seed=3)
    assert noisy.makespan.tolist() == ps.simulate_many(SCHEDULE, noise=0.1, samples=300, seed=3).makespan.tolist()
    assert noisy.makespan.tolist() != ps.simulate_many(SCHEDULE, noise=0.1, samples=300, seed=4).makespan.tolist()
    assert noisy.percentile(5) < noisy.percentile(50) < noisy.percentile(95)
    assert 33 < noisy.percentile(50) < 40
    slow_rank = ps.simulate_many(SCHEDULE, stragglers=[0, 0, 0.5, 0], samples=300)
    assert np.std(slow_rank.makespan) > np.std(noisy.makespan)
    assert "5 % within" in repr(noisy)


def test_the_factors_have_a_mean_of_one():
    alone = ps.build("ForwardOnly", ranks=1, microbatches=200)
    assert ps.simulate_many(alone, noise=0.3, samples=500).makespan.mean() == pytest.approx(200, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"noise": -1}, "noise must be at least 0"),
        ({"noise": float("nan")}, "noise must be finite"),
        ({"noise": 11}, "noise must be at most 10"),
        ({"noise": 10**400}, "noise must be a number"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"costs": [ps.Costs()], "noise": 0.5}, "noise and stragglers need a single Costs"),
        ({"costs": [ps.Costs(), ps.Costs(activation=(1, 2))]}, "activation has 2 numbers, but there are 4 stages"),
        ({"stragglers": [0.1]}, "stragglers has 1 numbers, but there are 4 ranks"),
        ({"stragglers": "no"}, "stragglers"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"costs": []}, "costs must be Costs or a list of them"),
        ({"costs": [1]}, "costs must be Costs or a list of them"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ps.PenstockError, match=words):
        ps.simulate_many(SCHEDULE, **arguments)


def test_percentiles_are_from_0_to_100():
    with pytest.raises(ps.CostsError, match="between 0 and 100"):
        ps.simulate_many(SCHEDULE, samples=2).percentile(101)


def test_transfers_vary_too():
    schedule = ps.build("ForwardOnly", ranks=2, microbatches=1)
    costs = ps.Costs(forward=0, latency=1)
    for each in (schedule, ps.lower(schedule)):
        makespans = ps.simulate_many(each, costs, noise=0.5, samples=400).makespan
        assert makespans.std() > 0.3
        assert makespans.mean() == pytest.approx(1, rel=0.1)


def test_numpy_numbers_iterators_and_nothing_to_do():
    assert len(ps.simulate_many(SCHEDULE, noise=np.float32(0.1), stragglers=np.zeros(4), samples=3)) == 3
    assert ps.simulate_many(SCHEDULE, iter([ps.Costs()])).makespan.tolist() == [33]
