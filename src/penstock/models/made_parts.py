"""Keeps the parts of a model that were made real, so that stages never mix values of different ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import SplitError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


class Part(NamedTuple):
    """A part of a model with real parameters.

    Attributes:
        model: the model, of which other parameters take no memory.
        origin: what its values come from; empty if that is not known.
        is_chosen: whether the user has said what its values are; else they are what the function would have built.
    """

    model: nn.Module
    origin: str
    is_chosen: bool


class MadeParts:
    """The parts of a model that were made real, each for some stages."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, ...], Part] = {}

    def put(self, stages: tuple[int, ...], part: Part) -> None:
        """Add a part. What the user chooses replaces what was there for these stages, and all that was not chosen."""
        for others, other in list(self._parts.items()):
            if part.is_chosen and (not other.is_chosen or not {*stages}.isdisjoint(others)):
                self._parts.pop(others, None)
        self._parts[stages] = part

    def get(self, stages: Iterable[int]) -> Part | None:
        """Return a part that has all of some stages."""
        wanted = {*stages}
        return next((part for others, part in list(self._parts.items()) if wanted <= {*others}), None)

    def find(self, stages: Iterable[int]) -> Part | None:
        """Return the part for some stages, or None if no part was chosen, so that any may be made.

        Raises ``SplitError`` if parts for other stages were chosen: these would have other values.
        """
        stages = [*stages]
        chosen = sorted(others for others, part in list(self._parts.items()) if part.is_chosen and others)
        found = self.get(stages)
        if found is not None or not chosen:
            return found
        raise SplitError(
            f"no call of materialize made stages {_listed(stages)} together; there were calls for "
            f"{' and for '.join(map(_listed, chosen))}. Pass split.materialize(rank, placement) the rank and the "
            "placement that split.stages(rank, placement) or the pipeline has"
        )


def _listed(stages: Iterable[int]) -> str:
    return ", ".join(map(str, stages))
