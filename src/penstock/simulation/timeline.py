"""Defines ``Timeline``, the result of a simulation or of a measurement: what happens when."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.errors import WriteError
from penstock.graph.start_times import NOTHING
from penstock.simulation.extent import Extent, extent_of
from penstock.simulation.idle import CAUSES, Idle, idle_intervals
from penstock.simulation.memory import MemoryCurve, MemoryUse, Times, memory_curves, memory_use
from penstock.simulation.transfers import Transfer, TransferTimes
from penstock.simulation.waiting_values import WaitingValues, waiting_values

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.ir.actions import Action
    from penstock.ir.schedule import Schedule
    from penstock.simulation.costs import Costs
    from penstock.simulation.measured import Measured
    from penstock.simulation.step_graph import StepGraph

    Ints = NDArray[np.signedinteger[Any]]
    Floats = NDArray[np.float64]

#: The function that writes a timeline to a file, by suffix; ``view/`` fills this in when it is loaded.
WRITERS: Final[dict[str, Callable[[Timeline, Path], None]]] = {}


class Span(NamedTuple):
    """An action and when it runs.

    A send runs while its transfer is in flight, and so does a receive under rendezvous; otherwise a receive has only an
    end.

    Attributes:
        rank: the rank.
        action: the action.
        start: when it starts.
        end: when it ends.
        step: the step of training, from 0.
    """

    rank: int
    action: Action
    start: float
    end: float
    step: int = 0


@dataclass(frozen=True, eq=False)
class Timeline:
    """When every action of a schedule runs, where the time goes, and how much memory each rank holds.

    Times count from the first start. Results are per rank where possible: ``timeline.peak_memory[rank]``.

    Attributes:
        schedule: the schedule.
        costs: what its actions cost.
        step_graph: what waits for what.
        node_start: when every node of the graph starts.
        node_duration: how long each node takes.
        critical: for every node, the edge of the graph that it waited for longest.
        measured: what is known of a run that was measured; None if it was simulated.
    """

    schedule: Schedule
    costs: Costs
    step_graph: StepGraph
    node_start: Floats
    node_duration: Floats
    critical: Ints
    measured: Measured | None = None

    def __repr__(self) -> str:
        makespan = f"makespan {self.makespan:g}" if self.measured is None else f"measured: {self.makespan:g} s"
        return f"<Timeline: {self.schedule.summary}, {makespan}>"

    @cached_property
    def start(self) -> Floats:
        """When every cell starts, rank by rank in order."""
        return np.asarray(self.node_start[self.step_graph.events.node] - self.extent.origin)

    @cached_property
    def end(self) -> Floats:
        """When every cell ends."""
        return np.asarray(self.start + self.node_duration[self.step_graph.events.node])

    @cached_property
    def extent(self) -> Extent:
        """When each rank begins and ends."""
        return extent_of(self.step_graph, self.costs, self.node_start, self.node_duration)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        return self.extent.makespan

    @property
    def span(self) -> float:
        """The longest time that a rank takes from its own beginning to its own end."""
        return self.extent.span

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank runs actions."""
        runs = self.step_graph.blocking
        taken = self.node_duration[runs]
        return tuple(np.bincount(self.step_graph.rank[runs], taken, self.step_graph.ranks).tolist())

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank runs nothing: its bubble."""
        return tuple(max(0.0, self.makespan - busy) for busy in self.busy)

    @cached_property
    def communication(self) -> tuple[float, ...]:
        """How long each rank has at least one transfer in flight."""
        return tuple(self._transfer_times.covered(rank) for rank in range(self.step_graph.ranks))

    @property
    def ideal(self) -> float:
        """The longest time that a rank is busy: no order of these actions takes less."""
        return max(self.busy, default=0.0)

    @property
    def bubble(self) -> float:
        """How much longer than ``ideal`` the run takes."""
        return max(0.0, self.makespan - self.ideal)

    @property
    def bubble_rate(self) -> float:
        """The share of the makespan that is bubble."""
        return self.bubble / self.makespan if self.makespan else 0.0

    @property
    def span_bubble_rate(self) -> float:
        """The share of the span that is bubble, which counts if ranks do not wait for each other between steps."""
        return max(0.0, self.span - self.ideal) / self.span if self.span else 0.0

    @cached_property
    def step_time(self) -> float:
        """The time per step, with the optimizer: from the end of the last step but one to the end of the last.

        It is that of a long run if there are enough ``steps``: two if ranks wait for each other between steps.
        """
        graph = self.step_graph
        first = graph.cells + (graph.steps * graph.ranks if graph.synchronise else 0)
        each = 1 if graph.synchronise else graph.ranks
        nodes = np.arange(first, first + graph.steps * each).reshape(graph.steps, each)
        ends = (self.node_start[nodes] + self.node_duration[nodes] - self.extent.origin).max(axis=1)
        return float(ends[-1] - (ends[-2] if graph.steps > 1 else 0.0))

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The most memory that each rank holds at any time."""
        if self._waiting_values is not None:
            return tuple(float(curve.values.max()) for curve in self.memory)
        peaks = self._memory_use.static.copy()
        np.maximum.at(peaks, self.step_graph.rank[self.step_graph.blocking], self._memory_use.during)
        return tuple(peaks.tolist())

    @cached_property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """The memory that each rank holds over time."""
        runs = self.step_graph.blocking
        times = Times(self.start[runs], self.end[runs])
        return memory_curves(self.step_graph, self._memory_use, times, self._waiting_values)

    @cached_property
    def _memory_use(self) -> MemoryUse:
        return memory_use(self.step_graph, self.costs)

    @cached_property
    def _waiting_values(self) -> WaitingValues | None:
        found = waiting_values(self.step_graph, self.costs, self.node_start, self.node_start + self.node_duration)
        return None if found is None else found._replace(arrival=found.arrival - self.extent.origin)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action with its times, rank by rank in order."""
        rows = self.step_graph.schedule.actions
        actions = [action for row in rows for _ in range(self.step_graph.steps) for action in row]
        facts = zip(
            self.step_graph.rank.tolist(),
            actions,
            self.start.tolist(),
            self.end.tolist(),
            self.step_graph.step.tolist(),
            strict=True,
        )
        return tuple(map(Span._make, facts))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every transfer to another rank with its times, including implied ones."""
        return self._transfer_times.listed()

    @cached_property
    def _transfer_times(self) -> TransferTimes:
        return TransferTimes.of(self.step_graph, self.start, self.end, self.costs)

    @cached_property
    def bytes_sent(self) -> tuple[float, ...]:
        """How many bytes each rank sends to others, in all steps; stages of one rank send each other nothing."""
        return tuple(self._transfer_times.bytes_sent(self.step_graph, self.costs).tolist())

    @property
    def total_bytes_sent(self) -> float:
        """How many bytes all ranks send."""
        return sum(self.bytes_sent)

    @property
    def hops(self) -> float:
        """The number of transfers between ranks per microbatch."""
        microbatches = self.step_graph.schedule.microbatches * self.step_graph.steps
        return len(self._transfer_times.source) / max(microbatches, 1)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of actions that determines the makespan: each waits for the one before it."""
        runs = self.step_graph.blocking
        if not len(runs):
            return ()
        node = int(runs[len(runs) - 1 - np.argmax(self.end[runs][::-1])])
        path = []
        while node != NOTHING:
            if node < self.step_graph.cells:
                path.append(self.spans[node])
            edge = int(self.critical[node])
            node = NOTHING if edge == NOTHING else int(self.step_graph.source[edge])
        return tuple(reversed(path))

    @cached_property
    def waits(self) -> tuple[Idle, ...]:
        """Every interval in which a rank is idle, with its cause, rank by rank in order."""
        return idle_intervals(self)

    @property
    def idle_by_cause(self) -> dict[str, float]:
        """How long all ranks together are idle, by cause, the largest first."""
        total = dict.fromkeys(CAUSES, 0.0)
        for wait in self.waits:
            total[wait.cause] += wait.end - wait.start
        return dict(sorted(((cause, time) for cause, time in total.items() if time), key=lambda item: -item[1]))

    def _repr_html_(self) -> str:
        """Draw it in a notebook."""
        return str(import_module("penstock.view.notebook").timeline_html(self))

    def write(self, path: str | Path) -> None:
        """Write it to a file, depending on the suffix.

        ``.html`` is an interactive page, ``.json`` a trace for Perfetto, ``.png`` and ``.svg`` are charts.
        """
        path = Path(path)
        import_module("penstock.view")  # registers its writers; this layer must not import it
        if path.suffix.lower() not in WRITERS:
            known = ", ".join(f"*{suffix}" for suffix in WRITERS)
            raise WriteError(f"{path}: unknown suffix; use {known}")
        WRITERS[path.suffix.lower()](self, path)
