"""Computes how much memory values take on the rank of their target until they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import FORWARD
from penstock.simulation.link_costs import link_costs, link_numbers
from penstock.simulation.step_graph import DATA, USE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.simulation.costs import Costs
    from penstock.simulation.step_graph import StepGraph

    Ints = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]


class WaitingValues(NamedTuple):
    """Values that wait to be used, from when they are on the rank of their target until its F starts.

    Attributes:
        arrival: when each is there: received, or produced on the same rank.
        user: the cell that uses it.
        amount: the memory that it takes.
    """

    arrival: Floats
    user: Ints
    amount: Floats


def waiting_values(graph: StepGraph, costs: Costs, start: Floats, end: Floats) -> WaitingValues | None:
    """Return all values that wait in a run in which nodes start and end at these times; None if they take no memory."""
    if not np.any(costs.edge_memory):
        return None
    of_links, cell = link_costs(costs, graph.schedule), graph.actions.cell
    arrivals, users, amounts = [], [], []
    for kind in (_made_here, _implied, _received):
        source, user, when = kind(graph, of_links.forward.time, end)
        number = link_numbers(graph.schedule, source, graph.actions.stage[user])
        used = start[cell[user]]
        waits = np.flatnonzero(when < used)
        arrivals.append(when[waits])
        users.append(cell[user[waits]])
        amounts.append(of_links.waiting[number[waits]])
    return WaitingValues(np.concatenate(arrivals), np.concatenate(users), np.concatenate(amounts))


def _made_here(graph: StepGraph, _times: Floats, end: Floats) -> tuple[Ints, Ints, Floats]:
    """Return the source stages, the positions of the users, and the arrivals of values that stay on their rank."""
    actions = graph.actions
    user, maker = actions.inputs
    here = actions.is_kind(user, FORWARD) & (actions.rank[user] == actions.rank[maker])
    user, maker = user[here], maker[here]
    return actions.stage[maker], user, end[actions.cell[maker]]


def _implied(graph: StepGraph, times: Floats, end: Floats) -> tuple[Ints, Ints, Floats]:
    """Return the same for values that come by implied transfers."""
    edges = np.flatnonzero(graph.is_forward & (graph.events.reason == DATA))
    maker, user = graph.events.awaited[edges], graph.events.waiting[edges]
    source, target = graph.actions.stage[maker], graph.actions.stage[user]
    in_flight = times[link_numbers(graph.schedule, source, target)]
    return source, user, end[graph.actions.cell[maker]] + in_flight


def _received(graph: StepGraph, _times: Floats, end: Floats) -> tuple[Ints, Ints, Floats]:
    """Return the same for values that are received."""
    edges = np.flatnonzero(graph.is_forward & (graph.events.reason == USE))
    receive, user = graph.events.awaited[edges], graph.events.waiting[edges]
    node = graph.events.node[graph.actions.cell[receive]]
    return packed.peers(graph.actions.codes[receive]), user, end[node]
