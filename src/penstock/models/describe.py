"""Describes a split as a table: stages with their modules, parameters, bytes and cost, then edges and ties."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from penstock.models.description import Description

_NUMBERED = re.compile(r"(.*\.|)(\d+)")


class StageSummary(NamedTuple):
    """One line of the table.

    Attributes:
        stage: the stage.
        modules: its units; a run of layers is abbreviated.
        parameters: how many parameters it holds; those of ties count in each stage that holds them.
        bytes: the memory they take.
        cost: its share of the cost of the whole model: of the given costs, or of the parameters of the layers.
    """

    stage: int
    modules: tuple[str, ...]
    parameters: int
    bytes: int
    cost: float


def summarize(
    model: nn.Module, description: Description, costs: Mapping[str, float] | None = None
) -> list[StageSummary]:
    """Return the lines of the table."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    estimated = costs or _estimate(model, description)
    total = sum(estimated.values()) or 1
    lines = []
    for stage, units in enumerate(description.layout):
        held = {id(tensors[name]): tensors[name] for name in description.held[stage] if name in tensors}.values()
        lines.append(
            StageSummary(
                stage,
                tuple(abbreviate(units)),
                sum(tensor.numel() for tensor in held),
                sum(tensor.numel() * tensor.element_size() for tensor in held),
                sum(estimated.get(unit, 0) for unit in units) / total,
            )
        )
    return lines


def describe(model: nn.Module, description: Description) -> str:
    """Return the table as text."""
    rows = [("stage", "parameters", "bytes", "cost", "modules")]
    rows += [
        (str(line.stage), f"{line.parameters:,}", format_bytes(line.bytes), f"{line.cost:.0%}", " ".join(line.modules))
        for line in summarize(model, description)
    ]
    text = _table(rows)
    text += _section("edges", [_edge(edge) for edge in description.flow.edges])
    text += _section("ties", map(str, description.ties))
    text += _section("never called, placed with a neighbor", description.uncalled)
    text += _section("never read, placed with a neighbor", description.unread)
    return text


def to_plain(model: nn.Module, description: Description) -> dict[str, Any]:
    """Return what the table says, as plain data."""
    return {
        "stages": [
            line._asdict() | {"modules": list(description.layout[line.stage])} for line in summarize(model, description)
        ],
        "edges": [
            {"source": e.source, "targets": list(e.targets), "value": e.value, "gradient": e.gradient}
            for e in description.flow.edges
        ],
        "ties": [[{"stage": stage, "name": name} for stage, name in tie.members] for tie in description.ties],
        "never_called": list(description.uncalled),
        "never_read": list(description.unread),
        "digest": description.digest,
    }


def abbreviate(names: Iterable[str]) -> list[str]:
    """Abbreviate runs of numbered names.

    >>> abbreviate(["embed", "layers.0", "layers.1", "layers.2", "norm"])
    ['embed', 'layers.0-2', 'norm']
    """
    runs: list[tuple[str, int, int] | str] = []
    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found is None:
            runs.append(name)
            continue
        prefix, number = found[1], int(found[2])
        last = runs[-1] if runs else ""
        if not isinstance(last, str) and last[0] == prefix and last[2] == number - 1:
            runs[-1] = (prefix, last[1], number)
        else:
            runs.append((prefix, number, number))
    return [one if isinstance(one, str) else _run(*one) for one in runs]


def format_bytes(count: int) -> str:
    """Format a number of bytes.

    >>> format_bytes(512), format_bytes(123_456_789)
    ('512 B', '118 MiB')
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def _run(prefix: str, first: int, last: int) -> str:
    return f"{prefix}{first}" if first == last else f"{prefix}{first}-{last}"


def _estimate(model: nn.Module, description: Description) -> dict[str, float]:
    """Estimate the cost of units by their parameters, which a forward multiplies with each token once.

    An embedding is a lookup, so it costs nothing.
    """
    return {
        unit: sum(parameter.numel() for parameter in model.get_submodule(unit).parameters() if parameter.ndim > 1)
        * ("Embedding" not in type(model.get_submodule(unit)).__name__)
        for units in description.layout
        for unit in units
    }


def _edge(edge: Any) -> str:
    targets = ", ".join(map(str, edge.targets))
    return f"{edge.source} -> {targets}: {edge.value or 'output'}{'' if edge.gradient else ' (no gradient)'}"


def _section(title: str, lines: Iterable[str]) -> str:
    listed = list(lines)
    return "".join([f"\n{title}:\n", *(f"  {line}\n" for line in listed)]) if listed else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]) + "\n"
        for row in rows
    )
