"""Averages the gradients of stages under ``DistributedDataParallel``, or the composable ``replicate`` around it.

DDP itself would start in each backward; here averaging starts after the last backward of a step, in flat buckets.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import StageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Bytes of gradients that are averaged in one go.
_BUCKET: Final = 25 << 20


class DdpAdapter:
    """Modules with full parameters on every replica; their gradients are averaged."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        self._due = False
        self._under_way: list[_Bucket] = []

    def begin(self) -> None:
        """Stop the modules from reducing gradients."""
        for module in self._modules:
            _share_gradients(module, False)
            if isinstance(module, DistributedDataParallel):
                _check_usable(module)
        self._due = True
        self._under_way = []

    def unshard(self) -> None:
        """Do nothing: parameters are always complete."""

    def reshard(self) -> None:
        """Do nothing: parameters are always complete."""

    def weight_backward(self, run: Callable[[], None]) -> None:
        """Run it: parameters are always complete."""
        run()

    def own_gradients(self) -> None:
        """Do nothing: the stage handles the module's parameters."""

    def reduce(self) -> None:
        """Start to average the gradients."""
        if not self._due:
            return
        self._due = False
        for module in self._modules:
            inner = _inner(module)
            if inner is not None:
                _check_usable(inner)
                self._under_way += _averages(inner)

    def finish(self) -> None:
        """Wait for the averages."""
        for bucket in self._under_way:
            bucket.settle()
        self._under_way = []

    def end(self) -> None:
        """Let the modules reduce gradients and broadcast buffers again."""
        self._under_way = []
        for module in self._modules:
            _share_gradients(module, True)
            if (inner := _inner(module)) is not None:
                inner.require_forward_param_sync = True  # the first forward of a step broadcasts buffers


def _share_gradients(module: Any, share: bool) -> None:
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = share
    else:
        module.set_requires_gradient_sync(share)


def _inner(module: Any) -> DistributedDataParallel | None:
    """Find the DDP module; the composable ``replicate`` creates one in the first forward."""
    if isinstance(module, DistributedDataParallel):
        return module
    home: Any = sys.modules["torch.distributed._composable.replicate"]
    return getattr(home.replicate.state(module), "_ddp", None)


def _check_usable(module: DistributedDataParallel) -> None:
    """Refuse options that would be ignored silently, or would reduce gradients in every backward."""
    for wrong, name in (
        (module._comm_hooks, "a communication hook"),
        (module.static_graph, "static_graph=True"),
        (module._delay_all_reduce_params, "delay_all_reduce_named_params"),
    ):
        if wrong:
            raise StageError(
                f"DistributedDataParallel with {name} is not supported as a stage: the pipeline averages its "
                "gradients, once per step; remove it, or use fully_shard"
            )


class _Bucket(NamedTuple):
    """Averages gradients of some parameters in one flat tensor, with a flag for each: whether any replica has it."""

    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    work: Any

    @classmethod
    def launch(cls, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> _Bucket:
        """Start to average; each replica contributes the gradients it has."""
        count = sum(parameter.numel() for parameter in parameters)
        flat = parameters[0].new_zeros(count + len(parameters))
        with torch.no_grad():
            for index, (parameter, view) in enumerate(_views(flat, parameters)):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                    flat[count + index] = 1
            flat.mul_(1 / dist.get_world_size(group))
        return cls(parameters, flat, dist.all_reduce(flat, group=group, async_op=True))

    def settle(self) -> None:
        """Wait, then write the averages to the gradients."""
        self.work.wait()
        seen = self.flat[-len(self.parameters) :]
        with torch.no_grad():
            for index, (parameter, view) in enumerate(_views(self.flat, self.parameters)):
                if parameter.grad is not None:
                    parameter.grad.copy_(view)
                elif seen[index]:  # on another replica
                    parameter.grad = torch.empty_like(parameter).copy_(view)


def _views(
    flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    start = 0
    for parameter in parameters:
        yield parameter, flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()


def _averages(module: DistributedDataParallel) -> list[_Bucket]:
    """Start to average all gradients of a module. Every replica uses the same buckets, whichever gradients it has."""
    alike: dict[Any, list[torch.nn.Parameter]] = defaultdict(list)
    for name, parameter in module.module.named_parameters():
        if parameter.requires_grad and name not in module.parameters_to_ignore:
            alike[parameter.device, parameter.dtype].append(parameter)
    return [
        _Bucket.launch(parameters, module.process_group)
        for parameters_alike in alike.values()
        for parameters in _in_buckets(parameters_alike)
    ]


def _in_buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        bucket.append(parameter)
        size += parameter.nbytes
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
