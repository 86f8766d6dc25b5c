"""The simulator and the machine with a heap and queues agree, on every start and every peak."""

import random
import re
from fractions import Fraction

import pytest

import penstock as ps
from event_simulation import Prices, Simulation
from mutants import some_edges, text_rows
from penstock.schedules.registry import RECIPES

CASES = 2_000
PARTS = 8
LOWERINGS = [
    None,
    {},
    {"unshard": False},
    {"unshard": False, "reduce": False, "merge_backward": True},
    {"max_active_stages": 1},
    {"defer_receives": True},
    {"defer_receives": True, "look_ahead": 1},
]


def some_schedule(chance, *, edges=False):
    recipe = chance.choice(RECIPES)
    stages = chance.choice([1, 2, 3]) if recipe.any_stages else None
    schedule = ps.build(
        recipe.name, ranks=chance.randint(1, 4), microbatches=chance.randint(1, 6), stages_per_rank=stages
    )
    if edges:
        schedule = schedule.with_edges(some_edges(schedule.stages, chance))
    options = chance.choice(LOWERINGS)
    schedule = schedule if options is None else ps.lower(schedule, **options)
    for _ in range(chance.choice([0, 0, 3, 6])):
        rows = text_rows(schedule)
        row = chance.choice([row for row in rows if row])
        row.insert(chance.randrange(len(row)), row.pop(chance.randrange(len(row))))
        size = {"placement": schedule.placement, "microbatches": schedule.microbatches}
        moved = ps.Schedule(rows, **size, edges=schedule.edges)
        schedule = schedule if ps.check(moved, model=ps.CommModel("eager", "message")) else moved
    return schedule


def some_model(chance, schedule):
    buffering = chance.choice(["rendezvous", "bounded(1)", "bounded(2)", "eager"])
    model = ps.CommModel(buffering, chance.choice(ps.LANES))
    if schedule.compute_only or ps.check(schedule, model=model):
        return ps.CommModel("eager", "message")
    return model


def some_costs(chance, schedule):
    """Binary fractions: exact in floating point as well."""
    stages, edges = schedule.stages, len(schedule.edges)

    def amount(count, most=12):
        if chance.random() < 0.5:
            return [chance.randint(0, most) / 4] * count
        return [chance.randint(0, most) / 4 for _ in range(count)]

    whole = {"forward": amount(stages), "backward_input": amount(stages), "backward_weight": amount(stages)}
    if chance.random() < 0.3:
        whole["backward"] = amount(stages)
    whole |= {"latency": amount(edges, chance.choice([0, 8])), "dispatch": chance.choice([0, 0, 0.25])}
    if chance.random() < 0.3 and edges:
        whole |= {"bandwidth": 4.0, "activation_bytes": [b + 1 for b in amount(edges)]}
        if chance.random() < 0.5:
            whole["gradient_bytes"] = amount(edges)
    if chance.random() < 0.5:
        whole["edge_memory"] = amount(edges)
    whole |= {"overlap": chance.choice([1, 0.5, 0.75]), "unshard": amount(stages, 3), "reduce": amount(stages, 3)}
    whole |= {"activation": amount(stages), "input_release": chance.choice([0, 0.25, 1]), "static": amount(stages)}
    return ps.Costs(**whole)


def prices(costs, schedule):
    stages, edges = schedule.stages, schedule.edges

    def exact(values):
        return [Fraction(value) for value in values]

    fields = ["forward", "backward_input", "backward_weight", "unshard", "reduce"]
    fields += ["activation", "input_release", "static"]
    given = {name: exact(costs.to_dict()[name]) if isinstance(costs.to_dict()[name], list)
             else exact([costs.to_dict()[name]] * stages) for name in fields}  # fmt: skip
    both = [i + w for i, w in zip(given["backward_input"], given["backward_weight"], strict=True)]
    table = costs.to_dict()
    size = exact(table.get("activation_bytes") or [0] * len(edges))
    back = exact(table["gradient_bytes"]) if "gradient_bytes" in table else size
    speed = Fraction(table["bandwidth"]) if "bandwidth" in table else None
    latency = exact(table["latency"])
    waiting = exact(table["edge_memory"]) if table["edge_memory"] else [Fraction(0)] * len(edges)

    def of_links(value, *, backward=False):
        """From what the edges of a link cost to what the link does."""
        carried = {}
        for number, edge in enumerate(edges):
            for target in edge.targets if edge.gradient or not backward else ():
                carried.setdefault((edge.source, target), []).append(number)
        return {ends: value(numbers) for ends, numbers in carried.items()}

    def time(sizes):
        return lambda numbers: (
            max(latency[n] for n in numbers) + (sum(sizes[n] for n in numbers) / speed if speed else 0)
        )

    return Prices(
        **given,
        backward=exact(table["backward"]) if "backward" in table else both,
        transfer_forward=of_links(time(size)),
        transfer_backward=of_links(time(back), backward=True),
        waiting=of_links(lambda numbers: sum(waiting[n] for n in numbers)),
        dispatch=Fraction(table["dispatch"]),
        overlap=Fraction(table["overlap"]),
    )


