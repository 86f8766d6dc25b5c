"""Finds what a split missed, once a check has failed: which module stores a value, and which one finds it.

The value goes from one to the other neither as an output nor as an argument, so that no edge can carry it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from penstock.models.outside_state import changes, expand, places_in
from penstock.models.self_check import find_difference
from penstock.models.sources import wrap_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn


class Observed:
    """What the units of a model have returned and stored in one run.

    Attributes:
        results: the results of each unit, call by call.
        stored: where each unit has stored something, by the unit.
        order: the units in the order of their calls.
        failed: the unit in which the run has failed.
    """

    def __init__(self) -> None:
        self.results: dict[str, list[Any]] = defaultdict(list)
        self.stored: dict[str, list[str]] = defaultdict(list)
        self.order: list[str] = []
        self.failed: str | None = None
        self._depth = 0

    def watch(self, model: nn.Module, units: Iterable[str], *, stores: bool) -> None:
        """Watch the calls of units; ``stores`` also compares the state before and after them."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in units:
            wrap_forward(modules[name], self._call, name, model if stores else None)

    def _call(
        self, forward: Callable[..., Any], name: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._depth:
            return forward(*args, **kwargs)
        before = [] if model is None else [(place, place.read()) for place in expand(places_in(model))]
        self._depth += 1
        try:
            result = forward(*args, **kwargs)
        except Exception:
            self.failed = self.failed or name
            raise
        finally:
            self._depth -= 1
        self.order.append(name)
        self.results[name].append(result)
        self.stored[name] += changes(before)
        return result


def describe_channel(
    whole: Observed, parts: Mapping[int, Observed], stage_of: Mapping[str, int]
) -> tuple[str, str, str] | None:
    """Find the first unit of a stage that does not compute what it computes in the model, and what it may have missed.

    Returns:
        The unit, the unit of another stage that stores something, and where; None if there are no such units.
    """
    found = next((wrong for _, part in sorted(parts.items()) if (wrong := _first_wrong(whole, part)) is not None), None)
    if found is None:
        return None
    reader, call = found
    for writer in whole.order:
        if writer == reader:
            call -= 1
        if call < 0:
            break
        if whole.stored[writer] and stage_of[writer] != stage_of[reader]:
            return reader, writer, ", ".join(dict.fromkeys(whole.stored[writer]))
    return None


def _first_wrong(whole: Observed, part: Observed) -> tuple[str, int] | None:
    """Find the first unit that has returned something else, or has failed, and in which of its calls."""
    seen: dict[str, int] = defaultdict(int)
    for name in part.order:
        number = seen[name]
        seen[name] += 1
        expected = whole.results[name]
        if number < len(expected) and find_difference(part.results[name][number], expected[number]):
            return name, number
    return None if part.failed is None else (part.failed, seen[part.failed])
