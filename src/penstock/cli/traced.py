"""Collects what the ranks of a run have traced, and writes it as a page or a file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import typer

from penstock.errors import PenstockError, WriteError
from penstock.simulation.timeline import WRITERS, Timeline
from penstock.simulation.timeline_json import write_timeline
from penstock.simulation.traces import RankTrace, read_traces, timeline_of, unfinished_timeline
from penstock.view.page import write_page

#: The variable that makes every pipeline trace its steps, of the layer that imports torch.
VARIABLE: Final = "PENSTOCK_TRACE"
#: The suffixes of files that a run can write.
SUFFIXES: Final = (".html", ".json", ".png", ".svg")


class Traced(NamedTuple):
    """A timeline that was traced, and its title."""

    timeline: Timeline
    title: str


def check_suffix(path: Path) -> None:
    """Refuse a file that could not be written when the run has ended."""
    if path.suffix.lower() not in SUFFIXES:
        raise WriteError(f"{path}: unknown suffix; use *{', *'.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise WriteError(f"{path}: cannot be written: there is no folder {path.absolute().parent}")


@contextmanager
def trace_folder(path: Path) -> Iterator[str]:
    """Yield a folder for the traces of a run; when the run ends, however it does, write what is in it.

    Args:
        path: the file to write: a page, a timeline (*.json) or a chart.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-trace-") as folder:
        try:
            yield folder
        finally:
            typer.echo(f"penstock: {_write(path, folder)}", err=True)


def _write(path: Path, folder: str) -> str:
    """Write what was traced; return what to report."""
    try:
        groups = read_traces(folder)
        found = traced_timelines(groups)
        if not found:
            return f"{_nothing_traced(groups)}; {path} was not written"
        write_traced(found, path)
    except PenstockError as error:
        return f"the trace could not be written: {error}"
    return f"wrote {path}: {'; '.join(each.title for each in found)}"


def _nothing_traced(groups: Sequence[Sequence[RankTrace]]) -> str:
    if groups:
        return "no rank has completed an action of a step"
    return "no step was traced: only steps of penstock.runtime.Pipeline are, if all of its ranks have begun one"


def traced_timelines(groups: Sequence[Sequence[RankTrace]]) -> list[Traced]:
    """Return the timelines of all traced schedules: a step of median length, and one that was not finished."""
    found = []
    for traces in groups:
        name = str(traces[0].schedule.metadata.get("name") or "schedule")
        steps = frozenset.intersection(*(trace.complete for trace in traces))
        if steps:
            kept = f"median of the last {len(steps)} steps" if len(steps) > 1 else f"step {min(steps)}"
            found.append(Traced(timeline_of(traces), f"{name}, measured: {kept}"))
        if (unfinished := unfinished_timeline(traces)) is not None:
            found.append(Traced(unfinished[0], f"{name}, {unfinished[1]}"))
    return found


def write_traced(found: Sequence[Traced], path: Path) -> None:
    """Write timelines: all on a page, or the first one as another kind of file."""
    if path.suffix.lower() == ".html":
        write_page([each.timeline for each in found], path, titles=[each.title for each in found])
    elif path.suffix.lower() == ".json":
        write_timeline(found[0].timeline, path)
    else:
        WRITERS[path.suffix.lower()](found[0].timeline, path)
