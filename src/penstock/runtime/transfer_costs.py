"""Finds what transfers cost, from the messages that all ranks noted in their steps and from a probe of the links.

In a step the core of a sender has other things to do, so messages take longer than between idle ranks. What counts is
how long those took that a rank waited for: from when the message was posted to when the receiver had it. The probe says
how far clocks are apart, how much of that time is for the bytes, and it fills in where no rank has waited.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import mean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.ir.edges import Link
    from penstock.ir.schedule import Schedule
    from penstock.runtime.link_probe import Bounce, Pair

    #: Of each step: how many tags a link has; when messages had been sent, and when they were awaited, by tag.
    Times = Sequence[tuple[int, Mapping[str, float], Mapping[str, tuple[float, float]]]]


def message_sizes(schedule: Schedule, sent: Mapping[Pair, int], microbatches: int) -> dict[Pair, tuple[int, int]]:
    """Find the bytes of a message of each link, forward and backward, from those of a step by their stages."""
    return {
        (link.source, link.target): (
            sent.get((link.source, link.target), 0) // microbatches,
            sent.get((link.target, link.source), 0) // microbatches,
        )
        for link in schedule.links
    }


def ranks_of(schedule: Schedule, link: Link) -> Pair:
    """Return the ranks at the ends of a link, the lower one first."""
    ends = (schedule.placement.rank_of[link.source], schedule.placement.rank_of[link.target])
    return min(ends), max(ends)


def find_delays(schedule: Schedule, ranks: Sequence[Times], bounces: Mapping[Pair, Bounce]) -> dict[Pair, float]:
    """Find how long messages of each link took that a rank waited for: the median over steps of the mean of a step."""
    found: dict[Pair, list[float]] = {}
    rank_of = schedule.placement.rank_of
    for step in range(len(ranks[0])):
        taken: dict[Pair, list[float]] = defaultdict(list)
        for receiver, times in enumerate(ranks):
            tags, _, awaited = times[step]
            for tag, (begin, end) in awaited.items():
                link = schedule.links[int(tag) // tags]
                ends = (link.target, link.source) if int(tag) % 2 else (link.source, link.target)
                sender = rank_of[ends[0]]
                ahead = bounces[ranks_of(schedule, link)].clock * (1 if sender < receiver else -1)
                sent = ranks[sender][step][1].get(tag)
                if sent is not None and begin < sent + ahead:
                    taken[link.source, link.target].append(end - sent - ahead)
        for key, each in taken.items():
            found.setdefault(key, []).append(mean(each))
    return {key: max(0.0, median(each)) for key, each in found.items()}


def edge_costs(
    schedule: Schedule,
    sizes: Mapping[Pair, tuple[int, int]],
    delays: Mapping[Pair, float],
    bounces: Mapping[Pair, Bounce],
) -> dict[str, Any]:
    """Return the fields of ``Costs`` for transfers, one number per edge.

    An edge between stages of one rank, which sends nothing, has no bytes, and otherwise the figures of the others.
    """
    links = [link for link in schedule.links if ranks_of(schedule, link) in bounces]
    if not links:
        return {}
    latency, bandwidth = {}, {}
    for link in links:
        key, bounce = (link.source, link.target), bounces[ranks_of(schedule, link)]
        bandwidth[key] = bounce.bandwidth
        latency[key] = bounce.latency
        if key in delays:
            latency[key] = max(0.0, delays[key] - mean(sizes[key]) / bounce.bandwidth)
    usual = mean(latency.values()), median(bandwidth.values())
    costs: dict[str, list[float]] = defaultdict(list)
    for number, edge in enumerate(schedule.edges):
        own = [key for key in ((edge.source, target) for target in edge.targets) if key in latency]
        costs["latency"].append(max((latency[key] for key in own), default=usual[0]))
        costs["bandwidth"].append(min((bandwidth[key] for key in own), default=usual[1]))
        costs["activation_bytes"].append(_share(schedule, number, links, sizes, backward=False))
        costs["gradient_bytes"].append(_share(schedule, number, links, sizes, backward=True))
    if not any(costs["activation_bytes"] + costs["gradient_bytes"]):
        return {"latency": costs["latency"]}
    return dict(costs)


def _share(
    schedule: Schedule, number: int, links: Sequence[Link], sizes: Mapping[Pair, tuple[int, int]], *, backward: bool
) -> float:
    """Find the bytes of an edge: those of a link that carries nothing else, or an equal share of one with others."""
    shares = []
    for link in links:
        carried = [one for one in link.edges if schedule.edges[one].gradient or not backward]
        if number in carried:
            shares.append((len(carried), sizes[link.source, link.target][backward] / len(carried)))
    return min(shares, default=(0, 0.0))[1]
