"""Makes timelines of what the ranks of a pipeline have traced, from memory or from the files that they keep.

A rank traces the last steps of every schedule that it runs. Of a step it keeps four numbers per action: when the rank
had got to it, when it had waited for its inputs, when it had ended, and for how long it had waited for its own sends
before. In a folder these are the float64 numbers of a ``.times`` file, which the rank has mapped into its memory, so
that nothing is lost when it is killed; a ``.json`` file of the same name says what they are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import FormatError, RunError
from penstock.ir.actions import Action
from penstock.ir.formats.versioned_json import json_from_schedule, schedule_from_json
from penstock.simulation.costs import Costs
from penstock.simulation.measured import ActionTimes, find_delays, measured_timeline
from penstock.simulation.recorded_times import TimedAction, fields_of_costs, mean_times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.ir.schedule import Schedule
    from penstock.simulation.timeline import Timeline

    Floats = NDArray[np.float64]

FORMAT: Final = "penstock.trace"
VERSION: Final = 1

#: Numbers before those of the actions: the number of the step, counted from 1, and 1 if the step was completed.
HEAD: Final = 2
#: Numbers of an action.
EACH: Final = 4
#: From how many steps costs are taken, at most.
_MOST_STEPS: Final = 32


@dataclass(frozen=True, eq=False)
class RankTrace:
    """What a rank has traced of one schedule.

    Attributes:
        rank: the rank.
        ranks: the number of ranks.
        schedule: the lowered schedule.
        actions: the actions that it traces, in the order in which they were compiled.
        error: by how much its clock may differ from that of rank 0, in seconds.
        steps: by the number of the step: its times, a row per action, on the clock of rank 0; 0 if it did not run.
        complete: the numbers of the steps that were completed.
    """

    rank: int
    ranks: int
    schedule: Schedule
    actions: tuple[Action, ...]
    error: float
    steps: Mapping[int, Floats]
    complete: frozenset[int]

    def times(self, step: int) -> list[ActionTimes]:
        """Return when the actions of a step ran, in order, without those that did not end; [] for an unknown step."""
        if step not in self.steps:
            return []
        rows = zip(self.actions, self.steps[step].tolist(), strict=True)
        found = [ActionTimes(action, *row) for action, row in rows if row[2]]
        return sorted(found, key=lambda times: times.reached)


def pack_header(
    rank: int, ranks: int, schedule: Schedule, actions: Sequence[str], slots: int, *, ahead: float, error: float
) -> str:
    """Return the JSON text that describes the numbers of a trace."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "rank": rank,
            "ranks": ranks,
            "slots": slots,
            "ahead": ahead,
            "error": error,
            "actions": list(actions),
            "schedule": json.loads(json_from_schedule(schedule)),
        }
    )


def unpack_trace(header: str, numbers: bytes) -> RankTrace:
    """Return the trace of a rank, given its description and its numbers."""
    try:
        facts = json.loads(header)
        if facts["format"] != FORMAT or facts["version"] > VERSION:
            raise FormatError(f"is {facts['format']} version {facts['version']}; expected {FORMAT} up to {VERSION}")
        actions = tuple(map(Action.from_str, facts["actions"]))
        slots = np.frombuffer(numbers, np.float64).reshape(facts["slots"], HEAD + EACH * len(actions))
        steps = {int(slot[0]): _aligned(slot[HEAD:], facts["ahead"]) for slot in slots if slot[0]}
        complete = frozenset(int(slot[0]) for slot in slots if slot[1])
        schedule = schedule_from_json(json.dumps(facts["schedule"]))
        return RankTrace(facts["rank"], facts["ranks"], schedule, actions, facts["error"], steps, complete)
    except (ValueError, KeyError, TypeError) as fault:
        raise FormatError(f"is not a complete trace: {fault}") from None


def _aligned(numbers: Floats, ahead: float) -> Floats:
    times = numbers.reshape(-1, EACH).copy()
    ran = times[:, 2] != 0
    times[ran, :3] += ahead
    return times


