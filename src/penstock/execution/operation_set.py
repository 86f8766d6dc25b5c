"""Operation sets: each is one way to run actions. The compiler asks a set for the operation of every cell of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from penstock.ir.actions import OVERLAP_F_B, Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.execution.program import Operation
    from penstock.ir.actions import ComputationType

S = TypeVar("S")
_State = TypeVar("_State", contravariant=True)


class OperationSet(Protocol[_State]):
    """One way to run actions. A cell is an action, or something else that the set knows."""

    def operation(self, cell: Any) -> Operation[_State] | None:
        """Build the operation of a cell; None if there is nothing to do."""

    def release_sends(self, keys: Sequence[int]) -> Operation[_State]:
        """Build the wait for the sends of these messages, which releases their tensors."""

    def label(self, cell: Any) -> str | None:
        """Label a cell for profilers and failure reports."""


class CustomOperations(Generic[S]):
    """Wraps another set: the user's functions run in place of the operations of some types of action.

    Args:
        inner: the set for all other actions.
        functions: by the type of action, what is called instead, with the action and a context.
        context: makes the context, given the state of the step.
        in_overlaps: whether they also run in place of the parts of an overlap.
    """

    def __init__(
        self,
        inner: OperationSet[S],
        functions: Mapping[ComputationType, Callable[[Any, Any], Any]],
        context: Callable[[S], Any],
        *,
        in_overlaps: bool,
    ) -> None:
        self.inner = inner
        self._functions = functions
        self._context = context
        self._in_overlaps = in_overlaps

    def operation(self, cell: Any) -> Operation[S] | None:
        """Build a call of the user's function for a cell, or the operation of the other set."""
        kind = cell.computation_type if isinstance(cell, Action) else None
        function = None if kind is None else self._functions.get(kind)
        if function is not None:
            context = self._context
            return lambda step: function(cell, context(step))
        if kind is OVERLAP_F_B and self._in_overlaps:
            return run_in_sequence(self.operation(part) for part in cell.parts)
        return self.inner.operation(cell)

    def release_sends(self, keys: Sequence[int]) -> Operation[S]:
        """Wait for sends, as the other set does."""
        return self.inner.release_sends(keys)

    def label(self, cell: Any) -> str | None:
        """Get the label of a cell in the other set."""
        return self.inner.label(cell)


def run_in_sequence(operations: Iterable[Operation[S] | None]) -> Operation[S]:
    """Run the parts of an overlap one after the other."""
    parts = [operation for operation in operations if operation is not None]

    def run_parts(step: S) -> None:
        for part in parts:
            part(step)

    return run_parts
