"""The state of one step of the drop-in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Work

    from penstock.pipelining._schedule.actions import _Action

    Works: TypeAlias = "list[Work]"
    #: A stage and a microbatch.
    Key: TypeAlias = "tuple[int, int]"
    #: Runs an action.
    Operation: TypeAlias = "Callable[[MethodStep], None]"
    #: A function of the user in place of it.
    Custom: TypeAlias = "Callable[[_Action, Any], None]"


class Batch(NamedTuple):
    """The arguments of a step, as ``_step_microbatches`` gets them.

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
class MethodStep:
    """The state of one step.

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
        forward_receives: activations in flight, by stage and microbatch.
        backward_receives: gradients in flight.
        counter: how many microbatches of each stage are done.
        sends: sends in flight, by the key of their message.
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

    @property
    def receives(self) -> list[Any]:
        """The receives that are in flight."""
        posted: list[Works] = [*self.forward_receives.values(), *self.backward_receives.values()]
        return [work for works in posted for work in works]
