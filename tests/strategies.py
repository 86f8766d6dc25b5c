"""Hypothesis strategies for the values of the IR: any that can exist, not only sensible ones."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock import Action, ComputationType, Placement, Schedule
from penstock.ir.actions import (
    COMPUTE,
    LARGEST_MICROBATCH,
    LARGEST_STAGE,
    LONGEST_HOP,
    OVERLAP_F_B,
    PEER_SIDE,
    SHARDING,
)

indices = st.integers(0, 9) | st.integers(0, LARGEST_STAGE)
microbatches = st.integers(0, 9) | st.integers(0, LARGEST_MICROBATCH)


WITH_MICROBATCH = sorted(set(ComputationType) - SHARDING - {OVERLAP_F_B})


def of(kinds: list[ComputationType], stages: st.SearchStrategy[int]) -> st.SearchStrategy[Action]:
    fields = st.tuples(stages, st.sampled_from(kinds), microbatches)
    return fields.map(lambda found: Action(*found[:2], None if found[1] in SHARDING else found[2]))


@st.composite
def skips(draw: st.DrawFn, stages: st.SearchStrategy[int] = indices) -> Action:
    """A transfer that names the other stage."""
    stage, kind = draw(stages), draw(st.sampled_from(sorted(PEER_SIDE)))
    room = LARGEST_STAGE - stage if PEER_SIDE[kind] > 0 else stage
    if room < 2:
        return Action(stage, kind, draw(microbatches))
    distance = draw(st.integers(2, min(room, LONGEST_HOP)))
    return Action(stage, kind, draw(microbatches), peer_index=stage + PEER_SIDE[kind] * distance)


def overlaps(stages: st.SearchStrategy[int] = indices) -> st.SearchStrategy[Action]:
    return st.lists(of(sorted(COMPUTE), stages), min_size=2, max_size=4).map(lambda subs: Action.overlap(*subs))


def actions(stages: st.SearchStrategy[int] = indices) -> st.SearchStrategy[Action]:
    return of([*WITH_MICROBATCH, *sorted(SHARDING)], stages) | skips(stages) | overlaps(stages)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Every rank holds a stage or more and has an action of each; otherwise anything goes."""
    ranks = draw(st.integers(1, 4))
    rank_of = [*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=3))]
    placement = Placement(tuple(draw(st.permutations(rank_of))), ranks)
    rows = []
    for rank in range(ranks):
        homes = placement.stages_of(rank)
        own = [draw(actions(st.just(stage))) for stage in homes]
        more = draw(st.lists(st.none() | actions(st.sampled_from(homes)), max_size=6))
        rows.append(draw(st.permutations([*own, *more])))
    return Schedule(rows)
