"""Compares the gradients and losses of two runs, parameter by parameter."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.errors import MetadataError
from penstock.runtime.parity.report import SCHEDULED, Difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.execution.stage import Stage
    from penstock.runtime.engine import Engine

    #: The gradient of each parameter of this rank.
    Gradients = dict[torch.nn.Parameter, torch.Tensor | None]


class ParameterPath(NamedTuple):
    """Where a parameter is."""

    stage: int
    name: str
    module: str
    order: int


def parameters_of(stages: Mapping[int, Stage]) -> dict[torch.nn.Parameter, ParameterPath]:
    """Find the parameters of this rank, each with the first place where it is, in the order of the model."""
    found: dict[torch.nn.Parameter, ParameterPath] = {}
    for index in sorted(stages):
        for path, module in stages[index].module.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter not in found:
                    full = f"{path}.{name}" if path else name
                    found[parameter] = ParameterPath(index, full, type(module).__name__, len(found))
    return found


def alone(
    parameters: Mapping[torch.nn.Parameter, ParameterPath], stages: Mapping[int, Stage]
) -> dict[torch.nn.Parameter, ParameterPath]:
    """Select those that no other replica has; the others' gradients are reduced only when a step ends."""
    return {one: owned for one, owned in parameters.items() if stages[owned.stage].parallel is None}


def compare(
    parameters: Mapping[torch.nn.Parameter, ParameterPath], found: Gradients, expected: Gradients, way: str
) -> Iterator[Difference]:
    """Compare gradients. Those of one stage share a scale: a tiny one may be mere rounding."""
    scales: dict[int, float] = {}
    for parameter, owned in parameters.items():
        scales[owned.stage] = max(scales.get(owned.stage, 0.0), _size(expected[parameter]))
    for parameter, owned in parameters.items():
        yield difference(owned, way, found[parameter], expected[parameter], scales[owned.stage])


def compared_losses(
    engine: Engine, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> list[Difference]:
    """Compare losses, on the rank of the last stage."""
    if not engine.has_last:
        return []
    owned = ParameterPath(engine.schedule.stages - 1, "loss", "", 0)
    return [difference(owned, SCHEDULED, one, other, 0.0) for one, other in zip(found, expected, strict=True)]


def difference(
    owned: ParameterPath, way: str, found: torch.Tensor | None, expected: torch.Tensor | None, scale: float
) -> Difference:
    """Measure how far a gradient is from the expected one, where those of its stage are as large as `scale`."""
    if found is None or expected is None:
        missing = 0.0 if found is expected else float("inf")
        return Difference(owned.stage, owned.name, owned.module, way, missing, _size(expected), 0.0, owned.order)
    found, expected = _plain(found), _plain(expected)
    finite = found.isfinite() & expected.isfinite()
    odd = (found != expected) & ~(found.isnan() & expected.isnan()) & ~finite
    found, expected = found.where(finite, 0), expected.where(finite, 0)
    size = _size(expected)
    largest = float("inf") if odd.any() else _size(found - expected)
    # What cancels out leaves the rounding of what it is made of.
    digits = precision(expected)
    tolerance = digits * (size + 16 * digits * scale)
    return Difference(owned.stage, owned.name, owned.module, way, largest, size, tolerance, owned.order)


def gather_differences(engine: Engine, mine: Sequence[Difference]) -> list[Difference]:
    """Gather the differences of all ranks: later stages first, and in a stage later parameters first."""
    found = []
    for data in engine.transport.exchange(json.dumps([asdict(one) for one in mine]).encode()):
        try:
            found += [Difference(**fields) for fields in json.loads(data)]
        except (TypeError, ValueError) as error:
            raise MetadataError("could not decode the differences that a rank sent") from error
    return sorted(found, key=lambda one: (-one.stage, one.name != "loss", -one.order, one.way))


def precision(tensor: torch.Tensor) -> float:
    """The tolerance: half of the digits."""
    return float(torch.finfo(tensor.dtype).eps ** 0.5)


def _size(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else float(_plain(tensor).abs().nan_to_num(0, 0).max())


def _plain(tensor: Any) -> Any:
    """Get the elements on this rank, as an ordinary tensor."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.to_dense() if tensor.is_sparse else tensor
