"""Collects the data of a page: arrays and texts that JSON can represent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.ir import packed
from penstock.ir.actions import OVERLAP_F_B, RECV_B, RECV_F, SEND_F
from penstock.simulation.idle import CAUSES
from penstock.simulation.step_graph import LANE, POST, ROOM
from penstock.view.palette import STYLES, style_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.simulation.memory import MemoryCurve
    from penstock.simulation.timeline import Timeline

    Ints = NDArray[np.signedinteger[Any]]

_STYLE_NAMES = tuple(STYLES)


def facts_of_page(timelines: Sequence[Timeline], titles: Sequence[str], memory_limit: float | None) -> dict[str, Any]:
    """Return everything that the page shows."""
    return {
        "styles": [{"name": name, **_style_data(name)} for name in STYLES],
        "causes": CAUSES,
        "limit": memory_limit,
        "timelines": [
            facts_of_timeline(timeline, title) for timeline, title in zip(timelines, titles, strict=True)
        ],
    }  # fmt: skip


def _style_data(name: str) -> dict[str, str]:
    style = STYLES[name]
    return {"meaning": style.meaning, "colour": style.colour, "ink": style.ink}


def facts_of_timeline(timeline: Timeline, title: str) -> dict[str, Any]:
    """Return everything that the page shows of one timeline."""
    schedule = timeline.step_graph.schedule
    return {
        "title": title,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "steps": timeline.step_graph.steps,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubbleRate": timeline.bubble_rate,
        "spanBubbleRate": timeline.span_bubble_rate,
        "peaks": _short(timeline.peak_memory),
        "cells": _cells(timeline),
        "edges": _edges(timeline),
        "waits": _waits(timeline),
        "transfers": _transfers(timeline),
        "memory": [_curve(curve) for curve in timeline.memory],
    }


def _cells(timeline: Timeline) -> dict[str, Any]:
    """Return the actions, including sends and receives, rank by rank; ``first`` is where each rank begins."""
    graph = timeline.step_graph
    return {
        "first": graph.actions.first_cell.tolist(),
        "start": _short(timeline.start.tolist()),
        "end": _short(timeline.end.tolist()),
        "step": graph.step.tolist() if graph.steps > 1 else None,
        "style": _styles(timeline).tolist(),
        "posted": np.flatnonzero(graph.is_transfer).tolist(),
        "name": [str(span.action) for span in timeline.spans],
    }


def _styles(timeline: Timeline) -> Ints:
    """Return the style of each cell, by its number."""
    graph = timeline.step_graph
    of_type = np.array([0, *(_STYLE_NAMES.index(style_name(kind)) for kind in packed.TYPE_NUMBER)])
    styles = of_type[graph.actions.kind[graph.first_action]]
    several = np.diff(np.append(graph.first_action, len(graph.actions))) > 1
    return np.where(several, _STYLE_NAMES.index(style_name(OVERLAP_F_B)), styles)


def _edges(timeline: Timeline) -> dict[str, Any]:
    """Return what each node waited for longest, and all that needs it; nodes after the cells are ends of steps."""
    graph = timeline.step_graph
    needed = np.flatnonzero(_is_need(timeline))
    needed = needed[np.argsort(graph.source[needed], kind="stable")]
    path = timeline.critical_path
    return {
        "before": np.append(graph.source, -1)[timeline.critical].tolist(),
        "first": np.searchsorted(graph.source[needed], np.arange(graph.nodes + 1)).tolist(),
        "after": graph.target[needed].tolist(),
        "last": timeline.spans.index(path[-1]) if path else -1,
    }


def _is_need(timeline: Timeline) -> NDArray[np.bool_]:
    """Return whether each edge is one of data or order, rather than the queue of a lane or a posted receive."""
    graph = timeline.step_graph
    is_need = ~np.isin(graph.reason, [LANE, ROOM])
    waiting = graph.events.waiting
    receives = graph.actions.is_kind(waiting, RECV_F) | graph.actions.is_kind(waiting, RECV_B)
    is_need[: len(waiting)] &= ~(receives & (graph.events.reason == POST))
    return np.asarray(is_need)


def _waits(timeline: Timeline) -> dict[str, Any]:
    waits = timeline.waits
    ranks = np.array([wait.rank for wait in waits], np.int64)
    return {
        "first": np.searchsorted(ranks, np.arange(timeline.step_graph.ranks + 1)).tolist(),
        "start": _short(wait.start for wait in waits),
        "end": _short(wait.end for wait in waits),
        "cause": [CAUSES.index(wait.cause) for wait in waits],
        "why": [wait.why for wait in waits],
    }


def _transfers(timeline: Timeline) -> dict[str, Any]:
    """Return the transfers sorted by start, so that those in view are adjacent."""
    transfers = sorted(timeline.transfers, key=lambda transfer: transfer.start)
    return {
        "source": [transfer.source for transfer in transfers],
        "target": [transfer.target for transfer in transfers],
        "start": _short(transfer.start for transfer in transfers),
        "end": _short(transfer.end for transfer in transfers),
        "forward": [int(transfer.action.computation_type is SEND_F) for transfer in transfers],
        "name": [str(transfer.action) for transfer in transfers],
    }


def _curve(curve: MemoryCurve) -> dict[str, Any]:
    """Return the curve without the times at which nothing changes."""
    changes = np.append(True, np.diff(curve.values) != 0)
    return {"time": _short(curve.times[changes].tolist()), "value": _short(curve.values[changes].tolist())}


def _short(numbers: Iterable[float]) -> list[float]:
    """Round off the noise in the last digits, which would make up half of the file."""
    return [_whole(float(f"{number:.12g}")) for number in numbers]


def _whole(number: float) -> float:
    return int(number) if number.is_integer() and abs(number) < 1e15 else number
