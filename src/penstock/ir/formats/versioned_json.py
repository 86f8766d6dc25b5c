"""Reads and writes our JSON: version, placement, number of microbatches, metadata, and the actions of each rank.

::

    {
      "format": "penstock.schedule", "version": 1,
      "metadata": {"name": "GPipe"}, "microbatches": 1, "stages": 2,
      "ranks": [
        {"rank": 0, "stages": [0], "actions": ["0F0", null, null, "0B0"]},
        {"rank": 1, "stages": [1], "actions": [null, "1F0", "1B0", null]}
      ]
    }

If the stages are not a chain, there are also ``"edges": [{"source": 0, "targets": [1, 3]}, ...]``, each with a
``"value"`` if it has a name, and with ``"gradient": false`` if it has none.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from penstock.errors import FormatError, ScheduleSyntaxError, WriteError
from penstock.ir.actions import parse_cell
from penstock.ir.edges import Edge
from penstock.ir.formats.files import refuse_duplicate_keys, shorten
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.ir.actions import Action

FORMAT: Final = "penstock.schedule"
VERSION: Final = 1


def json_from_schedule(schedule: Schedule) -> str:
    """Return the JSON text of a schedule, a line per rank."""
    head: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "metadata": dict(schedule.metadata),
        "microbatches": schedule.microbatches,
        "stages": schedule.stages,
    }
    if not schedule.is_chain:
        head["edges"] = [_json_from_edge(edge) for edge in schedule.edges]
    try:
        lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in head.items()]
        kept = json.loads(json.dumps(head["metadata"])) == head["metadata"]
    except (TypeError, ValueError, RecursionError) as fault:
        raise WriteError(f"the metadata cannot be represented in JSON: {fault}") from None
    if not kept:
        raise WriteError("the metadata cannot be represented in JSON: use strings for keys, and lists, not tuples")
    ranks = [
        json.dumps({"rank": rank, "stages": stages, "actions": [None if cell is None else str(cell) for cell in row]})
        for rank, (stages, row) in enumerate(zip(schedule.placement.rows, schedule.actions, strict=True))
    ]
    lines.append('  "ranks": [\n    ' + ",\n    ".join(ranks) + "\n  ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def schedule_from_json(text: str) -> Schedule:
    """Read a schedule; a version newer than ``VERSION`` is an error."""
    document = _parsed_json(text)
    if document.get("format") != FORMAT:
        raise FormatError(f'is JSON, but not a schedule: "format": "{FORMAT}" is missing')
    version = document.get("version")
    if not _is_count(version) or version < 1:
        raise FormatError(f'"version" is {_shown(version)}; it must be a positive integer')
    if version > VERSION:
        raise FormatError(
            f"has format version {version}; this penstock reads up to version {VERSION}. Upgrade penstock"
        )
    return _schedule(document)


def _parsed_json(text: str) -> dict[str, Any]:
    if not text.strip():
        raise FormatError("is empty; to write an example: penstock convert GPipe example.json")
    try:
        document = json.loads(text, object_pairs_hook=refuse_duplicate_keys, parse_constant=_no_constant)
    except FormatError:
        raise
    except json.JSONDecodeError as fault:
        reason = fault.msg.removesuffix(" at")  # the position follows
        raise FormatError(f"is not JSON: {reason} at column {fault.colno}", row=fault.lineno) from None
    except RecursionError:
        raise FormatError("is not a schedule: nested too deeply") from None
    except ValueError as fault:  # a number with thousands of digits
        raise FormatError(f"is not a schedule: {fault}") from None
    if not isinstance(document, dict):
        raise FormatError(f"is JSON, but not a schedule: expected an object, got {_shown(document)}")
    return document


def _no_constant(name: str) -> None:
    raise FormatError(f"{name} is not valid JSON")


def _schedule(document: Mapping[str, Any]) -> Schedule:
    metadata, microbatches = document.get("metadata", {}), document.get("microbatches")
    if not isinstance(metadata, dict):
        raise FormatError(f'"metadata" is {_shown(metadata)}; it must be an object')
    if not _is_count(microbatches):
        raise FormatError(f'"microbatches" is {_shown(microbatches)}; it must be an integer')
    entries = document.get("ranks")
    if not isinstance(entries, list) or not entries:
        raise FormatError(f'"ranks" is {_shown(entries)}; it must be a list with one object per rank')
    stages: dict[int, list[int]] = {}
    rows: dict[int, list[Action | None]] = {}
    for number, entry in enumerate(entries, start=1):
        rank = _rank_from_json(entry, number, len(entries))
        if rank in rows:
            raise FormatError(f'duplicate rank {rank} in "ranks"', row=number)
        stages[rank] = _stages_from_json(entry, number)
        rows[rank] = _cells_from_json(entry, number)
    placement = Placement.from_rows([stages[rank] for rank in range(len(entries))])
    if not _is_count(document.get("stages")) or document.get("stages") != placement.stages:
        raise FormatError(f'"stages" is {_shown(document.get("stages"))}, but the ranks hold {placement.stages}')
    edges = _edges_from_json(document["edges"]) if "edges" in document else None
    return Schedule(rows, placement=placement, microbatches=microbatches, metadata=metadata, edges=edges)


def _json_from_edge(edge: Edge) -> dict[str, Any]:
    entry: dict[str, Any] = {"source": edge.source, "targets": edge.targets}
    if edge.value:
        entry["value"] = edge.value
    if not edge.gradient:
        entry["gradient"] = False
    return entry


def _edges_from_json(entries: object) -> list[Edge]:
    if not isinstance(entries, list):
        raise FormatError(f'"edges" is {_shown(entries)}; it must be a list of objects')
    return [_edge_from_json(entry) for entry in entries]


def _edge_from_json(entry: object) -> Edge:
    example = 'write e.g. {"source": 0, "targets": [1, 3]}'
    if not isinstance(entry, dict) or not {"source", "targets"} <= entry.keys() <= set(Edge._fields):
        raise FormatError(f"{_shown(entry)} is not an edge; {example}")
    source, targets = entry["source"], entry["targets"]
    value, gradient = entry.get("value", ""), entry.get("gradient", True)
    if not _is_count(source) or not isinstance(targets, list) or not all(map(_is_count, targets)):
        raise FormatError(f"{_shown(entry)} is not an edge: stages must be numbers; {example}")
    if not isinstance(value, str) or not isinstance(gradient, bool):
        raise FormatError(f'{_shown(entry)} is not an edge: "value" must be a string, "gradient" true or false')
    return Edge(source, tuple(targets), value, gradient)


def _rank_from_json(entry: object, number: int, ranks: int) -> int:
    if not isinstance(entry, dict):
        raise FormatError(f"expected an object with rank, stages and actions, got {_shown(entry)}", row=number)
    rank = entry.get("rank")
    if not _is_count(rank) or rank >= ranks:
        raise FormatError(f'"rank" is {_shown(rank)}; the ranks are 0 to {ranks - 1}', row=number)
    return rank


def _stages_from_json(entry: Mapping[str, Any], number: int) -> list[int]:
    stages = entry.get("stages")
    if not isinstance(stages, list) or not all(map(_is_count, stages)):
        raise FormatError(f'"stages" is {_shown(stages)}; it must be a list of stage numbers', row=number)
    return stages


def _cells_from_json(entry: Mapping[str, Any], number: int) -> list[Action | None]:
    cells = entry.get("actions")
    if not isinstance(cells, list):
        raise FormatError(f'"actions" is {_shown(cells)}; it must be a list of actions', row=number)
    actions: list[Action | None] = []
    for position, cell in enumerate(cells, start=1):
        if cell is not None and not (isinstance(cell, str) and cell):
            raise ScheduleSyntaxError(
                f'{_shown(cell)} is not an action; write e.g. "2F0", or null for an idle step',
                text=_shown(cell),
                row=number,
                cell=position,
            )
        actions.append(None if cell is None else parse_cell(cell, row=number, cell=position))
    return actions


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shown(value: object) -> str:
    try:
        text = "null or missing" if value is None else json.dumps(value)
    except RecursionError:
        text = "nested too deeply"
    return shorten(text)
