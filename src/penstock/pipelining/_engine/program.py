"""The engine: a rank's actions, compiled once into functions that call the stages; a step is a loop over them.

A function gets the state of the step, and looks methods up on the stage when it runs: so what a program overrides or
replaces on a stage counts. (Where nothing was replaced when the step began, messages may begin directly, and the
functions may be those of ``_schedule_plain``.) A program refers to stages only, never to the schedule, and so is no
part of a cycle.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed import Work

    from penstock.pipelining._schedule.actions import _Action

    Works: TypeAlias = "list[Work]"
    #: A stage and a microbatch.
    Key: TypeAlias = "tuple[int, int]"
    #: What is done of an action.
    Operation: TypeAlias = "Callable[[Step], None]"
    #: A function of the user in place of it.
    Custom: TypeAlias = "Callable[[_Action, Any], None]"


class Batch(NamedTuple):
    """What a step is given: all that ``_step_microbatches`` is told.

    Attributes:
        arg_mbs: the positional arguments of each microbatch.
        kwarg_mbs: the keyword arguments of each.
        target_mbs: the target of each.
        losses: where the user wants the losses.
        return_outputs: whether the outputs are kept.
        loss_kwargs: more arguments of the loss.
    """

    arg_mbs: list[Any] | None
    kwarg_mbs: list[Any] | None
    target_mbs: list[Any] | None
    losses: list[Any] | None
    return_outputs: bool
    loss_kwargs: dict[str, Any] | None


@dataclass(slots=True)
class Step:
    """What lives as long as a step.

    Attributes:
        schedule: the schedule that runs.
        arg_mbs: the positional arguments of each microbatch.
        kwarg_mbs: the keyword arguments of each.
        target_mbs: the target of each.
        return_outputs: whether the outputs are kept.
        loss_kwargs: more arguments of the loss.
        post: posts sends or receives.
        wait: waits for them.
        context: makes what a custom function gets.
        forward_receives: activations under way, by stage and microbatch.
        backward_receives: gradients under way.
        counter: how many microbatches of each stage are done.
        sends: what has been sent and not been waited for, by its place in the row.
    """

    schedule: Any
    arg_mbs: list[Any]
    kwarg_mbs: list[Any]
    target_mbs: list[Any] | None
    return_outputs: bool
    loss_kwargs: dict[str, Any] | None
    post: Callable[..., Works]
    wait: Callable[[Works], None]
    context: Callable[[], Any]
    forward_receives: dict[Key, Works] = field(default_factory=dict)
    backward_receives: dict[Key, Works] = field(default_factory=dict)
    counter: Counter[int] = field(default_factory=Counter)
    sends: dict[int, Works] = field(default_factory=dict)


class Line(NamedTuple):
    """A part of a program.

    Attributes:
        run: what is done; None if nothing is.
        label: what a profiler shows for it; None for nothing.
        step: the place of its action in the rank's row.
    """

    run: Operation | None
    label: str | None
    step: int


class Program:
    """What one rank does in a step.

    Attributes:
        scaled: the stages whose gradients it divides by the number of microbatches, if the schedule says so.
    """

    def __init__(self, lines: Sequence[Line], scaled: Sequence[Any]) -> None:
        self.scaled = scaled
        self._lines = lines
        self._steps = [line.step for line in lines if line.run is not None]
        self._operations = [line.run for line in lines if line.run is not None]

    def run(
        self, step: Step, named: Callable[[str], AbstractContextManager[object]], failed: Callable[[int], None]
    ) -> None:
        """Run all of it.

        Args:
            step: the state.
            named: makes the range that a profiler shows.
            failed: is told the place of the action that raises.
        """
        if torch._C._autograd._profiler_enabled():
            self._run_named(step, named, failed)
            return
        place = 0
        try:
            for place, operation in enumerate(self._operations):  # noqa: B007
                operation(step)
        except Exception:
            failed(self._steps[place])
            raise

    def _run_named(
        self, step: Step, named: Callable[[str], AbstractContextManager[object]], failed: Callable[[int], None]
    ) -> None:
        for label, lines in groupby(self._lines, attrgetter("label")):
            with nullcontext() if label is None else named(label):
                for line in lines:
                    try:
                        if line.run is not None:
                            line.run(step)
                    except Exception:
                        failed(line.step)
                        raise
