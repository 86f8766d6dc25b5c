"""Runs the model as if it were not split: stage by stage, microbatch by microbatch, without a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.execution.preserved_state import copy_as_leaves
from penstock.runtime.parity.comparison import ParameterPath, difference
from penstock.runtime.parity.preserve import pop_gradients
from penstock.runtime.parity.reference_run import ReferenceRun
from penstock.runtime.parity.replay import Replay
from penstock.runtime.parity.report import HALVES, Difference
from penstock.runtime.wiring import Wiring

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from penstock.runtime.batches import Batch
    from penstock.runtime.engine import Engine
    from penstock.runtime.parity.comparison import Gradients
    from penstock.runtime.parity.reference_run import StageVisit


class Unsplit:
    """Runs the unsplit model, once or repeatedly, and each stage's split backward with it."""

    def __init__(
        self,
        engine: Engine,
        batch: Batch,
        parameters: Mapping[torch.nn.Parameter, ParameterPath],
        mine: Mapping[torch.nn.Parameter, ParameterPath],
    ) -> None:
        """`mine` are the parameters whose gradients this rank takes."""
        self._engine = engine
        self._batch = batch
        self._parameters = parameters
        self._mine = mine
        self._halves: Gradients = dict.fromkeys(parameters)
        self.inputs: list[Difference] = []
        self.outputs: Sequence[Any] = ()
        self.shares: Sequence[float] = ()

    @property
    def targets(self) -> Sequence[Any]:
        """Get the target of each microbatch."""
        return self._batch.targets

    def run(self, *, split: bool) -> tuple[Gradients, Gradients, list[torch.Tensor]]:
        """Compute the gradients, those of split backwards, and the losses."""
        engine = self._engine
        plain = ReferenceRun(engine.stages, Wiring(engine.schedule), engine.transport, engine.loss_fn)
        microbatches = range(engine.schedule.microbatches)
        orders = {index: list(microbatches) for index in engine.stages}
        args, kwargs, targets = self._batch[:3]
        with engine.step_scope(training=True), Replay(engine.stages, orders) as self._replay:
            scale, self.shares = engine.begin_scale(), engine.find_shares(self._batch)
            shares = [scale * share for share in self.shares]
            plain.run(copy_as_leaves(args), copy_as_leaves(kwargs), targets, shares, self._in_halves if split else None)
        self.outputs = plain.outputs
        # A lower rank that shares a parameter finishes with it later.
        return pop_gradients(self._mine), self._halves, plain.losses

    def _in_halves(
        self, visit: StageVisit, gradients: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]
    ) -> None:
        """Run a microbatch of a stage once more, with I and W, into separate gradients."""
        if visit.stage.parallel is not None or not visit.flight.roots:
            return
        before = {one: one.grad for one in self._parameters}
        for one in self._parameters:
            one.grad = self._halves[one]
        visit.stage.begin()  # with other gradients
        with self._replay.once_more(visit):
            found, weight_backward = visit.stage.input_backward(visit.run(), gradients)
            weight_backward()
        for one in self._parameters:
            self._halves[one], one.grad = one.grad, before[one]
        for number, (given, wanted) in enumerate(zip(found, expected, strict=True)):
            owned = ParameterPath(visit.stage.index, f"input {number}", type(visit.stage.module).__name__, -1)
            self.inputs.append(difference(owned, HALVES, given, wanted, 0.0))
