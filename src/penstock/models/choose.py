"""Chooses the layout of a split: by count, by cost, by name, or from a string in Megatron's notation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import SplitError
from penstock.models import megatron
from penstock.models.layout import Layout, by_names, by_sizes
from penstock.models.partition import UnitCosts, by_cost, by_count, repeated_units
from penstock.models.units import Units, find_units, has_state, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from penstock.models.record import Record


def choose_layout(
    model: nn.Module,
    units: Units,
    record: Record | None,
    stages: int | Sequence[int] | None,
    layout: str | Iterable[Iterable[str]] | None,
    costs: UnitCosts | None,
) -> Layout:
    """Return the names of the units of each stage."""
    names = _in_call_order(units, record)
    if isinstance(layout, str):
        return megatron.read(layout, megatron.group_units(names))
    if layout is not None:
        aliases = {alias: names_[0] for names_ in names_of(model).values() for alias in names_[1:]}
        given = [[aliases.get(name, name) for name in stage] for stage in layout]
        glue = [*units.glue, *(name for name in units.containers if name)]
        return by_names(given, names, glue=glue)
    assert stages is not None
    _refuse_loops(record, units)
    if isinstance(stages, Sequence):
        if costs is not None:
            raise SplitError(f"stages={[*stages]} says how many layers each stage has, so costs= has nothing to choose")
        return by_sizes(names, stages)
    if costs is not None:
        return by_cost(names, costs, stages)
    layers = set(repeated_units([name for name in names if has_state(units.units[name])]))
    return by_count(names, stages, is_layer=layers.__contains__)


def _refuse_loops(record: Record | None, units: Units) -> None:
    calls = [call.unit for call in record.calls] if record else []
    for unit, count in Counter(calls).items():
        if count > 1 and unit in units.listed:
            raise SplitError(
                f"{unit!r} is called {count} times, in a loop, and cannot be on several stages; name the stages with "
                "layout= so that everything the loop calls is on one",
                unit=unit,
            )


def _in_call_order(units: Units, record: Record | None) -> list[str]:
    """Return the names of the units as they are called; one that never is follows the one registered before it."""
    if record is None:
        return list(units.units)
    order = list(dict.fromkeys(call.unit for call in record.calls if not call.is_glue))
    before: str | None = None
    for name in units.units:
        if name not in order:
            order.insert(0 if before is None else order.index(before) + 1, name)
        before = name
    return order


def find_opened(model: nn.Module, layout: str | Iterable[Iterable[str]] | None) -> tuple[str, ...]:
    """Return the units that a layout looks into: those that contain a module it names."""
    if layout is None or isinstance(layout, str):
        return ()
    units = find_units(model).units
    known = {name for names in names_of(model).values() for name in names}
    inside = [name for stage in layout for name in stage if name in known and name not in units]
    parents = {name.rpartition(".")[0] for name in inside if any(name.startswith(f"{unit}.") for unit in units)}
    return tuple(sorted(parents))
