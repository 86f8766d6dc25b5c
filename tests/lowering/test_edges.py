"""Transfers over edges beyond the chain: in pictures, and for any edges in any schedule."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from mutants import some_edges, some_schedule
from penstock.ir.actions import PEER_SIDE
from penstock.ir.edges import Edge, chain
from penstock.lowering.forwards import forwards_of
from penstock.schedules.registry import RECIPES

OPTIONS = [
    {},
    {"unshard": False, "reduce": False},
    {"merge_backward": True},
    {"defer_receives": True},
    {"defer_receives": True, "look_ahead": 1},
]

PICTURES = {
    ("1F1B", 3, 2, "0>1 0>2 1>2"): """
step   0          1        2          3          4        5          6          7          8        9          10       11
rank 0 0F0        0SEND_F0 0SEND_F0@2 0F1        0SEND_F1 0SEND_F1@2 0RECV_B0@2 0RECV_B0   0B0      0RECV_B1@2 0RECV_B1 0B1
rank 1 1RECV_F0   1F0      1SEND_F0   1RECV_F1   1F1      1SEND_F1   1RECV_B0   1B0        1SEND_B0 1RECV_B1   1B1      1SEND_B1
rank 2 2RECV_F0@0 2RECV_F0 2F0        2RECV_F1@0 2RECV_F1 2B0        2SEND_B0   2SEND_B0@0 2F1      2B1        2SEND_B1 2SEND_B1@0
""",  # noqa: E501 - a picture
    ("Interleaved1F1B", 2, 1, "0>1,3 1>2,3 2>3"): """
step   0        1          2          3        4        5        6        7          8          9        10       11
rank 0 0F0      0SEND_F0   0SEND_F0@3 2RECV_F0 2F0      2SEND_F0 2RECV_B0 0RECV_B0@3 2B0        2SEND_B0 0RECV_B0 0B0
rank 1 1RECV_F0 3RECV_F0@0 1F0        1SEND_F0 3RECV_F0 3F0      3B0      3SEND_B0   3SEND_B0@0 1RECV_B0 1B0      1SEND_B0
""",  # noqa: E501 - a picture
    ("ZBVZeroBubble", 2, 1, "0>1,3 0>2/F 1>2 2>3"): """
