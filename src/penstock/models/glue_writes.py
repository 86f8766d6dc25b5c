"""Refuses glue that writes to parameters and buffers: it runs on every stage, in part on dummies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import SplitError
from penstock.models.record import INPUT, PARAMETER

if TYPE_CHECKING:
    from torch import Tensor, nn

    from penstock.models.sources import SourceTracker
    from penstock.models.units import Units

_ADVICE: Final = (
    "do it in the forward of a layer, whose buffers have one owner, or in the training loop; instead of hooks that do "
    "it, use torch.nn.utils.parametrizations"
)


class GlueWrites:
    """Watches the parameters and buffers of a model during one forward."""

    def __init__(self, model: nn.Module, units: Units, tracker: SourceTracker) -> None:
        self._model = model
        self._tracker = tracker
        self._placed = {id(part) for module in units.units.values() for part in module.modules()}
        self._before = self._shared_buffers()
        for name, module in model.named_modules():
            for short, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    full = f"{name}.{short}" if name else short
                    tracker.held.setdefault(tracker.number_memory(tensor), (full, id(module) in self._placed))

    def check(self) -> None:
        """Raise SplitError if glue has written to one of them, or anything to a buffer that all stages have."""
        for name in self._tracker.written:
            raise _refused(name, "writes to")
        for name, (tensor, is_saved) in self._shared_buffers().items():
            before, _ = self._before.get(name, (tensor, False))
            if tensor is not before and (is_saved or not self._is_same_everywhere(tensor)):
                raise _refused(name, "replaces")

    def _shared_buffers(self) -> dict[str, tuple[Tensor, bool]]:
        """Return the buffers of containers and glue, each with whether it is saved."""
        return {
            f"{name}.{short}" if name else short: (tensor, short not in module._non_persistent_buffers_set)
            for name, module in self._model.named_modules()
            if id(module) not in self._placed
            for short, tensor in module._buffers.items()
            if tensor is not None
        }

    def _is_same_everywhere(self, tensor: Tensor) -> bool:
        """Return whether every stage computes this: from keyword inputs and what all stages hold."""
        sources = self._tracker.of(tensor)
        return all((source.kind == INPUT and source.call < 0) or source.kind == PARAMETER for source in sources)


def _refused(name: str, verb: str) -> SplitError:
    owner, _, short = name.rpartition(".")
    return SplitError(
        f"the code around the layers {verb} {short} of {owner or 'the model'} in the forward, and would do so on every "
        f"stage; {_ADVICE}",
        unit=name,
    )
