"""The plain walk and the compiled one against each other, and both against the definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph import active_stages
from penstock.graph import longest_path as walk
from penstock.graph.jit import jit

edges = st.integers(1, 12).flatmap(
    lambda nodes: st.tuples(
        st.just(nodes),
        st.lists(st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1), st.integers(0, 3)), max_size=25),
    )
)


def arrays(found):
    table = np.array(found, np.int64).reshape(-1, 3)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1]), np.ascontiguousarray(table[:, 2])


def by_definition(nodes, found):
    """Relax every edge until nothing changes; what still grows after so many rounds is on a cycle or behind one."""
    reached, start = set(), [0] * nodes
    while fresh := [
        node
        for node in range(nodes)
        if node not in reached and all(source in reached for source, target, _ in found if target == node)
    ]:
        for node in fresh:
            start[node] = max([0, *(start[source] + weight for source, target, weight in found if target == node)])
        reached |= set(fresh)
    return [start[node] if node in reached else walk.UNREACHED for node in range(nodes)]


@given(edges)
@settings(max_examples=200, deadline=None)
def test_plain_and_compiled_walks_agree_with_the_definition(graph):
    nodes, found = graph
    source, target, weight = arrays(found)
    expected = by_definition(nodes, found)
    assert walk._interpreted(nodes, source, target, weight) == expected
    assert jit(walk._compiled)(nodes, source, target, weight).tolist() == expected
    assert walk.longest_path(nodes, source, target, weight).tolist() == expected


def soonest_by_definition(stages, cells, place, limit):
    """The stages in the order of their next use: so many, and whatever runs together with the last of them."""
    soonest = {}
    for stage, cell in zip(stages[place:], cells[place:], strict=True):
        if len(soonest) >= limit and cell != list(soonest.values())[-1]:
            break
        soonest.setdefault(stage, cell)
    return list(soonest)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_plain_and_compiled_scans_of_stages_agree_with_the_definition(stages, limit, data):
    starts = [True, *data.draw(st.lists(st.booleans(), min_size=len(stages) - 1, max_size=len(stages) - 1))]
    cells = np.cumsum(starts) - 1
    names, local = np.unique(np.array(stages), return_inverse=True)
    arguments = (local.astype(np.int64), cells.astype(np.int64), len(names), limit)
    plain, fast = active_stages._scan(*arguments), jit(active_stages._scan)(*arguments)
    for one, other in zip(plain, fast, strict=True):
        assert one.tolist() == other.tolist()

    leaving, entering = active_stages.active_stage_changes(np.array(stages), cells, limit)
    active = []
    for place in np.flatnonzero(starts).tolist():
        wanted = soonest_by_definition(stages, cells, place, limit)
        assert sorted(leaving.get(place, [])) == sorted(set(active) - set(wanted))
        assert entering.get(place, []) == [stage for stage in wanted if stage not in active]
        active = wanted


@pytest.mark.parametrize("loaded", [True, False])
def test_when_the_compiler_pays(monkeypatch, loaded):
    modules = {"numba": object()} if loaded else {}
    monkeypatch.setattr(walk.sys, "modules", modules)
    monkeypatch.setattr(walk, "_interpreted_work", [0])
    assert walk.should_compile(1_000) is loaded
    assert walk.should_compile(1_000_000)
    assert walk.should_compile(100) is not loaded


def test_the_compiler_is_loaded_when_as_much_was_walked_without_it(monkeypatch):
    monkeypatch.setattr(walk.sys, "modules", {})
    monkeypatch.setattr(walk, "_interpreted_work", [0])
    assert [walk.should_compile(60_000) for _ in range(4)] == [False, False, False, True]


def test_compiled_without_a_place_for_the_cache(monkeypatch):
    """As in a container whose user has no home."""
    import numba

    real = numba.njit

    def no_cache(*arguments, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*arguments, **options)

    monkeypatch.setattr(numba, "njit", no_cache)
    double = jit(lambda number: 2 * number)
    assert double(21) == 42
