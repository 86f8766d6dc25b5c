"""Defines what every action costs: time, bytes on the wire, memory."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from penstock.errors import CostsError, FormatError, ReadError, WriteError
from penstock.ir.formats.files import read_text, refuse_duplicate_keys, write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.ir.placement import Placement

#: One number for all, or one for each stage, or for each edge.
Amount: TypeAlias = float | tuple[float, ...]

#: Beyond this, sums and quotients could overflow.
LARGEST: Final = 1e100

#: The fields with a number per stage that add up, as in a rank; ``input_release`` is a share.
OF_A_STAGE: Final = (
    "forward", "backward_input", "backward_weight", "backward", "unshard", "reduce", "optimizer", "activation",
    "static", "recompute", "recompute_activation",
)  # fmt: skip
#: The fields with a number per edge.
OF_AN_EDGE: Final = ("latency", "bandwidth", "activation_bytes", "gradient_bytes", "edge_memory")
_DEFAULTS: Final = {
    "backward": ("backward_input", "backward_weight"),
    "recompute": ("forward",),
    "recompute_activation": ("activation",),
}
_ONE_FOR_ALL: Final = ("dispatch", "overlap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What every action costs, in any unit of time and of memory, as long as it is the same everywhere.

    A field is a number, or a sequence with one per stage; for transfers, one per edge, in both directions. In a chain
    the first is the edge between stages 0 and 1; otherwise they are in the order of ``schedule.edges``. Edges between
    the same two stages share a message: their bytes add up, and the largest latency counts.

    >>> costs = Costs(forward=[1, 1, 1, 2], backward_input=1, backward_weight=1, latency=0.1)
    >>> costs.per_stage("backward", stages=4)
    array([2., 2., 2., 2.])

    Attributes:
        forward: time of F.
        backward_input: time of I, the gradient of the inputs.
        backward_weight: time of W, the gradient of the weights.
        backward: time of B; by default the sum of the two.
        latency: time that a transfer takes in addition to its bytes.
        bandwidth: bytes per unit of time; by default bytes take no time.
        activation_bytes: bytes that an edge carries forward, for one microbatch.
        gradient_bytes: bytes that it carries back; by default the same number.
        dispatch: time that a rank takes to start an action of any type.
        overlap: time of an OVERLAP_F_B, as a share of what its parts take one after the other.
        unshard: time of UNSHARD.
        reduce: time of REDUCE_GRAD.
        optimizer: time of the optimizer for a stage, after the last action of its rank.
        activation: memory that a microbatch takes in a stage, from the start of F until the end of B, or of I and W.
        input_release: the share of it that I releases; W releases the rest.
        static: memory that a stage always takes: weights, gradients, optimizer state.
        edge_memory: memory that a value of an edge takes, for one microbatch, on the rank of its target while it waits
            there: from its receive, or from the end of its F on the same rank, until the start of the target's F.
        recompute: extra time of I or B in a stage that runs its forward again there instead of keeping what it
            computed; by default the time of F. It counts in ``with_recomputation`` only.
        recompute_activation: memory that a microbatch then takes instead of ``activation``, which is mostly that of the
            stage's inputs. By default no stage may recompute. What comes back for the length of a B is not counted.
    """

    forward: Amount = 1.0
    backward_input: Amount = 1.0
    backward_weight: Amount = 1.0
    backward: Amount | None = None
    latency: Amount = 0.0
    bandwidth: Amount | None = None
    activation_bytes: Amount = 0.0
    gradient_bytes: Amount | None = None
    dispatch: float = 0.0
    overlap: float = 1.0
    unshard: Amount = 0.0
    reduce: Amount = 0.0
    optimizer: Amount = 0.0
    activation: Amount = 1.0
    input_release: Amount = 0.0
    static: Amount = 0.0
    edge_memory: Amount = 0.0
    recompute: Amount | None = None
    recompute_activation: Amount | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, _checked(field.name, value))
        sent = np.any(self.activation_bytes) or np.any(self.gradient_bytes or 0.0)
        if sent != (self.bandwidth is not None):
            missing = "bandwidth" if sent else "activation_bytes"
            given = "activation_bytes and gradient_bytes have" if sent else "bandwidth has"
            raise CostsError(f"{given} no effect without {missing}; pass it too", field=missing)

    def per_stage(self, field: str, stages: int) -> NDArray[np.float64]:
        """Return a field as an array with an entry per stage; its default is filled in if other fields decide it."""
        if field not in (*OF_A_STAGE, "input_release"):
            raise CostsError(f"{field!r} is not a per-stage field", field=field)
        value = getattr(self, field)
        if value is None:
            return np.asarray(sum(self.per_stage(each, stages) for each in _DEFAULTS[field]), np.float64)
        return _spread(field, value, stages, "stage")

    def per_edge(self, field: str, edges: int) -> NDArray[np.float64]:
        """Return a field as an array with an entry per edge; ``gradient_bytes`` with its default filled in."""
        if field not in OF_AN_EDGE:
            raise CostsError(f"{field!r} is not a per-edge field", field=field)
        field = "activation_bytes" if field == "gradient_bytes" and self.gradient_bytes is None else field
        return _spread(field, getattr(self, field), edges, "edge")

    def transfer(self, stages: int, *, backward: bool) -> NDArray[np.float64]:
        """Return how long a transfer takes in a chain, over the edge after each stage but the last."""
        edges = max(stages - 1, 0)
        time = self.per_edge("latency", edges)
        size = self.per_edge("gradient_bytes" if backward else "activation_bytes", edges)
        return time if self.bandwidth is None else np.asarray(time + size / self.per_edge("bandwidth", edges))

    def check(self, stages: int, edges: int | None = None) -> None:
        """Raise ``CostsError`` if the costs are for another number of stages or edges; by default those of a chain."""
        for field in (*OF_A_STAGE, "input_release"):
            self.per_stage(field, stages)
        for field in OF_AN_EDGE:
            if getattr(self, field) is not None:
                self.per_edge(field, max(stages - 1, 0) if edges is None else edges)

    def of_ranks(self, placement: Placement) -> Costs:
        """Return costs per stage, given costs of whole ranks, whose stages share them equally.

        A number is for every rank, a sequence has one for each. The costs of transfers, and shares, stay the same.

        >>> from penstock.ir.placement import Placement
        >>> Costs(forward=[2, 6], activation=4, latency=1).of_ranks(Placement.v(2, 4)).forward
        (1.0, 3.0, 3.0, 1.0)
        """
        counts = np.bincount(placement.rank_of, minlength=placement.ranks)
        given = {field: getattr(self, field) for field in OF_A_STAGE if getattr(self, field) is not None}
        divided = {
            field: _spread(field, value, placement.ranks, "rank") / np.maximum(counts, 1)
            for field, value in given.items()
        }
        of_stages = {field: value[list(placement.rank_of)] for field, value in divided.items()}
        return Costs.from_dict({**self.to_dict(), **of_stages})

    def with_recomputation(self, stages: Sequence[bool]) -> Costs:
        """Return the costs if these stages recompute their forward in I or B; the fields for this are then gone.

        >>> costs = Costs(forward=1, backward_input=2, activation=8, recompute_activation=1)
        >>> costs = costs.with_recomputation([True, False])
        >>> costs.backward_input, costs.activation
        ((3.0, 2.0), (1.0, 8.0))
        """
        chosen, count = np.asarray(stages, bool), len(stages)
        if chosen.any() and self.recompute_activation is None:
            raise CostsError(
                "recomputation needs recompute_activation: how much memory remains taken", field="recompute"
            )
        extra = np.where(chosen, self.per_stage("recompute", count), 0.0)
        fields_ = [field for field in ("backward_input", "backward") if getattr(self, field) is not None]
        changed = {field: self.per_stage(field, count) + extra for field in fields_}
        kept, whole = self.per_stage("recompute_activation", count), self.per_stage("activation", count)
        changed["activation"] = np.where(chosen, kept, whole)
        left = {name: value for name, value in self.to_dict().items() if not name.startswith("recompute")}
        return Costs.from_dict({**left, **changed})

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Costs:
        """Build costs from a mapping of fields, as in JSON and TOML files."""
        known = [field.name for field in fields(cls)]
        for name in table:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(known)}"
                raise CostsError(f"unknown field {name!r} of costs; {hint}", field=str(name), value=table[name])
        return cls(**table)

    def to_dict(self) -> dict[str, float | list[float]]:
        """Return the fields that are set, as in JSON and TOML files."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}

    @classmethod
    def read(cls, path: str | Path) -> Costs:
        """Read a ``.toml`` or ``.json`` file with a field per line or key."""
        path = Path(path)
        load = _by_suffix(path, {".toml": tomllib.loads, ".json": _from_json}, ReadError)
        try:
            table = load(read_text(path))
            if not isinstance(table, dict):
                raise FormatError('costs must be a table of fields, e.g. {"forward": 1}')
            return cls.from_dict(table)
        except ReadError as error:
            raise error.at(path=str(path)) from None
        except CostsError as error:
            raise CostsError(f"{path}: {error}", field=error.field, value=error.value) from None
        except OSError as error:
            raise FormatError(f"cannot be read: {error.strerror}", path=str(path)) from None
        except (ValueError, RecursionError) as error:
            raise FormatError(f"is damaged: {error}", path=str(path)) from None

    def write(self, path: str | Path) -> None:
        """Write a ``.toml`` or ``.json`` file that ``read`` reads, completely or not at all."""
        render = _by_suffix(Path(path), {".toml": _as_toml, ".json": _as_json}, WriteError)
        write_atomically(path, render(self.to_dict()))


def _by_suffix(
    path: Path, choices: dict[str, Callable[[Any], Any]], error: type[ReadError] | type[WriteError]
) -> Callable[[Any], Any]:
    if path.suffix.lower() not in choices:
        raise error(f"{path}: costs must be in a *.toml or *.json file")
    return choices[path.suffix.lower()]


def _from_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=refuse_duplicate_keys)


def _as_toml(table: dict[str, float | list[float]]) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in table.items())


def _as_json(table: dict[str, float | list[float]]) -> str:
    return json.dumps(table, indent=2) + "\n"


def _checked(field: str, value: object) -> Amount:
    """Return the value as a number or a tuple of numbers, or raise an error that names the field."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping, Set)):
        if field in _ONE_FOR_ALL:
            raise CostsError(f"{field} must be a single number, got {value!r}", field=field, value=value)
        return tuple(checked_number(f"{field}[{place}]", field, one) for place, one in enumerate(value))
    return checked_number(field, field, value)


