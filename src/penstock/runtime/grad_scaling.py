"""Scales gradients against underflow, with torch's ``GradScaler``: ranks share the scale and every overflow."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.errors import StageError
from penstock.execution.stage import device_of
from penstock.runtime.grad_clipping import local_gradients, parameters_of, shared_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.execution.stage import Stage
    from penstock.runtime.transport.protocol import Transport

_REPORT: Final = struct.Struct("<d?")


class Scaling:
    """Applies the scaler of this rank; every rank has one.

    The scale goes into the gradient of the losses, so losses stay as they are, and gradients are scaled when the step
    ends. Then ``scaler.unscale_``, ``scaler.step`` and ``scaler.update`` are used on every rank as if there were no
    other: they decide the same everywhere, because an overflow on any rank counts on all. A rank without
    stages has nothing to scale, and its scaler is not used.
    """

    def __init__(self, scaler: torch.amp.GradScaler, stages: Mapping[int, Stage], transport: Transport) -> None:
        if not isinstance(scaler, torch.amp.GradScaler):
            raise StageError(f"scaler must be a torch.amp.GradScaler, not {scaler!r}")
        self._scaler = scaler
        self._stages = stages
        self._transport = transport
        self._scale = 1.0

    @property
    def scale(self) -> float:
        """The factor of the gradient of a loss in this step."""
        return self._scale

    def begin_step(self) -> float:
        """Begin a step; return the factor of the gradient of a loss."""
        if self._stages:
            one: Any = self._scaler.scale(torch.ones((), device=device_of(self._stages)))
            self._scale = float(one)
        return self._scale

    def sync_overflow(self) -> None:
        """End a step: if another rank has a non-finite gradient, make one non-finite here as well."""
        if not self._scaler.is_enabled():
            return
        parameters = parameters_of(self._stages)
        overflow = not math.isfinite(shared_norm(parameters, math.inf))
        mine = _REPORT.pack(self._scale if self._stages else math.nan, overflow)
        reports = [_REPORT.unpack(data) for data in self._transport.exchange(mine)]
        for rank, (scale, _) in enumerate(reports):
            if self._stages and scale != self._scale and not math.isnan(scale):
                raise StageError(
                    f"rank {rank} scaled its gradients by {scale:g}, rank {self._transport.rank} by "
                    f"{self._scale:g}; start with equal scalers, and call step and update on every rank"
                )
        if any(there for _, there in reports):
            self._overflow(local_gradients(parameters))

    def _overflow(self, gradients: list[torch.Tensor]) -> None:
        """Make the scaler of this rank see an overflow."""
        found = [gradient for gradient in gradients if gradient.numel()]
        if found and all(bool(gradient.isfinite().all()) for gradient in found):
            with torch.no_grad():
                found[0][(0,) * found[0].ndim] = math.nan  # not every layout can be viewed as one dimension
