"""Reads and writes timelines as JSON: predicted and measured ones, to be drawn and compared later.

::

    {
      "format": "penstock.timeline", "version": 1,
      "measured": {"clock_error": 2e-06},
      "model": {"buffering": "eager", "lanes": "message"}, "steps": 1, "synchronise": true,
      "costs": {"forward": [0.001, 0.001], ...},
      "schedule": {"format": "penstock.schedule", ...},
      "ranks": [
        {"rank": 0, "actions": ["0F0", ...], "start": [0.0, ...], "duration": [0.001, ...], "reached": [0.0, ...],
         "held": [0.0, ...]},
        ...
      ],
      "ends": {"start": [...], "duration": [...]}
    }

Times are those of the costs' unit; in a measured timeline they are seconds. ``measured`` is null, and ``reached`` and
``held`` are missing, in a predicted one. ``ends`` are the optimizers of every step and rank, then the ends of steps.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import FormatError, PenstockError, ReadError
from penstock.graph.comm_model import CommModel
from penstock.graph.start_times import critical_edges
from penstock.ir.formats.files import read_text, refuse_duplicate_keys, shorten, write_atomically
from penstock.ir.formats.versioned_json import json_from_schedule, schedule_from_json
from penstock.simulation.costs import Costs
from penstock.simulation.measured import Measured, measured_critical_edges
from penstock.simulation.simulate import prepare
from penstock.simulation.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.simulation.step_graph import StepGraph

    Floats = NDArray[np.float64]

FORMAT: Final = "penstock.timeline"
VERSION: Final = 1


def write_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline to a ``.json`` file, completely or not at all.

    Raises:
        WriteError: names the file.
    """
    write_atomically(path, json_from_timeline(timeline))


def read_timeline(path: str | Path) -> Timeline:
    """Read a timeline that ``write_timeline`` wrote.

    Raises:
        ReadError: names the file, and says what is wrong with it.
    """
    try:
        return timeline_from_json(read_text(Path(path)))
    except ReadError as error:
        raise error.at(path=str(path)) from None
    except PenstockError as fact:
        raise FormatError(str(fact), path=str(path)) from fact
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", path=str(path)) from None


def is_timeline(path: str | Path) -> bool:
    """Return whether a file is JSON that says it is a timeline; whether it is complete shows when it is read."""
    try:
        with Path(path).open("rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(200)
    except OSError:
        return False


def json_from_timeline(timeline: Timeline) -> str:
    """Return the JSON text of a timeline, a line per rank."""
    graph, measured = timeline.step_graph, timeline.measured
    head = {
        "format": FORMAT,
        "version": VERSION,
        "measured": None if measured is None else {"clock_error": measured.clock_error},
        "model": {"buffering": graph.model.buffering, "lanes": graph.model.lanes},
        "steps": graph.steps,
        "synchronise": graph.synchronise,
        "costs": timeline.costs.to_dict(),
        "schedule": json.loads(json_from_schedule(timeline.schedule)),
    }
    start, duration = timeline.node_start[graph.events.node], timeline.node_duration[graph.events.node]
    names = [str(span.action) for span in timeline.spans]
    ranks = []
    for rank, (begin, end) in enumerate(pairwise(graph.actions.first_cell.tolist())):
        mine: dict[str, Any] = {"rank": rank, "actions": names[begin:end]}
        mine |= {"start": start[begin:end].tolist(), "duration": duration[begin:end].tolist()}
        if measured is not None:
            mine |= {"reached": measured.reached[begin:end].tolist(), "held": measured.held[begin:end].tolist()}
        ranks.append(mine)
    ends = {
        "start": timeline.node_start[graph.cells :].tolist(),
        "duration": timeline.node_duration[graph.cells :].tolist(),
    }
    lines = [f'"{key}": {json.dumps(value, allow_nan=False)}' for key, value in head.items()]
    lines.append('"ranks": [\n' + ",\n".join(json.dumps(rank, allow_nan=False) for rank in ranks) + "\n]")
    lines.append(f'"ends": {json.dumps(ends, allow_nan=False)}')
    return "{" + ",\n".join(lines) + "}\n"


def timeline_from_json(text: str) -> Timeline:
    """Return the timeline of a JSON text; a version newer than ``VERSION`` is an error."""
    document = _parsed(text)
    schedule = schedule_from_json(json.dumps(_entry(document, "schedule", dict)))
    costs = Costs.from_dict(_entry(document, "costs", dict))
    model = CommModel(**_entry(document, "model", dict, keys={"buffering", "lanes"}))
    steps, synchronise = _entry(document, "steps", int), _entry(document, "synchronise", bool)
    graph, costs = prepare(schedule, costs, model, steps, synchronise=synchronise)
    measured = document.get("measured")
    if measured is not None and not (isinstance(measured, dict) and _is_number(measured.get("clock_error"))):
        raise FormatError(f'"measured" is {_shown(measured)}; it must be null or have a "clock_error" in seconds')
    start, duration = np.zeros(graph.nodes), np.zeros(graph.nodes)
    fields = ["start", "duration"] + (["reached", "held"] if measured is not None else [])
    columns = _of_ranks(document, graph, fields)
    start[graph.events.node], duration[graph.events.node] = columns["start"], columns["duration"]
    ends, count = _entry(document, "ends", dict), graph.nodes - graph.cells
    start[graph.cells :] = _numbers(ends, "start", count, "ends")
    duration[graph.cells :] = _numbers(ends, "duration", count, "ends")
    if measured is None:
        critical = critical_edges(graph.order, start, duration, graph.delays(costs), graph.release_times(costs))
        return Timeline(schedule, costs, graph, start, duration, critical)
    critical = measured_critical_edges(graph, start, duration)
    found = Measured(columns["reached"], columns["held"], float(measured["clock_error"]))
    return Timeline(schedule, costs, graph, start, duration, critical, found)


def _parsed(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text, object_pairs_hook=refuse_duplicate_keys)
    except json.JSONDecodeError as fault:
        raise FormatError(f"is not JSON: {fault.msg} at column {fault.colno}", row=fault.lineno) from None
    except (ValueError, RecursionError) as fault:
        if isinstance(fault, FormatError):
            raise
        raise FormatError(f"is not a timeline: {fault}") from None
    if isinstance(document, dict) and "traceEvents" in document:
        raise FormatError("is a trace for Perfetto, which cannot be read back; write a timeline with --timeline FILE")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f'is JSON, but not a timeline: "format": "{FORMAT}" is missing')
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise FormatError(f'"version" is {_shown(version)}; it must be a positive integer')
    if version > VERSION:
        raise FormatError(
            f"has format version {version}; this penstock reads up to version {VERSION}. Upgrade penstock"
        )
    return document


