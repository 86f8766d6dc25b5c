"""Shows what was predicted next to what was measured: a short table, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.demo.choose import Chosen
from penstock.cli.demo.listener import Listener
from penstock.cli.launch import cores
from penstock.simulation.timeline_json import read_timeline
from penstock.view.report import Curve, Paragraph, Part, Rows, Section, Timelines, write_report

if TYPE_CHECKING:
    from penstock.planning.result import Alternative, Plan

_COLUMNS: Final = ("busy", "idle", "memory")


def compare(console: Console, chosen: Chosen, recorded: dict[str, Any]) -> dict[str, Any]:
    """Print the predicted next to the measured figures of every rank; returns both."""
    facts = {"predicted": _predicted(chosen), "measured": _measured(recorded)}
    table = Table(box=None, pad_edge=False)
    for title in _titles():
        table.add_column(title.replace(" ", "\n"), justify="right")
    for row in _rows(facts):
        table.add_row(*row)
    explained = explain(recorded["steps"], chosen.schedule.ranks, cores())
    console.print(Text("\n".join(["", *explained])), soft_wrap=True)
    console.print(table)
    console.print(Text(_step(facts)), soft_wrap=True)
    return facts


def explain(steps: int, ranks: int, available: int) -> list[str]:
    """Say what the figures are.

    >>> explain(1, ranks=2, available=2)
    ['predicted from the profile; measured in the last step']
    """
    measured = "the last step" if steps == 1 else f"the step of median length among the last {steps}"
    lines = [f"predicted from the profile; measured in {measured}"]
    if ranks > available:
        shared = "1 core" if available == 1 else f"{available} cores"
        lines.append(
            f"{ranks} ranks share {shared} here, in the profile as in training; that is not modelled, so a step may "
            "take much less than predicted, or more"
        )
    return lines


def report(path: Path, chosen: Chosen, listener: Listener, facts: dict[str, Any]) -> None:
    """Write the report of what ``compare`` returned, and of the training."""
    recorded = listener.recorded
    assert recorded is not None
    losses = [(number, loss) for number, loss in enumerate(listener.losses, start=1)]
    summary = f"{len(losses)} steps; the loss is {losses[0][1]:.3f} in the first and {losses[-1][1]:.3f} in the last. "
    rate = "" if listener.rate is None else f"{listener.rate:,.0f} tokens per second."
    timelines = Timelines.of([chosen.predicted, read_timeline(recorded["timeline"])], ["predicted", "measured"])
    explained = explain(recorded["steps"], chosen.schedule.ranks, cores())
    sections = [
        Section("Training", [Paragraph(summary + rate), Curve(losses, "step", "loss")]),
        Section("A step: predicted and measured", [*map(Paragraph, (_step(facts), *explained)), timelines]),
        Section("Time and memory of each rank", [Rows(_titles(), _rows(facts))]),
        Section("The plan", _plan_parts(chosen)),
        Section(
            "Stages",
            [Rows(("stage", "rank", "modules"), _stages(chosen))],
        ),
    ]
    schedule = chosen.schedule
    sizes = f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
    write_report(path, f"penstock demo: {sizes}", sections)


def _plan_parts(chosen: Chosen) -> list[Part]:
    parts: list[Part] = [Paragraph(line) for line in chosen.explanation]
    return parts if chosen.plan is None else [*parts, _alternatives(chosen.plan)]


def _alternatives(plan: Plan) -> Rows:
    """Show the best of each name and placement."""
    best: dict[tuple[str, str], Alternative] = {}
    for each in plan.alternatives:
        best.setdefault((each.name, each.placement), each)
    rows = [
        (
            each.name,
            each.placement,
            _milliseconds(each.timeline.makespan),
            f"{each.timeline.bubble_rate:.1%}",
            _mebibytes(max(each.timeline.peak_memory)),
            each.reason or "chosen",
        )
        for each in best.values()
    ]
    return Rows(("schedule", "placement", "step", "bubble", "memory", "why not"), rows, marked=0)


def _stages(chosen: Chosen) -> list[tuple[str, str, str]]:
    rank_of = chosen.schedule.placement.rank_of
    return [(str(stage), str(rank_of[stage]), ", ".join(names)) for stage, names in enumerate(chosen.layout)]


def _titles() -> list[str]:
    return ["rank", *(f"{title} {kind}" for title in _COLUMNS for kind in ("predicted", "measured"))]


def _rows(facts: dict[str, Any]) -> list[list[str]]:
    """Return a row of the table for each rank."""
    drawn = {"busy": _milliseconds, "idle": _milliseconds, "memory": _mebibytes}
    pairs = zip(facts["predicted"]["ranks"], facts["measured"]["ranks"], strict=True)
    return [
        [str(rank), *(drawn[title](figures[title]) for title in _COLUMNS for figures in pair)]
        for rank, pair in enumerate(pairs)
    ]


def _predicted(chosen: Chosen) -> dict[str, Any]:
    timeline = chosen.predicted
    return _figures(timeline.makespan, timeline.busy, timeline.idle, timeline.peak_memory)


def _measured(recorded: dict[str, Any]) -> dict[str, Any]:
    return _figures(recorded["makespan"], recorded["busy"], recorded["idle"], recorded["memory"])


def _figures(makespan: float, busy: Any, idle: Any, memory: Any) -> dict[str, Any]:
    rows = zip(busy, idle, memory, strict=True)
    return {"makespan": makespan, "ranks": [dict(zip(_COLUMNS, map(float, row), strict=True)) for row in rows]}


def _step(facts: dict[str, Any]) -> str:
    predicted, measured = facts["predicted"]["makespan"], facts["measured"]["makespan"]
    times = f"predicted {_milliseconds(predicted)}, measured {_milliseconds(measured)}"
    return f"a step: {times} ({_apart(predicted, measured)})"


def _apart(predicted: float, measured: float) -> str:
    """Compare what was measured with the prediction.

    >>> _apart(100, 100.1), _apart(100, 90), _apart(100, 150), _apart(100, 480)
    ('as predicted', '-10%', '+50%', '4.8 times as long')
    """
    percent = round(100 * (measured / predicted - 1))
    if percent > 100:
        return f"{measured / predicted:.1f} times as long"
    return f"{percent:+d}%" if percent else "as predicted"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
