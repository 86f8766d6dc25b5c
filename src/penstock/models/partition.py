"""Cuts the units of a model into stages: evenly, or so that the most expensive stage costs the least."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock.errors import CostsError, SplitError
from penstock.ir.numbers import whole_number
from penstock.models.layout import Layout, near_matches, shorten, units_below

if TYPE_CHECKING:
    from collections.abc import Callable

#: What a unit costs, as a sequence or by name. A name may also be a container: each of its units then costs that much.
UnitCosts: TypeAlias = Mapping[str, float] | Sequence[float]

_EXAMPLE: Final = 'write e.g. costs=[1, 1, 2], or costs={"layers": 1, "head": 2}'


def repeated_units(units: Sequence[str]) -> tuple[str, ...]:
    """Return the units that are counted as layers: the elements of the long lists of a model.

    A list counts if it has at least a quarter as many elements as the longest one, so that a vision tower counts and a
    head of two modules does not. A model without lists has only layers.

    >>> repeated_units(["embed", "layers.0", "layers.1", "norm", "head"])
    ('layers.0', 'layers.1')
    """
    lists: dict[str, list[str]] = defaultdict(list)
    for unit in units:
        parent, _, name = unit.rpartition(".")
        if name.isdecimal():
            lists[parent].append(unit)
    longest = max(map(len, lists.values()), default=0)
    if longest < 2:
        return tuple(units)
    counted = {unit for elements in lists.values() if 4 * len(elements) >= longest for unit in elements}
    return tuple(unit for unit in units if unit in counted)


def by_count(units: Sequence[str], stages: int, *, is_layer: Callable[[str], bool] | None = None) -> Layout:
    """Cut the units, in call order, into stages with the same number of layers, or one layer more.

    Stages in the middle get the layers that are left over, since the first and the last also hold what comes before and
    after the layers. If there are fewer layers than stages, every unit counts as one.

    Args:
        units: the names of all units, in call order.
        stages: the number of stages.
        is_layer: which units are counted; by default ``repeated_units``.

    >>> layout = by_count(["embed", *[f"layers.{n}" for n in range(30)], "norm", "head"], stages=4)
    >>> [len(stage) for stage in layout]
    [8, 8, 8, 9]
    >>> layout[0][:3], layout[-1][-3:]
    (('embed', 'layers.0', 'layers.1'), ('layers.29', 'norm', 'head'))
    """
    _check_sizes(units, stages)
    layers = set(repeated_units(units) if is_layer is None else filter(is_layer, units))
    if len(layers) < stages:
        layers = set(units)
    least, left = divmod(len(layers), stages)
    first_with_more = (stages - left) // 2
    sizes = [least + (first_with_more <= stage < first_with_more + left) for stage in range(stages)]
    ends = list(accumulate(sizes))
    cut: list[list[str]] = [[] for _ in range(stages)]
    seen = 0
    for unit in units:
        seen += unit in layers
        cut[bisect_left(ends, max(seen, 1))].append(unit)
    return tuple(map(tuple, cut))


def by_cost(units: Sequence[str], costs: UnitCosts, stages: int) -> Layout:
    """Cut the units, in call order, into stages whose largest cost is the smallest possible.

    Of all such cuts, it returns one whose costs are the most even (the smallest sum of squares). The result is exact:
    costs are added as integers.

    Args:
        units: the names of all units, in call order.
        costs: one per unit, or one per layer (see ``repeated_units``); or by name, where a container's name stands for
            each of its units. Units that are not layers cost nothing unless they are named.
        stages: the number of stages.

    >>> by_cost(["embed", "a", "b", "c", "head"], {"embed": 1, "a": 2, "b": 2, "c": 2, "head": 5}, stages=3)
    (('embed', 'a'), ('b', 'c'), ('head',))
    >>> by_cost(["embed", "layers.0", "layers.1", "layers.2", "head"], [5, 1, 1], stages=2)
    (('embed', 'layers.0'), ('layers.1', 'layers.2', 'head'))
    """
    _check_sizes(units, stages)
    sums = [0, *accumulate(_as_integers(_cost_of_each(units, _checked_costs(costs))))]
    cuts = _even_cuts(sums, stages, _smallest_limit(sums, stages))
    return tuple(tuple(units[start:end]) for start, end in zip([0, *cuts], [*cuts, len(units)], strict=True))


def _check_sizes(units: Sequence[str], stages: int) -> None:
    whole_number("stages", stages, least=1)
    if stages > len(units):
        raise SplitError(
            f"{stages} stages need at least as many units, but the model has {len(units)}: {shorten(units)}; use fewer "
            "stages, or name modules within a unit with layout="
        )


def _checked_costs(costs: Any) -> Mapping[str, Any] | list[Any]:
    """Return costs by name as they are, all others as a list."""
    plain = costs.tolist() if callable(getattr(costs, "tolist", None)) else costs  # of an array
    if isinstance(plain, Mapping):
        if others := [name for name in plain if not isinstance(name, str)]:
            raise CostsError(
                f"costs= names {others[0]!r}, which is not the name of a module; {_EXAMPLE}", field="costs", value=costs
            )
        return plain
    if isinstance(plain, (str, bytes, Set)) or not isinstance(plain, Iterable):
        raise CostsError(
            f"costs= must be a list with a number per layer, or numbers by name, got {costs!r}; {_EXAMPLE}",
            field="costs",
            value=costs,
        )
    return [*plain]


def _cost_of_each(units: Sequence[str], costs: Mapping[str, Any] | list[Any]) -> list[Any]:
    layers = repeated_units(units)
    if isinstance(costs, Mapping):
        by_name = _expand(costs, units)
        if missing := [unit for unit in layers if unit not in by_name]:
            raise CostsError(f"no cost is given for {shorten(missing)}", field="costs", value=costs)
    elif len(costs) == len(units):
        by_name = dict(zip(units, costs, strict=True))
    elif len(costs) == len(layers):
        by_name = dict(zip(layers, costs, strict=True))
    else:
        counts = f"{len(units)} units" + (f", {len(layers)} of them layers" if len(layers) < len(units) else "")
        raise CostsError(
            f"{len(costs)} costs are given, but the model has {counts}: {shorten(units)}", field="costs", value=costs
        )
    return [by_name.get(unit, 0) for unit in units]


def _expand(costs: Mapping[str, Any], units: Sequence[str]) -> dict[str, Any]:
    """Give every unit its cost; the longest name counts, so that one layer of a list may have its own."""
    each: dict[str, Any] = {}
    for name in sorted(costs, key=len):
        found = units_below(name, units)
        if not found:
            raise CostsError(f"a cost is given for unknown unit {name!r}{near_matches(name, units)}", field="costs")
        each.update(dict.fromkeys(found, costs[name]))
    return each


def _as_integers(costs: list[Any]) -> list[int]:
    """Scale costs to integers, exactly: every float is a fraction."""
    try:
        exact = [Fraction(cost) for cost in costs if not isinstance(cost, str)]
    except (TypeError, ValueError, OverflowError):
        exact = []
    if len(exact) < len(costs):
        raise CostsError(f"costs must be finite numbers, got {costs}", field="costs", value=costs)
    if min(exact) < 0:
        raise CostsError(f"a cost must not be negative, got {float(min(exact)):g}", field="costs", value=costs)
    scale = lcm(*(cost.denominator for cost in exact))
    return [int(cost * scale) for cost in exact]


def _smallest_limit(sums: list[int], stages: int) -> int:
    """Return the smallest possible cost of the most expensive stage. O(stages * units * log units)."""
    units = len(sums) - 1
    best = sums.copy()  # best[end]: for the first `end` units, in the stages so far
    for stage in range(1, stages):
        best = [_best_last_cut(best, sums, stage, end) if stage < end else sums[end] for end in range(units + 1)]
    return best[units]


def _best_last_cut(best: list[int], sums: list[int], first: int, end: int) -> int:
    """Return the smallest limit if the last stage ends here: a later start makes it cheaper, and the rest dearer."""
    start = bisect_left(range(end), True, lo=first, key=lambda cut: best[cut] >= sums[end] - sums[cut])
    candidates = [max(best[cut], sums[end] - sums[cut]) for cut in (start - 1, start) if first <= cut < end]
    return min(candidates)


def _even_cuts(sums: list[int], stages: int, limit: int) -> list[int]:
    """Return the cuts with the smallest sum of squared costs, no stage above the limit."""
    units = len(sums) - 1
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]  # by stage and end: sum of squares, start of that stage
    for stage in range(1, stages + 1):
        ends: dict[int, tuple[int, int]] = {}
        for start, (squares, _) in best[-1].items():
            for end in range(start + 1, units - (stages - stage) + 1):
                cost = sums[end] - sums[start]
                if cost > limit:
                    break
                ends[end] = min(ends.get(end, (squares + cost * cost, start)), (squares + cost * cost, start))
        best.append(ends)
    cuts = [units]
    for ends in reversed(best[1:]):
        cuts.append(ends[cuts[-1]][1])
    return cuts[-2:0:-1]