def _of_ranks(document: Mapping[str, Any], graph: StepGraph, fields: list[str]) -> dict[str, Floats]:
    """Return the numbers of all cells, rank by rank."""
    ranks = _entry(document, "ranks", list)
    if len(ranks) != graph.ranks:
        raise FormatError(f'"ranks" has {len(ranks)} entries, but the schedule has {graph.ranks} ranks')
    columns: dict[str, list[Floats]] = {field: [] for field in fields}
    for rank, (entry, begin, end) in enumerate(
        zip(
            ranks, *(graph.actions.first_cell.tolist()[part] for part in (slice(None, -1), slice(1, None))), strict=True
        )
    ):
        if not isinstance(entry, dict) or entry.get("rank") != rank:
            raise FormatError(f'entry {rank} of "ranks" must be an object with "rank": {rank}')
        for field in fields:
            columns[field].append(_numbers(entry, field, end - begin, f"rank {rank}"))
    return {field: np.concatenate(parts) for field, parts in columns.items()}


def _numbers(entry: Mapping[str, Any], field: str, count: int, place: str) -> Floats:
    values = entry.get(field)
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)} numbers" if isinstance(values, list) else _shown(values)
        raise FormatError(f'"{field}" of {place} is {found}; expected a list of {count} numbers')
    wrong = next((value for value in values if not _is_number(value)), None)
    if wrong is not None or None in values:
        raise FormatError(f'"{field}" of {place} contains {_shown(wrong)}; expected finite numbers')
    numbers = np.array(values, np.float64)
    if field == "duration" and (numbers < 0).any():
        raise FormatError(f'"duration" of {place} contains {numbers.min():g}; expected numbers of at least 0')
    return numbers


def _entry(document: Mapping[str, Any], name: str, kind: type[Any], keys: set[str] | None = None) -> Any:
    value: Any = document.get(name)
    if type(value) is not kind or (keys is not None and set(value) != keys):
        wanted = {dict: "an object", list: "a list", int: "an integer", bool: "true or false"}[kind]
        having = f" with {', '.join(sorted(keys))}" if keys else ""
        raise FormatError(f'"{name}" is {_shown(value)}; it must be {wanted}{having}')
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: object) -> str:
    return "missing" if value is None else shorten(json.dumps(value))