def agree(schedule, costs, model):
    timeline = ps.simulate(schedule, costs, model=model)
    rows = text_rows(schedule)
    expected = Simulation(
        rows, list(schedule.placement.rank_of), prices(costs, schedule), model.buffering, model.lanes
    ).run()
    places = [(rank, place) for rank, row in enumerate(rows) for place in range(len(row))]
    first = timeline.node_start[timeline.step_graph.events.node] - timeline.start  # times count from the first start
    origin = Fraction(first[0]) if len(first) else 0
    described = f"{model}\n{costs}\n{schedule.grid(aligned=False)}"
    assert [Fraction(when) + origin for when in timeline.start.tolist()] == [expected.starts[at] for at in places], (
        described
    )
    assert [Fraction(when) + origin for when in timeline.end.tolist()] == [expected.ends[at] for at in places], (
        described
    )
    assert [Fraction(peak) for peak in timeline.peak_memory] == expected.peaks, described
    assert [Fraction(curve.values.max()) for curve in timeline.memory] == expected.peaks, described
    timed = [at for at in places if is_timed(rows[at[0]][at[1]], costs, expected, at)]
    assert Fraction(timeline.makespan) == max(expected.ends[at] for at in timed) - min(
        expected.starts[at] for at in timed
    )
    check_causes(timeline, expected, rows)
    assert abs(sum(timeline.idle) - sum(timeline.idle_by_cause.values())) < 1e-9


def check_causes(timeline, expected, rows):
    """In the middle of every idle interval its cause holds, by what the machine has seen."""
    for wait in timeline.waits:
        when = Fraction(wait.start) + Fraction(wait.end - wait.start) / 2 + Fraction(timeline.extent.origin)
        assert not any(
            expected.starts[wait.rank, place] < when < expected.ends[wait.rank, place]
            for place, cell in enumerate(rows[wait.rank])
            if "SEND" not in cell and "RECV" not in cell
        )
        if wait.before is None:
            continue
        place = next(
            place
            for place, cell in enumerate(rows[wait.rank])
            if cell == str(wait.before) and expected.starts[wait.rank, place] > when
        )
        states = [
            expected.state(message, makers, when) for message, makers in expected.needs(str(wait.before), wait.rank)
        ]
        if wait.cause in ("activation", "gradient", "unsent", "lane", "transfer"):
            assert {"activation": "unmade", "gradient": "unmade"}.get(wait.cause, wait.cause) in states, (wait, states)
        elif wait.cause == "dispatch":
            assert when < expected.reached_at[wait.rank, place]
        elif wait.cause == "order":
            later = [cell for cell in rows[wait.rank][place + 1 :] if str(wait.could_run) == cell]
            assert {expected.state(*need, when) for need in expected.needs(later[0], wait.rank)} <= {"there", "lane"}


def is_timed(cell, costs, expected, at):
    if "SEND" in cell or "RECV" in cell:
        return False
    return costs.dispatch or expected.ends[at] > expected.starts[at] or cell[-1] not in "DP" or "OVERLAP" in cell


@pytest.mark.parametrize("part", range(PARTS))
def test_the_simulator_agrees_with_a_machine(part):
    chance = random.Random(part)
    for _ in range(CASES // PARTS):
        schedule = some_schedule(chance)
        agree(schedule, some_costs(chance, schedule), some_model(chance, schedule))


@pytest.mark.parametrize("part", range(PARTS))
def test_the_simulator_agrees_with_a_machine_about_edges(part):
    chance = random.Random(f"edges {part}")
    for _ in range(CASES // PARTS):
        schedule = some_schedule(chance, edges=True)
        agree(schedule, some_costs(chance, schedule), some_model(chance, schedule))


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_steps_are_rows_one_after_the_other(part, edges):
    """Without an optimizer and without a barrier, several steps are one with so many times the microbatches."""
    chance = random.Random(100 + part)
    for _ in range(60):
        schedule = some_schedule(chance, edges=edges)
        model, steps = some_model(chance, schedule), chance.choice([2, 3])
        costs = some_costs(chance, schedule)
        try:
            timeline = ps.simulate(schedule, costs, model=model, steps=steps, synchronise=False)
        except ps.ScheduleError:  # one step runs, but several need room that the model does not have
            continue
        rows = [
            [shifted(cell, step * schedule.microbatches) for step in range(steps) for cell in row]
            for row in text_rows(schedule)
        ]
        expected = Simulation(
            rows, list(schedule.placement.rank_of), prices(costs, schedule), model.buffering, model.lanes
        ).run()
        origin = Fraction(timeline.extent.origin)
        places = [(rank, place) for rank, row in enumerate(rows) for place in range(len(row))]
        assert [Fraction(when) + origin for when in timeline.start.tolist()] == [expected.starts[at] for at in places]


def shifted(cell, microbatches):
    return re.sub(r"([A-Z])(\d+)(?=;|\)|@|$)", lambda found: f"{found[1]}{int(found[2]) + microbatches}", cell)


@pytest.mark.parametrize("lanes", ps.LANES)
@pytest.mark.parametrize("buffering", ["rendezvous", "bounded(1)", "eager"])
def test_implied_transfers_are_those_of_lowering(buffering, lanes):
    model, costs = ps.CommModel(buffering, lanes), ps.Costs(latency=0.5)
    for name in ("1F1B", "ZBVZeroBubble", "DualPipeV"):
        schedule = ps.build(name, ranks=3, microbatches=5)
        lowered = ps.lower(schedule, unshard=False, reduce=False)
        one, other = ps.simulate(schedule, costs, model=model), ps.simulate(lowered, costs, model=model)
        assert (one.makespan, one.span, one.idle_by_cause) == (other.makespan, other.span, other.idle_by_cause)
