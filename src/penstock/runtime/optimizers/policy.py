"""Decides what an optimizer does with the gradients of a step: apply them, scale them down, or skip the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import StageError
from penstock.runtime.grad_clipping import check_norm_type, clipping_factor, total_norm

if TYPE_CHECKING:
    from collections.abc import Iterable


class Verdict(NamedTuple):
    """What to do with the gradients of a step.

    Attributes:
        norm: the norm of all gradients of the pipeline.
        factor: what to multiply them by before the step; None to leave them as they are.
        skips: whether to leave out the step.
    """

    norm: float
    factor: float | None = None
    skips: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the gradients are applied as they are."""
        return self.factor is None and not self.skips


class Policy(NamedTuple):
    """When to scale gradients, and when to skip a step.

    Attributes:
        max_norm: the largest norm with which gradients are applied as they are; None for any.
        norm_type: the order of the norm.
        skip_nonfinite: whether to skip a step if the norm is not a finite number.
    """

    max_norm: float | None = None
    norm_type: float = 2.0
    skip_nonfinite: bool = False

    @classmethod
    def read(cls, max_norm: float | None, norm_type: float, skip_nonfinite: bool) -> Policy:
        """Check what a user asks for."""
        if max_norm is not None and not float(max_norm) > 0:
            raise StageError(f"max_norm must be a positive number, or None not to clip gradients, not {max_norm!r}")
        check_norm_type(float(norm_type))
        return cls(None if max_norm is None else float(max_norm), float(norm_type), bool(skip_nonfinite))

    @property
    def needs_norm(self) -> bool:
        """Whether the norm matters: then no rank can step without the others."""
        return self.max_norm is not None or self.skip_nonfinite

    def judge(self, reports: Iterable[bytes]) -> Verdict:
        """Decide, given what ranks report of the norms of their gradients.

        >>> from penstock.runtime.grad_clipping import _NORM
        >>> Policy(max_norm=1.0).judge([_NORM.pack(3.0, False), _NORM.pack(4.0, False)])
        Verdict(norm=5.0, factor=0.199999960000008, skips=False)
        >>> Policy(skip_nonfinite=True).judge([_NORM.pack(math.nan, False)]).skips
        True
        """
        norm, _ = total_norm(reports, self.norm_type)
        if self.skip_nonfinite and not math.isfinite(norm):
            return Verdict(norm, skips=True)
        return Verdict(norm, None if self.max_norm is None else clipping_factor(norm, self.max_norm))