def read_traces(folder: str | Path) -> list[tuple[RankTrace, ...]]:
    """Read the traces of a folder: for each schedule of each pipeline, in the order in which they ran, all ranks.

    A schedule is left out if a rank has not begun to trace it.
    """
    groups: defaultdict[str, list[RankTrace]] = defaultdict(list)
    begun: dict[str, float] = {}
    for path in sorted(Path(folder).glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        name = path.stem.rpartition("-")[0]
        try:
            groups[name].append(unpack_trace(path.read_text(), path.with_suffix(".times").read_bytes()))
        except (OSError, FormatError) as fault:
            raise FormatError(str(fault), path=str(path)) from None
        begun.setdefault(name, len(begun))
    found = [sorted(groups[name], key=lambda trace: trace.rank) for name in sorted(groups, key=begun.__getitem__)]
    return [tuple(traces) for traces in found if [trace.rank for trace in traces] == [*range(traces[0].ranks)]]


def timeline_of(traces: Sequence[RankTrace]) -> Timeline:
    """Return the timeline of the step of median length, of those that all ranks have completed and still hold.

    Raises:
        RunError: there is none.
    """
    numbers = sorted(frozenset.intersection(*(trace.complete for trace in traces)))
    if not numbers:
        raise RunError("no step was traced to its end on all ranks")
    lengths = {number: _length(traces, number) for number in numbers}
    typical = sorted(numbers, key=lengths.__getitem__)[len(numbers) // 2]
    return _timeline(traces, typical, costs_of(traces, numbers[-_MOST_STEPS:]))


def unfinished_timeline(traces: Sequence[RankTrace]) -> tuple[Timeline, str] | None:
    """Return the timeline of the last step if some rank did not complete it, and how far it got.

    Actions that were not run take no time in it.
    """
    last = max((max(trace.steps, default=0) for trace in traces), default=0)
    if not last or all(last in trace.complete for trace in traces):
        return None
    times = [trace.times(last) for trace in traces]
    if not any(time.action.is_compute for of_rank in times for time in of_rank):
        return None
    ran, count = sum(map(len, times)), sum(len(trace.actions) for trace in traces)
    return _timeline(traces, last, costs_of(traces, [last])), f"step {last}, not finished: {ran} of {count} actions ran"


def costs_of(traces: Sequence[RankTrace], numbers: Sequence[int]) -> Costs:
    """Return what actions and transfers cost in these steps: the median over steps of the mean over a step."""
    schedule = traces[0].schedule
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for trace in traces:
        for number in numbers:
            timed, starts = _timed_actions(trace.times(number))
            for key, taken in mean_times(timed, starts).items():
                found[key].append(taken)
    fields: dict[str, Any] = dict(fields_of_costs({key: median(each) for key, each in found.items()}, schedule.stages))
    if schedule.edges:
        fields["latency"] = _latencies(traces, numbers)
    return Costs.from_dict(fields)


def _timed_actions(times: Sequence[ActionTimes]) -> tuple[list[TimedAction], list[float]]:
    """Return the actions, and for each of them how long the rank took to get to it."""
    timed, starts, before = [], [], None
    for action, reached, start, end, held in times:
        timed.append(TimedAction(action, reached, end, start - reached, start, held))
        starts.append(0.0 if before is None else max(0.0, reached - before - held))
        before = end
    return timed, starts


def _latencies(traces: Sequence[RankTrace], numbers: Sequence[int]) -> list[float]:
    """Return how long messages of each edge took that a rank waited for; the usual time where none did."""
    schedule = traces[0].schedule
    of_link: defaultdict[int, list[float]] = defaultdict(list)
    for number in numbers:
        delays = find_delays(schedule, [trace.times(number) for trace in traces])
        for link, each in delays.items():
            of_link[link].append(median(each))
    taken = {link: median(each) for link, each in of_link.items()}
    usual = median(taken.values()) if taken else 0.0
    latencies = [0.0] * len(schedule.edges)
    for place, one in enumerate(schedule.links):
        for edge in one.edges:
            latencies[edge] = max(latencies[edge], taken.get(place, usual))
    return latencies


def _length(traces: Sequence[RankTrace], number: int) -> float:
    times = [time for trace in traces for time in trace.times(number)]
    return max(time.end for time in times) - min(time.start for time in times)


def _timeline(traces: Sequence[RankTrace], number: int, costs: Costs) -> Timeline:
    errors = sorted(trace.error for trace in traces)
    ranks = [trace.times(number) for trace in traces]
    return measured_timeline(traces[0].schedule, ranks, costs, clock_error=sum(errors[-2:]))
