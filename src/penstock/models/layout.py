"""Defines a layout: which units of a model are on which stage; by name, and as plain data.

A layout is a tuple with the names of the units of each stage, in call order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import accumulate
from typing import Any, Final, TypeAlias

from penstock.errors import SplitError

Layout: TypeAlias = tuple[tuple[str, ...], ...]

_EXAMPLE: Final = 'write e.g. [["embed", "layers.0"], ["layers.1", "head"]]'

#: At most this many names are listed in a message.
LISTED: Final = 12


def by_names(given: Iterable[Iterable[str]], units: Sequence[str], *, glue: Iterable[str] = ()) -> Layout:
    """Lay out the units as named, stage by stage.

    Args:
        given: the names for each stage. A name is a unit, a container (which stands for all its units), or a glue
            module: glue runs on every stage, so its name is accepted and left out.
        units: the names of all units, in call order; within a stage, units are sorted accordingly.
        glue: the names of modules that belong to no unit.

    >>> units = ["embed", "layers.0", "layers.1", "layers.2", "head"]
    >>> by_names([["embed", "layers.0"], ["layers.1", "layers.2", "rotary"], ["head"]], units, glue=["rotary"])
    (('embed', 'layers.0'), ('layers.1', 'layers.2'), ('head',))
    >>> by_names([["layers", "embed"], ["head"]], units)
    (('embed', 'layers.0', 'layers.1', 'layers.2'), ('head',))
    """
    stages = checked_names(given)
    order, glue_names = {unit: number for number, unit in enumerate(units)}, set(glue)
    layout = [
        [unit for name in names for unit in _resolve(name, stage, units, glue_names)]
        for stage, names in enumerate(stages)
    ]
    check_layout(layout, units)
    return tuple(tuple(sorted(stage, key=order.__getitem__)) for stage in layout)


def by_sizes(units: Sequence[str], sizes: Sequence[int]) -> Layout:
    """Lay out the units by how many each stage has.

    >>> by_sizes(["embed", "layers.0", "layers.1", "head"], [1, 2, 1])
    (('embed',), ('layers.0', 'layers.1'), ('head',))
    >>> by_sizes(["embed", "layers.0", "layers.1", "head"], [1, 2])
    Traceback (most recent call last):
        ...
    penstock.errors.SplitError: stages=[1, 2] are 3 layers, but the model has 4: embed, layers.0, layers.1, head
    """
    for stage, size in enumerate(sizes):
        if type(size) is not int or size < 1:
            raise SplitError(
                f"every stage needs at least one layer, but stages={[*sizes]} gives stage {stage} {size!r}"
            )
    if sum(sizes) != len(units):
        raise SplitError(f"stages={[*sizes]} are {sum(sizes)} layers, but the model has {len(units)}: {shorten(units)}")
    ends = [*accumulate(sizes)]
    return tuple(tuple(units[end - size : end]) for end, size in zip(ends, sizes, strict=True))


def checked_names(given: object) -> list[list[str]]:
    """Return the names of each stage as lists, of a list or of a mapping by the number of the stage.

    >>> checked_names({0: ["embed"], 1: ("layers", "head")})
    [['embed'], ['layers', 'head']]
    >>> checked_names(["embed", "head"])
    Traceback (most recent call last):
        ...
    penstock.errors.SplitError: stage 0 must be a list of names, got 'embed'; write e.g. \
