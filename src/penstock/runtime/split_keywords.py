"""Holds all ranks of a split model to the same keyword arguments.

Every stage runs the model's own forward, so an argument that only some ranks pass, such as an attention mask, would be
missing in the layers of the others, without an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import StageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from penstock.runtime.transport.protocol import Transport


class SplitKeywords:
    """Compares the names of keyword arguments: among ranks in the first step, later with those of the first.

    Args:
        target: the keyword argument that is the target, which the rank of the last stage needs; None if there is none.
        is_required: whether the model computes its loss from it.
    """

    def __init__(self, target: str | None, *, is_required: bool) -> None:
        self._target = target
        self._is_required = is_required
        self._agreed: list[str] | None = None

    def check(self, kwargs: Mapping[str, Any], transport: Transport, *, has_last: bool) -> None:
        """Refuse a training step whose keyword arguments are not the same as elsewhere, or before."""
        if self._is_required and has_last and kwargs.get(self._target or "") is None:
            raise StageError(
                f"the model computes its loss from {self._target}=, but the rank of the last stage was not given it; "
                f"pass the same keyword arguments, {self._target}= included, to step() on every rank"
            )
        names = sorted(name for name, value in kwargs.items() if value is not None and name != self._target)
        if self._agreed is None:
            self._compare_ranks(names, transport)
            self._agreed = names
        elif names != self._agreed:
            raise StageError(
                f"step() got the keyword arguments {_listed(names)}, but {_listed(self._agreed)} in the first step; "
                "every step of a split model takes the same ones, on every rank"
            )

    def _compare_ranks(self, names: list[str], transport: Transport) -> None:
        mine = "\n".join(names)
        for rank, data in enumerate(transport.exchange(mine.encode())):
            theirs = data.decode(errors="replace")
            if theirs != mine:
                raise StageError(
                    f"rank {rank} passed the keyword arguments {_listed(theirs.split())} to step(), but rank "
                    f"{transport.rank} {_listed(names)}; every rank of a split model takes the same ones"
                )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "(none)"
