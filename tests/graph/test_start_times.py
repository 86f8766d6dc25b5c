"""Starts with durations and delays: plain and compiled kernels agree with the definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph import start_times as timing
from penstock.graph.jit import jit

graphs = st.integers(1, 8).flatmap(
    lambda nodes: st.tuples(
        st.just(nodes), st.lists(st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1)), max_size=16)
    )
)


def arrays(edges):
    source, target = np.array(edges, np.int32).reshape(-1, 2).T
    return np.ascontiguousarray(source), np.ascontiguousarray(target)


def has_cycle(nodes, edges):
    left = set(range(nodes))
    while free := {node for node in left if not any(s in left and t == node for s, t in edges)}:
        left -= free
    return bool(left)


@given(graphs, st.data())
@settings(max_examples=200, deadline=None)
def test_sorted_and_walked(graph, data):
    nodes, edges = graph
    source, target = arrays(edges)
    plain, fast = timing._sort_interpreted(nodes, source, target), jit(timing._sort)(nodes, source, target)
    assert (plain[0] < nodes) == (fast[0] < nodes) == has_cycle(nodes, edges)
    assert (timing.topological_order(nodes, source, target) is None) == has_cycle(nodes, edges)
    if has_cycle(nodes, edges):
        return
    amounts = st.integers(0, 9).map(float)
    duration = np.array(data.draw(st.lists(amounts, min_size=nodes, max_size=nodes)))
    release = np.array(data.draw(st.lists(amounts, min_size=nodes, max_size=nodes)))
    delay = np.array(data.draw(st.lists(amounts, min_size=len(edges), max_size=len(edges))))
    for order in (timing.Order(*plain[1:]), timing.Order(*fast[1:])):
        arguments = (order.nodes, order.first, order.source, order.edge, duration, delay, release)
        for start, critical in (
            timing._walk_interpreted(*arguments),
            jit(timing._walk)(*arguments),
            timing.start_times(order, duration, delay, release),
        ):
            for node in range(nodes):
                ends = [start[s] + duration[s] + delay[edge] for edge, (s, t) in enumerate(edges) if t == node]
                assert start[node] == max([release[node], *ends])
                waited = [e for e, (s, t) in enumerate(edges) if t == node
                          and start[s] + duration[s] + delay[e] == start[node]]  # fmt: skip
                assert critical[node] == (waited[0] if waited else timing.NOTHING)


@pytest.mark.parametrize("kernel", [timing._sort, timing._sort_interpreted])
def test_a_cycle_is_not_reached(kernel):
    source, target = arrays([(0, 1), (1, 2), (2, 1)])
    assert kernel(3, source, target)[0] == 1
