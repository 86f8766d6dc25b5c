"""Defines the description of a split: plain data with JSON both ways, and a digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, NamedTuple, Self

from penstock.errors import SplitError
from penstock.execution.ties import Tie
from penstock.ir.edges import Edge
from penstock.models.edges import Flow
from penstock.models.record import Record, Source

_VERSION: Final = 1


class Description(NamedTuple):
    """Everything about a split but the model.

    Attributes:
        layout: the units of each stage, in call order.
        flow: what stages exchange.
        ties: the parameters that several stages hold.
        held: the parameters and buffers of each stage, by name.
        record: what the probe has found; None for an ``nn.Sequential``, which needs none.
        opened: the modules whose children were made units.
        shared: groups of names that refer to one parameter.
        uncalled: units that the probe has not seen called.
        unread: parameters of containers that nothing has read.
        loss: what the loss of the model is a mean over; None if it computes none.
    """

    layout: tuple[tuple[str, ...], ...]
    flow: Flow
    ties: tuple[Tie, ...]
    held: tuple[tuple[str, ...], ...]
    record: Record | None
    opened: tuple[str, ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()
    uncalled: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    loss: str | None = None

    @property
    def digest(self) -> str:
        """A checksum of the whole description."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "format": "penstock split",
            "version": _VERSION,
            "layout": [list(stage) for stage in self.layout],
            "edges": [[edge.source, list(edge.targets), edge.value, edge.gradient] for edge in self.flow.edges],
            "values": [list(value) for value in self.flow.values],
            "stages": list(self.flow.stages),
            "parameters": {name: list(stages) for name, stages in self.flow.parameters.items()},
            "ties": [[list(member) for member in tie.members] for tie in self.ties],
            "held": [list(names) for names in self.held],
            "probe": None if self.record is None else self.record.to_json(),
            "opened": list(self.opened),
            "shared": [list(names) for names in self.shared],
            "uncalled": list(self.uncalled),
            "unread": list(self.unread),
            "loss": self.loss,
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read what ``to_json`` returns."""
        if not isinstance(data, dict) or data.get("format") != "penstock split":
            raise SplitError("this is not the description of a split; pass what split.to_json() returns")
        if data.get("version") != _VERSION:
            raise SplitError(
                f"the description has version {data.get('version')!r}; this penstock reads version {_VERSION}"
            )
        try:
            return cls(
                _tuples(data["layout"]),
                _read_flow(data),
                tuple(Tie(tuple((stage, name) for stage, name in members)) for members in data["ties"]),
                _tuples(data["held"]),
                None if data["probe"] is None else Record.from_json(data["probe"]),
                tuple(data["opened"]),
                _tuples(data["shared"]),
                tuple(data["uncalled"]),
                tuple(data["unread"]),
                data["loss"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SplitError(f"the description of the split is damaged: {error!r}") from None


def _tuples(data: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(str, one)) for one in data)


def _read_flow(data: dict[str, Any]) -> Flow:
    return Flow(
        tuple(Edge(source, tuple(targets), value, gradient) for source, targets, value, gradient in data["edges"]),
        tuple(Source(*value) for value in data["values"]),
        tuple(data["stages"]),
        {name: tuple(stages) for name, stages in data["parameters"].items()},
    )