def checked_number(place: str, field: str, value: object) -> float:
    """Return the value as a non-negative number, or raise an error that names its place and the field."""
    if isinstance(value, (str, bytes, bytearray, bool, np.bool_, complex, np.complexfloating)):
        raise CostsError(f"{place} must be a number, got {value!r}", field=field, value=value)
    try:
        number = float(value)  # type: ignore[arg-type]  # anything else raises
    except (TypeError, ValueError, OverflowError):
        raise CostsError(f"{place} must be a number, got {value!r}", field=field, value=value) from None
    if not math.isfinite(number):
        raise CostsError(f"{place} must be finite, got {value!r}", field=field, value=value)
    if number < 0 or (number == 0 and field in ("bandwidth", "overlap")):
        least = "more than 0" if field in ("bandwidth", "overlap") else "at least 0"
        raise CostsError(f"{place} must be {least}, got {value!r}", field=field, value=value)
    if number > LARGEST or 0 < number < 1 / LARGEST:
        raise CostsError(f"{place} must be between 1e-100 and 1e100, or 0, got {value!r}", field=field, value=value)
    if number > 1 and field == "input_release":
        raise CostsError(f"{place} must be a share between 0 and 1, got {value!r}", field=field, value=value)
    return number


def _spread(field: str, value: Amount, count: int, what: str) -> NDArray[np.float64]:
    if isinstance(value, tuple) and len(value) != count:
        raise CostsError(
            f"{field} has {_count(len(value), 'number')}, but there {'is' if count == 1 else 'are'} "
            f"{_count(count, what)}; pass one for each, or a single number for all",
            field=field,
            value=value,
        )
    return np.full(count, value, np.float64) if isinstance(value, float) else np.array(value, np.float64)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
