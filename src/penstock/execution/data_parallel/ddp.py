"""Averages the gradients of stages under ``DistributedDataParallel``, or the composable ``replicate`` around it.

DDP's reducer would run in every backward. Here gradients are averaged in flat buckets when the last backward
of a step has run, or the reducer runs in that one alone. All that depends on private names of torch's DDP is here.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from penstock.errors import StageError
from penstock.execution.data_parallel.adapter import DataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.execution.data_parallel.adapter import BackwardKind, T

_REDUCTIONS: Final = count(1)
#: Bytes of gradients that are averaged in one go.
_BUCKET: Final = 25 << 20


class DdpAdapter(DataParallel):
    """Averages the gradients of modules with full parameters on every replica: of the stage itself, or of parts of it.

    Args:
        modules: of ``DistributedDataParallel``, or of the composable ``replicate`` around it.
        reduce_in: when: in REDUCE_GRAD, or in the last backward of a step, which then begins with its first forward.
    """

    def __init__(self, modules: Sequence[Any], *, reduce_in: Literal["reduce_action", "last_backward"]) -> None:
        self._modules = modules
        self._reduces_in_backward = reduce_in == "last_backward"
        self._has_begun = False
        self._is_due = False
        self._in_flight: list[_Bucket] = []

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups that hold replicas, as far as they are known before the first forward."""
        inner = [ddp for module in self._modules if (ddp := _inner(module)) is not None]
        return tuple(dict.fromkeys(ddp.process_group for ddp in inner))

    def begin_step(self) -> None:
        """Stop the modules from reducing gradients."""
        self._has_begun = True
        for module in self._modules:
            _reduce_in_backward(module, False)
            if isinstance(module, DistributedDataParallel):
                _check_usable(module)
        self._is_due = True
        self._in_flight = []

    def forward(self) -> AbstractContextManager[Any]:
        """Begin a step that does not begin otherwise."""
        if self._reduces_in_backward:
            self.begin_step()
        return nullcontext()

    def run_backward(self, kind: BackwardKind, run: Callable[[], T], *, outputs: Any = None, last: bool = False) -> T:  # noqa: ARG002
        """Run it; average gradients if it is the last."""
        result = run()
        if last and kind != "input" and self._reduces_in_backward:
            self._average()
        return result

    def _average(self) -> None:
        try:
            self.reduce()
            self.finish_step()
        finally:
            self.end_step()

    def reduce(self) -> None:
        """Start to average the gradients."""
        if not self._is_due:
            return
        self._is_due = False
        self.reduction = next(_REDUCTIONS)
        for module in self._modules:
            inner = _inner(module)
            if inner is not None:
                _check_usable(inner)
                self._in_flight += _averages(inner)

    def finish_step(self) -> None:
        """Wait for the averages."""
        for bucket in self._in_flight:
            bucket.settle()
        self._in_flight = []

    def end_step(self) -> None:
        """Let the modules reduce gradients and broadcast buffers again."""
        if not self._has_begun:
            return
        self._has_begun = self._is_due = False
        self._in_flight = []
        for module in self._modules:
            _reduce_in_backward(module, True)
            if (inner := _inner(module)) is not None:
                inner.require_forward_param_sync = True  # the first forward of a step broadcasts buffers


class DdpReducerAdapter(DdpAdapter):
    """Has the reducer of a ``DistributedDataParallel`` around the stage run in the last backward of a step.

    So its communication hooks and buckets are used. The reducer does not see a W; after a last one, gradients are
    averaged as those of other modules are.
    """

    keeps_outputs = True

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__([module], reduce_in="last_backward")
        self._module = module

    def forward(self) -> AbstractContextManager[Any]:
        """Reduce nothing in the backward of this forward."""
        return self._module.no_sync()

    def run_backward(self, kind: BackwardKind, run: Callable[[], T], *, outputs: Any = None, last: bool = False) -> T:
        """Run it; reduce gradients if it is the last."""
        if last and kind == "full":
            return self._run_with_reducer(run, outputs)
        with self._module.no_sync():
            result = run()
        if last and kind == "weight":
            self.begin_step()
            self._average()
        return result

    def _run_with_reducer(self, run: Callable[[], T], outputs: Any) -> T:
        self._module.reducer.prepare_for_backward(list(_find_tensors(outputs)))  # type: ignore[no-untyped-call]
        self.gradients_in_buckets = self._module.gradient_as_bucket_view
        try:
            return run()
        finally:
            self.gradients_in_buckets = False


def _reduce_in_backward(module: Any, reduce: bool) -> None:
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = reduce
    else:
        module.set_requires_gradient_sync(reduce)


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