step   0        1          2          3        4        5        6        7   8        9        10
rank 0 0F0      0SEND_F0   0SEND_F0@2 3RECV_F0 3F0      3I0      3SEND_B0 3W0 0RECV_B0 0I0      0W0
rank 1 1RECV_F0 2RECV_F0@0 1F0        2F0      2SEND_F0 2RECV_B0 2I0      2W0 1I0      1SEND_B0 1W0
""",
}  # fmt: skip


@pytest.mark.parametrize("case", PICTURES, ids=lambda case: case[0])
def test_every_link_between_two_ranks_has_its_own_transfers(case):
    """None on one rank (0>3 of the V, 1>3 of the loop), none back where there is no gradient (0>2/F)."""
    name, ranks, microbatches, edges = case
    plain = ps.build(name, ranks=ranks, microbatches=microbatches)
    schedule = ps.Schedule.from_text(f"edges: {edges}\n{plain.grid(aligned=False)}")
    lowered = ps.lower(schedule, unshard=False, reduce=False)
    assert lowered.grid() == PICTURES[case].strip()
    assert lowered.edges == schedule.edges
    assert all(ps.safe_models(lowered).values())


def wanted_transfers(schedule):
    """How many sends and receives of each kind a step needs."""
    rank_of, count = schedule.placement.rank_of, Counter()
    ends = {(edge.source, target) for edge in schedule.edges for target in edge.targets}
    backward = {(edge.source, target) for edge in schedule.edges if edge.gradient for target in edge.targets}
    trains = any("B" in str(cell) or "I" in str(cell) for row in schedule.actions for cell in row)
    for source, target in ends:
        if rank_of[source] != rank_of[target]:
            count.update(SEND_F=schedule.microbatches, RECV_F=schedule.microbatches)
            if trains and (source, target) in backward:
                count.update(SEND_B=schedule.microbatches, RECV_B=schedule.microbatches)
    return +count


def transfers_in(schedule):
    cells = [cell for row in schedule.actions for cell in row]
    return Counter(str(cell.computation_type) for cell in cells if cell.computation_type in PEER_SIDE)


def assert_lowers(schedule, options):
    lowered = ps.lower(schedule, **options)  # verified
    assert transfers_in(lowered) == wanted_transfers(schedule)
    if "defer_receives" not in options:
        assert all(ps.safe_models(lowered).values())
    assert ps.check(lowered, model=ps.CommModel(lanes="message")) == []


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_schedule_with_random_edges(recipe, options):
    chance = random.Random(f"{recipe.name} {options}")
    for ranks in (2, 3, 4):
        for microbatches in (1, ranks + 1):
            schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches)
            schedule = schedule.with_edges(some_edges(schedule.stages, chance))
            assert ps.check(schedule) == []
            assert_lowers(schedule, options)
            assert_lowers(forwards_of(schedule), {"unshard": False, "reduce": False})


@given(st.integers(0, 2**32), st.sampled_from(OPTIONS))
@settings(max_examples=60)
def test_random_edges_in_random_orders(seed, options):
    schedule = some_schedule(random.Random(seed))
    assert ps.check(schedule) == []
    assert_lowers(schedule, options)
    text = f"edges: {' '.join(map(str, schedule.edges))}\n{schedule.grid(aligned=False)}"
    size = {"placement": schedule.placement, "microbatches": schedule.microbatches}
    assert ps.Schedule.from_text(text, **size) == schedule


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_without_the_further_edges_everything_is_as_in_a_chain(seed):
    schedule = some_schedule(random.Random(seed), skips=False)
    further = [*chain(schedule.stages), Edge(0, (schedule.stages - 1,), "more", gradient=False)]
    if schedule.stages > 1:
        back = schedule.with_edges(further).with_edges(chain(schedule.stages))
        assert back == schedule
        assert ps.lower(back) == ps.lower(schedule)
        assert ps.lower(back).is_chain


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_repair_orders_the_transfers_of_all_links(seed):
    chance = random.Random(seed)
    lowered = ps.lower(some_schedule(chance), unshard=False, reduce=False)
    rows = [list(row) for row in lowered.actions]
    for row in rows:  # receives as late as they can be
        for place in reversed(range(len(row))):
            while "RECV" in str(row[place]) and place + 1 < len(row) and not row[place + 1].is_compute:
                row[place : place + 2] = row[place : place + 2][::-1]
                place += 1
    late = ps.Schedule(rows, placement=lowered.placement, microbatches=lowered.microbatches, edges=lowered.edges)
    repaired = ps.repair(late)
    assert ps.check(repaired) == []
    assert repaired.edges == lowered.edges
    assert transfers_in(repaired) == transfers_in(lowered)


def test_edges_keep_a_schedule_from_running_out_of_order():
    """1B0 would run before 2B0, whose gradient it now needs."""
    schedule = ps.Schedule([["0F0", "1F0", "2F0", "1B0", "2B0", "0B0"]])
    assert ps.check(schedule.with_edges([Edge(0, (1, 2))])) == []
    assert [str(finding) for finding in ps.check(schedule)] == [
        "rank 0, step 3: 1B0 needs 2B0, which comes later, at step 4; move 2B0 before it"
    ]
    edges = [Edge(0, (1, 2)), Edge(1, (2,), gradient=False)]
    assert ps.check(schedule.with_edges(edges)) == [], "a value without a gradient"


def test_two_copies_of_a_model_that_flow_in_opposite_directions():
    """As in the bidirectional DualPipe: stages 0 to 3 down the ranks, 4 to 7 up, each copy with its own data."""
    plain = ps.build("DualPipeV", ranks=4, microbatches=8)
    copies = plain.with_edges([edge for edge in chain(8) if edge.source != 3])
    assert_lowers(copies, {})
    assert ps.simulate(copies).makespan <= ps.simulate(plain).makespan
    down = ps.build("1F1B", ranks=2, microbatches=2).actions
    up = [[cell._replace(stage_index=cell.stage_index + 2) for cell in row] for row in reversed(down)]
    rows = [[cell for both in zip(*pair, strict=True) for cell in both] for pair in zip(down, up, strict=True)]
    assert ps.check(ps.Schedule(rows, edges=[(0, [1]), (2, [3])])) == []
