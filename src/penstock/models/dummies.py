"""Makes what stands in for values that a stage neither computes nor receives: of the right shape, and NaN."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.models.call_checks import Shapes, input_rules
from penstock.models.edges import is_view
from penstock.models.record import ARGUMENT, INPUT, Leaf, Source, Value, dtype_of
from penstock.models.values import actual_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.models.plan import Plan

#: What integer dummies are filled with. The self-check compares runs with several numbers: none of them is a NaN.
INTEGERS: Final = ContextVar("INTEGERS", default=0)


class Run:
    """The state of one forward of a stage."""

    def __init__(self, received: dict[Source, torch.Tensor], tensors: list[torch.Tensor]) -> None:
        self.received = received
        self.captured: dict[Source, torch.Tensor] = {}
        self.next_call = 0
        self.is_inside = False
        self.inner_count: dict[tuple[int, str], int] = {}
        self.dummies: dict[int, torch.Tensor] = {}
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.dtypes: dict[str, torch.dtype] = {}
        self.versions: dict[Source, int] = {}
        self.shapes: Shapes = {}
        self.seen_tokens = 0

    def sized(self, given: Sequence[Any]) -> Sequence[Any]:
        """Return arguments with the sizes that follow from the new tokens.

        While tokens are generated a mask also counts those in the cache. In the probe there was none, so what has as
        many rows as the mask has columns has one for each new token.
        """
        if not self.seen_tokens:
            return given
        return [
            one[:, self.seen_tokens :] if _is_mask(one) and one.shape[1] > self.seen_tokens else one for one in given
        ]


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and not value.dtype.is_floating_point


class Dummies:
    """Makes the dummies of a stage."""

    def __init__(self, plan: Plan, poison: frozenset[str]) -> None:
        self._plan = plan
        self._poison = poison
        self._rules = input_rules(plan) if plan.stage else {}
        # A gradient of zero goes back from an overwritten view, and zero times NaN would be NaN.
        overwritten = {source for source in plan.received if source.kind == ARGUMENT}
        self._is_poisonous = not any(is_view(plan.record, source) for source in overwritten)

    def inputs(self, run: Run) -> tuple[Any, ...]:
        """Return the positional inputs: received, or dummies, since only the first stage gets them."""
        return tuple(self._input(run, number, value) for number, value in enumerate(self._plan.record.positional))

    def _input(self, run: Run, number: int, value: Value) -> Any:
        leaves: list[Any] = []
        tensors = 0
        for leaf in value.leaves:
            if leaf.kind != "tensor":
                leaves.append(leaf.value if leaf.kind == "constant" else None)
                continue
            place, tensors = (number, tensors), tensors + 1
            tensor = run.received.get(Source(INPUT, *place, f"args[{number}]"))
            if tensor is None:
                shape = actual_shape(leaf, list(run.received.values()), self._rules[place])
                tensor = self._fill(run, leaf, shape, run.device, "")
            run.shapes[place] = tensor.shape
            leaves.append(tensor)
        return value.build(leaves)

    def leaf(self, run: Run, leaf: Leaf, given: Sequence[Any], unit: str) -> Any:
        """Return a leaf of what a unit of another stage would return."""
        if leaf.kind == "constant":
            return leaf.value
        if leaf.kind == "passed":
            return given[leaf.value]
        if leaf.kind == "opaque":
            return None
        shape, dtype = actual_shape(leaf, run.sized(given)), self._dtype(run, leaf)
        device = next((one.device for one in given if isinstance(one, torch.Tensor)), run.device)
        for one in given:
            if id(one) in run.dummies and list(one.shape) == shape and one.dtype == dtype:
                return one
        return self._fill(run, leaf, shape, device, unit)

    def _fill(self, run: Run, leaf: Leaf, shape: Sequence[int], device: torch.device, unit: str) -> torch.Tensor:
        dtype = self._dtype(run, leaf)
        is_poisoned = unit in self._poison if self._poison else self._is_poisonous
        can_be_nan = dtype.is_floating_point or dtype.is_complex
        value = (float("nan") if is_poisoned else 0) if can_be_nan else INTEGERS.get()
        dummy = torch.full(tuple(shape), value, dtype=dtype, device=device)
        if not self._poison:
            run.dummies[id(dummy)] = dummy
        return dummy

    def _dtype(self, run: Run, leaf: Leaf) -> torch.dtype:
        """Return the element type of a dummy: the recorded one, unless the model has been converted since."""
        return run.dtypes.get(leaf.dtype) or dtype_of(leaf.dtype)
