"""What is done block by block, or some ranks at a time, comes out as if it were done at once."""

import random

import numpy as np
import pytest

import penstock as ps
from mutants import mutated, text_rows
from penstock.graph import array_blocks as blocks
from penstock.graph.action_table import ActionTable
from penstock.graph.comm_model import MODELS
from penstock.graph.events import REASONS, RankRange, event_graph, rank_ranges
from penstock.lowering.send_receive import send_receive_with_turns
from penstock.schedules.registry import RECIPES
from penstock.verification.deadlock import check_deadlock

EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@pytest.fixture
def small(monkeypatch):
    """Switch to blocks of a few actions, or back to blocks that hold everything."""
    return lambda yes: monkeypatch.setattr(blocks, "SIZE", 5 if yes else 1 << 15)


def mutants(schedule, count):
    chance = random.Random(repr(schedule))
    for _ in range(count):
        rows = mutated(text_rows(schedule), schedule, chance)
        yield ps.Schedule(rows, placement=schedule.placement, microbatches=schedule.microbatches)


def edges_of(part, model):
    return {
        (reason, *places)
        for reason, awaited, waiting in part.edges(model)
        for places in zip(awaited.tolist(), waiting.tolist(), strict=True)
    }


@EVERY_RECIPE
def test_the_parts_of_a_graph_have_its_edges(recipe, small):
    schedule = ps.build(recipe.name, ranks=4, microbatches=4)
    lowered = ps.lower(schedule, max_active_stages=1)
    for one in (schedule, lowered, *mutants(lowered, 8)):
        actions = ActionTable(one)
        for model in MODELS:
            small(True)
            by_part = [edges_of(part, model) for part in rank_ranges(actions)]
            small(False)
            graph = event_graph(actions, model)
            places = zip(graph.reason.tolist(), graph.awaited.tolist(), graph.waiting.tolist(), strict=True)
            assert set().union(*by_part) == {(REASONS[reason], *edge) for reason, *edge in places}
            assert sum(map(len, by_part)) == len(graph.reason)
        assert len(by_part) > 1


@EVERY_RECIPE
def test_operations_of_a_part_are_those_on_its_ranks(recipe):
    actions = ActionTable(ps.lower(ps.build(recipe.name, ranks=4, microbatches=4)))
    (whole,) = rank_ranges(actions)
    pairs = set(zip(whole.operation.tolist(), whole.partner.tolist(), strict=True))
    for begin, end in zip(actions.offsets[:-1].tolist(), actions.offsets[1:].tolist(), strict=True):
        part = RankRange.between(actions, begin, end)
        mine = {pair for pair in pairs if begin <= pair[0] < end}
        assert set(zip(part.operation.tolist(), part.partner.tolist(), strict=True)) == mine
        assert len(part.operation) == len(mine) > 0


@EVERY_RECIPE
@pytest.mark.parametrize("options", [{}, {"merge_backward": True}, {"max_active_stages": 1, "defer_receives": True}])
def test_lowered_in_small_blocks(recipe, options, small):
    for ranks, microbatches in ((1, 3), (2, 1), (4, 6)):
        schedule = ps.build(recipe.name, ranks=ranks, microbatches=microbatches)
        small(True)
        in_blocks, turns_in_blocks = ps.lower(schedule, **options), send_receive_with_turns(schedule)[1]
        small(False)
        assert in_blocks == ps.lower(schedule, **options)
        assert turns_in_blocks.tolist() == send_receive_with_turns(schedule)[1].tolist()


@EVERY_RECIPE
def test_findings_in_small_blocks(recipe, small):
    schedule = ps.build(recipe.name, ranks=3, microbatches=4)
    wrong = 0
    for one in (schedule, ps.lower(schedule), ps.lower(schedule, max_active_stages=1)):
        for mutant in mutants(one, 20):
            small(True)
            found = ps.check(mutant, memory_limit=4)
            small(False)
            assert found == ps.check(mutant, memory_limit=4)
            wrong += bool(found)
    assert wrong > 30


def test_the_action_table_in_small_blocks(small):
    schedule = ps.Schedule([["0F0", None, "(0F1;1B0)OVERLAP_F_B", "1F0", None, None, "(1F1;0B0)OVERLAP_F_B", "0B1"]])
    small(True)
    in_blocks = ActionTable(schedule)
    small(False)
    at_once = ActionTable(schedule)
    assert in_blocks.cell.tolist() == at_once.cell.tolist() == [0, 2, 2, 3, 6, 6, 7]
    assert in_blocks.kind.tolist() == at_once.kind.tolist()
    assert in_blocks.offsets.tolist() == at_once.offsets.tolist() == [0, 7]


def test_turns_that_prove_nothing_prove_nothing_rank_by_rank(small):
    rows = [["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F1", "1RECV_F0", "1F0", "1F1"]]
    actions, model = ActionTable(ps.Schedule(rows)), ps.CommModel("rendezvous", "pair")
    small(True)
    for turns in (np.arange(8), np.zeros(8, np.int64), np.array([0, 1, 2, 3, 1, 3, 4, 5])):
        assert [problem.kind for problem in check_deadlock(actions, model, turns)] == ["deadlock"]
