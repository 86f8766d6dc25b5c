"""Profiles a split model: every stage on its own, and the links between ranks."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.execution.preserved_state import copy_as_leaves
from penstock.execution.trees import map_tensors
from penstock.ir.numbers import whole_number
from penstock.models.inputs import checked_example
from penstock.models.split import Split, split
from penstock.runtime.link_probe import SMALL, probe_links
from penstock.runtime.profiling.result import TIMES, Profile, Quartiles
from penstock.runtime.profiling.stage_memory import static_bytes, value_bytes
from penstock.runtime.profiling.stage_times import time_stage
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.simulation.costs import LARGEST, Costs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.runtime.link_probe import Bounce
    from penstock.runtime.profiling.stage_times import StageTimes
    from penstock.runtime.transport.protocol import Transport

    #: Called with what is measured now.
    Report = Callable[[str], object]

STAGE, LAYER = "stage", "layer"
_REPEATS: Final = 20
_BOUNCES: Final = 41


def profile(
    model: Split | torch.nn.Module | Callable[[], torch.nn.Module],
    example: Any,
    *,
    target: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    per: str = STAGE,
    repeats: int = _REPEATS,
    optimizer_state: float = 2.0,
    group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
    report: Report | None = None,
) -> Profile:
    """Measure what each stage of a model costs on this machine, and what messages between ranks cost.

    Each stage runs alone, one after the other, on what the stage before returns, so they need not fit into memory
    together if a function builds the model. In a process group, all ranks call it; each measures every stage, beside
    the others as in training, and messages are sent over the connections that a ``Pipeline`` would use.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> found = profile(split(model, stages=2), ((torch.ones(2, 8),), {}), repeats=3)
    >>> found.costs.activation_bytes, found.parameters
    ((128.0,), (576, 272))

    Args:
        model: a split, whose stages are measured; with ``per="layer"`` also a model.
        example: ``(args, kwargs)`` of a call with one microbatch.
        target: what ``loss_fn`` gets beside the output; by default the keyword argument of the model's own loss.
        loss_fn: the loss of a microbatch, measured with the last stage; by default that of the split, if it has one.
        per: ``"stage"``; or ``"layer"``, to plan the partition: the costs then have a number for each unit of the
            split, in order.
        repeats: how often each time is measured.
        optimizer_state: how many tensors of a parameter's size the optimizer keeps for each, which count as ``static``:
            2 for Adam, 0 for plain SGD.
        group: the process group; by default the default group, if there is one.
        transport: what to run on instead of a process group.
        report: called with a line for each stage that is measured.

    Returns:
        The costs, in seconds and bytes, and their spread.
    """
    if per not in (STAGE, LAYER):
        raise RunError(f"per must be {STAGE!r} or {LAYER!r}, got {per!r}")
    whole_number("repeats", repeats, least=1)
    args, kwargs = checked_example(example)
    stages = _stages_of(model, per, (args, kwargs))
    own = stages.loss
    if loss_fn is None and own is not None:
        loss_fn, target = own.loss_fn, kwargs.get(own.target) if target is None else target
    opened = transport is None and dist.is_available() and dist.is_initialized()
    channel = DistributedTransport(group) if opened else transport
    try:
        found = _Stages(stages, args, kwargs)
        for stage in range(len(stages.layout)):
            if report is not None:
                report(f"{per} {stage + 1} of {len(stages.layout)}: {', '.join(stages.layout[stage])}")
            is_last = stage == len(stages.layout) - 1
            found.measure(stage, _loss_of(loss_fn, target) if is_last else None, repeats, optimizer_state)
        return _combine(stages, found, channel, report)
    finally:
        if opened and channel is not None:
            channel.close()


class _Stages:
    """Measures the stages of a split in order, and keeps the values between them.

    Attributes:
        times: what was found about each stage.
        parameters: the bytes of the parameters of each stage.
        static: the bytes that it always takes.
        edges: the bytes of each edge, forward and backward.
    """

    def __init__(self, stages: Split, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.times: list[dict[str, list[float]]] = []
        self.activation: list[int] = []
        self.parameters: list[int] = []
        self.static: list[float] = []
        self.edges: dict[int, tuple[int, int]] = {}
        self._split = stages
        self._given = args
        self._kwargs = kwargs
        self._values: dict[int, Any] = {}

    def measure(
        self, stage: int, loss: Callable[[Any], torch.Tensor] | None, repeats: int, optimizer_state: float
    ) -> None:
        """Measure the next stage."""
        module = self._split.stage_alone(stage)
        edges = self._split.edges
        entering = [number for number, edge in enumerate(edges) if stage in edge.targets]
        received = [self._values[number] for number in entering]
        args = self._given if stage == 0 else _arguments(received)
        found = time_stage(stage, module, args, self._kwargs, loss, repeats)
        self.times.append({field: list(each) for field, each in found.seconds.items()})
        self.activation.append(found.activation)
        self.parameters.append(sum(parameter.nbytes for parameter in module.parameters()))
        self.static.append(static_bytes(module, optimizer_state))
        self._keep(stage, found)
        for number in entering:
            if edges[number].targets[-1] == stage:
                del self._values[number]

    def _keep(self, stage: int, found: StageTimes) -> None:
        """Keep the output of a stage for those that take it."""
        edges = self._split.edges
        leaving = [number for number, edge in enumerate(edges) if edge.source == stage]
        values = [found.output] if len(leaving) == 1 else list(found.output) if leaving else []
        for number, value in zip(leaving, values, strict=True):
            forward, backward = value_bytes(value)
            self.edges[number] = forward, backward if edges[number].gradient else 0
            self._values[number] = map_tensors(lambda one: one.detach().requires_grad_(one.requires_grad), value)


def _loss_of(loss_fn: Callable[..., torch.Tensor] | None, target: Any) -> Callable[[Any], torch.Tensor] | None:
    copy = copy_as_leaves(target)
    return None if loss_fn is None else lambda output: loss_fn(output, copy)


def _arguments(received: list[Any]) -> tuple[Any, ...]:
    """Return what a stage is called with: a single tuple is spread."""
    return received[0] if len(received) == 1 and type(received[0]) is tuple else tuple(received)


def _stages_of(model: Any, per: str, example: tuple[tuple[Any, ...], dict[str, Any]]) -> Split:
    if isinstance(model, Split) and per == STAGE:
        return model
    if per == STAGE:
        raise RunError("costs per stage need a split: pass ps.split(model, stages=...), or per='layer'")
    whole = model if isinstance(model, Split) else split(model, stages=1, example=example, check=False)
    layers = [[name] for names in whole.layout for name in names]
    return split(whole.model if isinstance(model, Split) else model, layout=layers, example=example, check=False)


def _combine(stages: Split, found: _Stages, channel: Transport | None, report: Report | None) -> Profile:
    """Put together what all ranks have found."""
    ranks = [found.times]
    if channel is not None:
        channel.progress.call = "profile()"
        ranks = [json.loads(data) for data in channel.exchange(json.dumps(found.times).encode())]
    times = {
        field: [Quartiles.of(one for rank in ranks for one in rank[stage][field]) for stage in range(len(found.times))]
        for field in TIMES
    }
    forward, backward = ([found.edges[edge][way] for edge in range(len(stages.edges))] for way in (0, 1))
    fields: dict[str, Any] = {field: [spread.median for spread in each] for field, each in times.items()}
    fields |= {"activation": found.activation, "static": found.static}
    if any(forward):
        fields |= {"activation_bytes": forward, "gradient_bytes": backward, "edge_memory": forward}
        fields["bandwidth"] = LARGEST  # as if bytes took no time, unless it is measured
    latency = post = None
    if channel is not None and channel.ranks > 1:
        if report is not None:
            report(f"messages between {channel.ranks} ranks")
        bounces = _probe(stages, channel, max([2 * SMALL, *forward, *backward]))
        latency = Quartiles.of(max(0.0, one) for bounce in bounces for one in bounce.times[SMALL])
        post = Quartiles.of(one for bounce in bounces for one in bounce.posts[SMALL])
        fields["latency"] = latency.median
        if any(forward):
            fields["bandwidth"] = min(bounce.bandwidth for bounce in bounces)
    return Profile(Costs(**fields), stages.layout, times, tuple(found.parameters), latency, post, len(ranks))


def _probe(stages: Split, channel: Transport, largest: int) -> list[Bounce]:
    """Bounce messages between each rank and the next one."""
    pairs = [(rank, rank + 1) for rank in range(channel.ranks - 1)]
    channel.connect(pairs)
    device = next((one.device for one in stages.model.parameters() if not one.is_meta), torch.device("cpu"))
    sizes = dict.fromkeys(pairs, (SMALL, largest))
    return list(probe_links(channel, sizes, device, time.perf_counter, _BOUNCES).values())
