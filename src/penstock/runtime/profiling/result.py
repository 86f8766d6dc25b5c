"""What a profile has found."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from penstock.simulation.costs import LARGEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from penstock.simulation.costs import Costs


class Quartiles(NamedTuple):
    """The median of some figures, and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, figures: Iterable[float]) -> Self:
        """Compute them; one figure is enough.

        >>> Quartiles.of([4, 1, 2, 3, 5])
        Quartiles(low=2.0, median=3, high=4.0)
        """
        ordered = sorted(figures)
        if len(ordered) == 1:
            return cls(ordered[0], ordered[0], ordered[0])
        low, _, high = quantiles(ordered, n=4, method="inclusive")
        return cls(low, median(ordered), high)


@dataclass(frozen=True, slots=True)
class Profile:
    """What stages, or layers, cost, in seconds and bytes.

    Attributes:
        costs: the medians, as ``simulate`` and ``write`` take them, for one microbatch.
        names: the modules of each stage.
        times: the spread of each time, by its field in ``costs``, stage by stage.
        parameters: the bytes of the parameters of each stage.
        latency: the spread of the time of a message of a few bytes; None if it was not measured.
        post: how long the core of the sender is busy with it, likewise; not part of the costs.
        ranks: how many ranks have measured.
    """

    costs: Costs
    names: tuple[tuple[str, ...], ...]
    times: Mapping[str, Sequence[Quartiles]]
    parameters: tuple[int, ...]
    latency: Quartiles | None
    post: Quartiles | None
    ranks: int

    def write(self, path: str | Path) -> None:
        """Write the costs to a ``.toml`` or ``.json`` file."""
        self.costs.write(path)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "costs": self.costs.to_dict(),
            "names": [list(names) for names in self.names],
            "times": {field: [spread._asdict() for spread in each] for field, each in self.times.items()},
            "parameters": list(self.parameters),
            "latency": None if self.latency is None else self.latency._asdict(),
            "post": None if self.post is None else self.post._asdict(),
            "ranks": self.ranks,
        }

    def describe(self) -> str:
        """Return a table of the stages, and what is not modelled."""
        heads = ("stage", "forward", "backward", "input half", "weight half", "activation", "parameters", "modules")
        activation = self.costs.per_stage("activation", len(self.names))
        rows: list[tuple[str, ...]] = [heads]
        for stage, names in enumerate(self.names):
            times = [_spread(self.times[field][stage]) for field in TIMES]
            named = ", ".join(names[:2]) + (f", ... {names[-1]}" if len(names) > 2 else "")
            rows.append((str(stage), *times, _size(activation[stage]), _size(self.parameters[stage]), named))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, "", *self._notes()])

    def _notes(self) -> list[str]:
        notes = ["milliseconds for one microbatch: median (quartiles); activation: held until the backward"]
        if self.latency is None or self.post is None:
            notes.append("transfers were not measured, and take no time in these costs: that takes two ranks or more")
        else:
            bandwidth = self.costs.bandwidth
            rate = min(bandwidth) if isinstance(bandwidth, tuple) else bandwidth
            bytes_ = "" if rate is None else f", then {rate / 1e9:.3g} GB/s"
            if rate == LARGEST:
                bytes_ = ", and its bytes take no measurable time"
            notes.append(
                f"a message: {_spread(self.latency)} ms{bytes_}; its sender is busy {_spread(self.post)} ms more"
            )
        notes.append(
            "not modelled: cores, memory bandwidth or links that ranks share; what a step does around its actions"
        )
        return notes


#: The fields of ``Costs`` that a profile measures, in the order of the table.
TIMES = ("forward", "backward", "backward_input", "backward_weight")


def _spread(found: Quartiles) -> str:
    return f"{found.median * 1e3:.3f} ({found.low * 1e3:.3f}-{found.high * 1e3:.3f})"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
