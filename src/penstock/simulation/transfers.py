"""Lists the transfers of a simulated run: which rank sends what to which, when, and how many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import SEND_B, SEND_F, Action
from penstock.simulation.link_costs import link_costs, link_numbers
from penstock.simulation.step_graph import DATA

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.ir.packed import Codes
    from penstock.simulation.costs import Costs
    from penstock.simulation.step_graph import StepGraph

    Ints = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]


class Transfer(NamedTuple):
    """A transfer from one rank to another, and when it happens.

    Attributes:
        source: the rank that sends.
        target: the rank that receives.
        action: the send, even if it is implied and not in the schedule.
        start: when it is sent.
        end: when it arrives.
        step: the step of training, from 0.
    """

    source: int
    target: int
    action: Action
    start: float
    end: float
    step: int = 0


class TransferTimes(NamedTuple):
    """All transfers of a run, as arrays.

    Attributes:
        source: the rank that sends.
        target: the rank that receives.
        sends: the packed sends, with the microbatches of one step.
        start: when it is sent.
        end: when it arrives.
        step: the step of training.
    """

    source: Ints
    target: Ints
    sends: Codes
    start: Floats
    end: Floats
    step: Ints

    @classmethod
    def of(cls, graph: StepGraph, start: Floats, end: Floats, costs: Costs) -> TransferTimes:
        """Return the transfers, including implied ones, of a run in which cells start and end at these times."""
        cell = graph.actions.cell
        if graph.actions.has_transfers:
            sent, received = cell[graph.pairs.send], cell[graph.pairs.receive]
            codes = graph.actions.codes[graph.pairs.send]
            source, target, begin, arrival = graph.rank[sent], graph.rank[received], start[sent], end[sent]
        else:
            edges = np.flatnonzero(graph.reason == DATA)
            codes = _implied_sends(graph, edges)
            sent, received = graph.source[edges], graph.target[edges]
            source, target, begin = graph.rank[sent], graph.rank[received], end[sent]
            arrival = begin + graph.delays(costs)[edges]
        step = graph.step[sent]
        codes = packed.shift_microbatches(codes, -step.astype(np.int64) * graph.schedule.microbatches)
        return cls(source, target, codes, begin, arrival, step)

    def listed(self) -> tuple[Transfer, ...]:
        """Return them one by one."""
        actions = packed.unpack_cells(self.sends)
        times = (self.start.tolist(), self.end.tolist(), self.step.tolist())
        return tuple(map(Transfer._make, zip(self.source.tolist(), self.target.tolist(), actions, *times, strict=True)))

    def bytes_sent(self, graph: StepGraph, costs: Costs) -> Floats:
        """Return how many bytes each rank sends."""
        stage, peer = packed.stages(self.sends), packed.peers(self.sends)
        of_links = link_costs(costs, graph.schedule)
        number = link_numbers(graph.schedule, np.minimum(stage, peer), np.maximum(stage, peer))
        sizes = np.where(peer > stage, of_links.forward.size[number], of_links.backward.size[number])
        return np.bincount(self.source, sizes, graph.ranks).astype(np.float64)

    def covered(self, rank: int) -> float:
        """Return how long some transfer of the rank is in flight: the union of their times."""
        mine = np.flatnonzero((self.source == rank) | (self.target == rank))
        mine = mine[np.argsort(self.start[mine], kind="stable")]
        start, end = self.start[mine], self.end[mine]
        reached = np.maximum.accumulate(np.append(0.0, end))[:-1]
        return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())


def _implied_sends(graph: StepGraph, edges: Ints) -> Codes:
    """Return the sends that these edges stand for."""
    made, used = graph.events.awaited[edges], graph.events.waiting[edges]
    stage, other = (graph.actions.stage[places].astype(np.int64) for places in (made, used))
    microbatch = graph.actions.microbatch[made]
    codes = np.where(other > stage, *(packed.pack(stage, kind, microbatch) for kind in (SEND_F, SEND_B)))
    return packed.add_hops(codes, np.abs(other - stage) - 1)
