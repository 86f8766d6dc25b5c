"""Computes what the links of a schedule cost: time and bytes of their messages, and memory of values that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.ir.edges import Edge, Link
    from penstock.ir.schedule import Schedule
    from penstock.simulation.costs import Costs

    Ints = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]


class Linked(Protocol):
    """Stages that are linked by edges, such as those of a schedule."""

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges."""

    @property
    def links(self) -> tuple[Link, ...]:
        """What the stages send each other."""

    @property
    def is_chain(self) -> bool:
        """Whether every stage passes its output to the next one and nowhere else."""


class MessageCosts(NamedTuple):
    """What the messages of every link cost in one direction."""

    time: Floats
    size: Floats


class LinkCosts(NamedTuple):
    """What every link costs for each microbatch, in the order of ``schedule.links``.

    Attributes:
        forward: its message with values.
        backward: its message with their gradients; nothing if it has none.
        waiting: the memory of its values on the rank of the target until they are used.
    """

    forward: MessageCosts
    backward: MessageCosts
    waiting: Floats


def link_costs(costs: Costs, schedule: Linked) -> LinkCosts:
    """Return the costs of all links: the bytes of the edges that share one add up, and the largest latency counts."""
    count = len(schedule.edges)
    fields = ("latency", "activation_bytes", "gradient_bytes", "edge_memory")
    latency, size, back, waiting = (costs.per_edge(field, count) for field in fields)
    taken = [np.zeros(count), np.zeros(count)]
    if costs.bandwidth is not None:
        taken = [each / costs.per_edge("bandwidth", count) for each in (size, back)]
    if schedule.is_chain:
        return LinkCosts(MessageCosts(latency + taken[0], size), MessageCosts(latency + taken[1], back), waiting)
    links = len(schedule.links)
    carried = [(number, edge) for number, link in enumerate(schedule.links) for edge in link.edges]
    link, edge = np.array(carried, np.int64).reshape(-1, 2).T
    returns = np.flatnonzero(np.array([each.gradient for each in schedule.edges], bool)[edge])
    forward = _combined(links, link, latency[edge], taken[0][edge], size[edge])
    gradients = (each[edge[returns]] for each in (latency, taken[1], back))
    return LinkCosts(forward, _combined(links, link[returns], *gradients), _summed(links, link, waiting[edge]))


def _combined(links: int, link: Ints, latency: Floats, taken: Floats, size: Floats) -> MessageCosts:
    """Return the costs of the messages of all links, given those of what each carries."""
    time = np.zeros(links)
    np.maximum.at(time, link, latency)
    return MessageCosts(time + _summed(links, link, taken), _summed(links, link, size))


def _summed(links: int, link: Ints, amounts: Floats) -> Floats:
    return np.bincount(link, amounts, links).astype(np.float64)


def link_numbers(schedule: Schedule, source: Ints, target: Ints) -> Ints:
    """Return the index in ``schedule.links`` of the link from each source stage to its target stage."""
    if schedule.is_chain:
        return source
    known = np.array([link.source * schedule.stages + link.target for link in schedule.links], np.int64)
    return known.searchsorted(source.astype(np.int64) * schedule.stages + target)
