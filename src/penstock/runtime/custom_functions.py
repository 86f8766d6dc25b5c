"""Runs the user's functions in place of the runtime's operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import StageError
from penstock.execution.operation_set import CustomOperations

if TYPE_CHECKING:
    from penstock.execution.native_operations import NativeOperations
    from penstock.execution.stage import Stage
    from penstock.execution.step import Operation, Step
    from penstock.ir.actions import Action, ComputationType
    from penstock.runtime.pipeline import Pipeline

#: Gets the action and its context.
CustomFunction = Callable[["Action", "Context"], Any]


class Context:
    """What a custom function works with.

    Attributes:
        pipe: the pipeline.
        step: the state of the step.
    """

    __slots__ = ("_custom", "pipe", "step")

    def __init__(self, pipe: Pipeline, step: Step, custom: Custom) -> None:
        self.pipe = pipe
        self.step = step
        self._custom = custom

    def run(self, action: Action) -> None:
        """Run the runtime's own operation of an action, or of a part of an overlap."""
        operation = self._custom.default(action)
        if operation is not None:
            operation(self.step)

    def stage(self, action: Action) -> Stage:
        """The stage of an action."""
        found = self.pipe.stages.get(action.stage_index)
        if found is None:
            raise StageError(
                f"{action} refers to stage {action.stage_index}, which is not on rank {self.pipe.rank}",
                stage=action.stage_index,
            )
        return found


class Custom(CustomOperations["Step"]):
    """Wraps the operations of a pipeline with the user's functions."""

    def __init__(
        self, pipe: Pipeline, operations: NativeOperations, functions: Mapping[ComputationType, CustomFunction]
    ) -> None:
        checked = {kind: _checked(function, operations) for kind, function in functions.items()}
        super().__init__(operations, checked, lambda step: Context(pipe, step, self), in_overlaps=True)
        self._defaults: dict[Action, Operation | None] = {}

    def default(self, action: Action) -> Operation | None:
        """Build the runtime's own operation."""
        if action not in self._defaults:
            self._defaults[action] = self.inner.operation(action)
        return self._defaults[action]


def _checked(function: CustomFunction, operations: NativeOperations) -> CustomFunction:
    """Call the function, and check that it ran the forwards and backwards of its action."""

    def checked(action: Action, context: Context) -> None:
        function(action, context)
        missing = operations.find_unrun(action, context.step)
        if missing is not None:
            place = "" if missing is action else f", a part of {action}"
            raise StageError(
                f"the function registered for {action.computation_type.name} returned without running {missing}{place} "
                f"(stage {missing.stage_index}, microbatch {missing.microbatch_index}): call context.run(part) for "
                "every part of the action, or context.run(action)",
                stage=missing.stage_index,
            )

    return checked
