"""Replays random numbers: a forward draws the same ones whenever it runs."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from penstock.execution.preserved_state import RNG_LOCK, Buffers
from penstock.lowering.forwards import forwards_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.execution.stage import Stage
    from penstock.runtime.engine import Engine
    from penstock.runtime.parity.reference_run import StageVisit


class Replay:
    """Starts every forward with the same random state whenever it runs, given its stage and microbatch."""

    def __init__(self, stages: Mapping[int, Stage], orders: Mapping[int, Sequence[int]]) -> None:
        self._stages = stages
        self._left = {index: iter(order) for index, order in orders.items()}
        self._handles: list[Any] = []
        self._buffers: dict[int, Buffers] = {}
        self._again: int | None = None

    def __enter__(self) -> Self:
        for index, stage in self._stages.items():
            self._handles += [
                stage.module.register_forward_pre_hook(partial(self._before, index)),
                stage.module.register_forward_hook(_after, always_call=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def once_more(self, visit: StageVisit) -> Iterator[None]:
        """Wraps the repeated run of a stage's last microbatch, with the buffers that it had."""
        stage = visit.stage
        current = Buffers([stage.module])
        self._buffers[stage.index].restore()
        self._again = visit.microbatch
        try:
            yield
        finally:
            self._again = None
            current.restore()

    def _before(self, index: int, *_: object) -> None:
        microbatch = next(self._left[index]) if self._again is None else self._again
        RNG_LOCK.acquire()
        if self._again is None:
            self._buffers[index] = Buffers([self._stages[index].module])
        torch.manual_seed((index << 20) + microbatch)


def _after(*_: object) -> None:
    RNG_LOCK.release()


def order_of(engine: Engine) -> dict[int, list[int]]:
    """Find, for every stage of this rank, the order in which the schedule runs microbatches forward."""
    row = [action for action in forwards_of(engine.schedule).actions[engine.rank] if action is not None]
    return {
        index: [action.microbatch_index or 0 for action in row if action.stage_index == index]
        for index in engine.stages
    }