[["embed", "layers.0"], ["layers.1", "head"]]
    """
    if isinstance(given, Mapping):
        return [list(names) for names in from_dict(given)]
    return [_names(names, number) for number, names in enumerate(_stages(given))]


def check_layout(layout: Sequence[Sequence[str]], units: Sequence[str]) -> None:
    """Raise ``SplitError`` unless every unit is on exactly one stage and every stage has one."""
    if len(layout) > len(units):
        raise SplitError(
            f"the layout has {len(layout)} stages, but the model only {len(units)} units: {shorten(units)}"
        )
    count = Counter(unit for stage in layout for unit in stage)
    if repeated := [unit for unit in units if count[unit] > 1]:
        stages = [number for number, stage in enumerate(layout) for unit in stage if unit == repeated[0]]
        where = f"stages {_listed(stages)}" if stages[0] < stages[-1] else f"stage {stages[0]}"
        more = f", and {len(repeated) - 1} more" if len(repeated) > 1 else ""
        raise SplitError(f"{repeated[0]!r} is named twice: on {where}{more}", unit=repeated[0])
    if missing := [unit for unit in units if not count[unit]]:
        raise SplitError(
            f"the layout leaves out {shorten(missing)}; every unit belongs to one stage",
            unit=missing[0] if len(missing) == 1 else None,
        )
    for number, stage in enumerate(layout):
        if not stage:
            raise SplitError(f"stage {number} is empty; every stage needs at least one unit")


def to_dict(layout: Layout) -> dict[int, list[str]]:
    """Return the layout as a plain dictionary: the names of each stage by its number.

    >>> to_dict((("embed", "layers.0"), ("layers.1", "head")))
    {0: ['embed', 'layers.0'], 1: ['layers.1', 'head']}
    """
    return {stage: list(names) for stage, names in enumerate(layout)}


def from_dict(data: Mapping[Any, Iterable[str]]) -> Layout:
    """Read a layout from a dictionary; stages may be numbers or digits, as in JSON.

    It is not compared with a model; ``by_names`` does that.

    >>> from_dict({"0": ["embed", "layers.0"], "1": ["layers.1", "head"]})
    (('embed', 'layers.0'), ('layers.1', 'head'))
    """
    by_stage: dict[int, Iterable[str]] = {}
    for key, names in data.items():
        if not str(key).isdecimal():
            raise SplitError(f"a stage must be a number from 0, got {key!r}")
        if int(key) in by_stage:
            raise SplitError(f"stage {int(key)} appears twice")
        by_stage[int(key)] = names
    if sorted(by_stage) != list(range(len(by_stage))):
        raise SplitError(f"stages must be numbered 0 to {len(by_stage) - 1}, got {_listed(sorted(by_stage))}")
    return tuple(tuple(_names(by_stage[stage], stage)) for stage in range(len(by_stage)))


def to_yaml(layout: Layout) -> str:
    """Write the layout as YAML, a list of names per stage; this needs PyYAML.

    >>> print(to_yaml((("embed", "layers.0"), ("head",))), end="")
    0:
    - embed
    - layers.0
    1:
    - head
    """
    return str(_yaml().safe_dump(to_dict(layout), sort_keys=False))


def from_yaml(text: str) -> Layout:
    """Read a layout from YAML: a list of names per stage, by the number of the stage or in order.

    >>> from_yaml("[[embed, layers.0], [head]]")
    (('embed', 'layers.0'), ('head',))
    """
    yaml = _yaml()
    try:
        # The base loader leaves every scalar a string: a unit called 0.10 must not become a number.
        data = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise SplitError(f"the layout is not valid YAML: {error}") from None
    return tuple(map(tuple, checked_names(data)))


def units_below(name: str, units: Iterable[str]) -> list[str]:
    """Return the unit with this name, or all units in the container with this name.

    >>> units_below("layers", ["embed", "layers.0", "layers.1", "layers_norm"])
    ['layers.0', 'layers.1']
    """
    return [unit for unit in units if unit == name or unit.startswith(f"{name}.")]


def near_matches(name: str, known: Sequence[str]) -> str:
    """Suggest known names, as the end of a message.

    >>> near_matches("layers.1", ["embed", "model.layers.0", "model.layers.1"])
    "; did you mean 'model.layers.1'?"
    """
    containers = {unit[:end] for unit in known for end in range(len(unit)) if unit[end] == "."}
    candidates = [*known, *sorted(containers)]
    near = [candidate for candidate in candidates if candidate.endswith(f".{name}")]
    near = near[:3] or get_close_matches(name, candidates, n=3)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; known are {shorten(known)}"


def shorten(names: Sequence[str]) -> str:
    """List names, at most some of them.

    >>> shorten([f"layers.{n}" for n in range(30)])
    'layers.0, layers.1, layers.2, layers.3, layers.4, layers.5, ..., layers.29 (30 in all)'
    """
    if len(names) <= LISTED:
        return ", ".join(names)
    return f"{', '.join(names[: LISTED // 2])}, ..., {names[-1]} ({len(names)} in all)"


def _resolve(name: str, stage: int, units: Sequence[str], glue: set[str]) -> list[str]:
    if found := units_below(name, units):
        return found
    if name in glue or any(module.startswith(f"{name}.") for module in glue):
        return []
    inside = [unit for unit in units if name.startswith(f"{unit}.")]
    if inside:
        raise SplitError(
            f"{name!r} on stage {stage} is inside {inside[0]!r}, which is not divided; name {inside[0]!r}", unit=name
        )
    raise SplitError(f"unknown module {name!r} on stage {stage}{near_matches(name, units)}", unit=name)


def _stages(given: object) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise SplitError(f"a layout is a list of names for each stage, got {given!r}; {_EXAMPLE}")
    return list(given)


def _names(names: object, stage: int) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise SplitError(f"stage {stage} must be a list of names, got {names!r}; {_EXAMPLE}")
    listed = list(names)
    for name in listed:
        if not isinstance(name, str):
            raise SplitError(f"stage {stage} names {name!r}, which is not a string; {_EXAMPLE}")
    return listed


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _yaml() -> Any:
    try:
        return import_module("yaml")
    except ImportError:
        raise SplitError("a layout in YAML needs PyYAML: pip install pyyaml") from None
