"""Stages whose parameters are shared with other replicas of the pipeline.

A wrapper for data parallelism shares gradients in the backward; in a pipeline a stage has many backwards, and only the
sum of them is to be shared. So in a step the wrappers are told to leave gradients alone, and the sharing is done by
REDUCE_GRAD, or at the end of the step for a stage whose schedule has none:

- ``DistributedDataParallel`` and the composable ``replicate`` around it: gradients are averaged in a few flat buckets.
- ``fully_shard``, and the ``replicate`` that is made of it: their own reduction runs, for all backwards at once.
  Parameters are brought together by UNSHARD and released by RESHARD, not by each forward and backward; where a schedule
  has neither, the first forward brings them together and they are released when the step ends.

Reductions run beside whatever comes next in the schedule. Gradients are complete when the step ends.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import StageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed.fsdp import FSDPModule, UnshardHandle

    from penstock.runtime.stage import Stage

#: Bytes of gradients that are averaged in one go.
_BUCKET: Final = 25 << 20


class DataParallel(Protocol):
    """What the runtime asks of a module that is replicated or sharded."""

    def begin(self) -> None:
        """A step begins: until ``reduce`` no gradient is shared."""

    def unshard(self) -> None:
        """UNSHARD: bring the parameters together. It may still be under way when this returns."""

    def reshard(self) -> None:
        """RESHARD: keep only this replica's part of them."""

    def weight_backward(self, run: Callable[[], None]) -> None:
        """W: run it, with the parameters at hand. The hooks of the module do not see it."""

    def reduce(self) -> None:
        """REDUCE_GRAD: all backwards of the step are done; share the gradients, if that has not begun in this step."""

    def finish(self) -> None:
        """The step has been run: return when gradients are complete and parameters are as before the step."""

    def end(self) -> None:
        """The step is over, also if it has failed: the module is on its own again."""


def adapter_for(module: torch.nn.Module, stage: int | None = None) -> DataParallel | None:
    """What shares the parameters of a module, or of modules in it, with other replicas; None if nothing does.

    >>> adapter_for(torch.nn.Linear(2, 2)) is None
    True
    """
    sharded = _modules_of(module, "torch.distributed.fsdp", "FSDPModule")
    replicated = _modules_of(module, "torch.distributed._composable.replicate", "DDP")
    wrapped = [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    if sharded and (replicated or wrapped):
        raise StageError(
            "a stage has modules of fully_shard and of DistributedDataParallel: use one of them for all of it",
            stage=stage,
        )
    if sharded:
        return Sharded(sharded)
    if replicated or wrapped:
        return Averaged([*wrapped, *replicated])
    return None


@contextmanager
def in_step(stages: Iterable[Stage], *, reduce: bool) -> Iterator[None]:
    """Around a step: nothing is shared too early, and with `reduce` all gradients are when it ends."""
    adapters = [stage.parallel for stage in stages if stage.parallel is not None]
    for adapter in adapters:
        adapter.begin()
    try:
        yield
        for adapter in adapters:
            if reduce:
                adapter.reduce()
        for adapter in adapters:
            adapter.finish()
    finally:
        for adapter in adapters:
            adapter.end()


def _modules_of(module: torch.nn.Module, home: str, name: str) -> list[Any]:
    """The modules that are of a type of torch. Where the type has not been imported, there are none."""
    kind = getattr(sys.modules.get(home), name, None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]


class Averaged:
    """Modules with full parameters on every replica; their gradients are averaged."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        self._due = False
        self._under_way: list[_Bucket] = []

    def begin(self) -> None:
        """Leave gradients alone."""
        for module in self._modules:
            _share_gradients(module, False)
            if isinstance(module, DistributedDataParallel):
                _check_usable(module)
        self._due = True
        self._under_way = []

    def unshard(self) -> None:
        """They are together always."""

    def reshard(self) -> None:
        """They are together always."""

    def weight_backward(self, run: Callable[[], None]) -> None:
        """Nothing is to be done about it."""
        run()

    def reduce(self) -> None:
        """Begin to average the gradients."""
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
        """Let the modules share gradients and buffers again."""
        self._under_way = []
        for module in self._modules:
            _share_gradients(module, True)
            if (inner := _inner(module)) is not None:
                inner.require_forward_param_sync = True  # buffers are shared by the first forward of a step


def _share_gradients(module: Any, share: bool) -> None:
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = share
    else:
        module.set_requires_gradient_sync(share)


def _inner(module: Any) -> DistributedDataParallel | None:
    """What does the work: the composable ``replicate`` makes one in the first forward."""
    if isinstance(module, DistributedDataParallel):
        return module
    home: Any = sys.modules["torch.distributed._composable.replicate"]
    return getattr(home.replicate.state(module), "_ddp", None)


def _check_usable(module: DistributedDataParallel) -> None:
    """Refuse what would be left out without a word, or would share gradients in every backward."""
    for wrong, name in (
        (module._comm_hooks, "a communication hook"),
        (module.static_graph, "static_graph=True"),
        (module._delay_all_reduce_params, "delay_all_reduce_named_params"),
    ):
        if wrong:
            raise StageError(
                f"DistributedDataParallel with {name} cannot be a stage: its gradients are averaged by the pipeline, "
                "once in a step; leave that out, or use fully_shard"
            )


class _Bucket(NamedTuple):
    """Gradients of some parameters under way in one flat tensor, then for each whether any replica has it."""

    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    work: Any

    @classmethod
    def launch(cls, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> _Bucket:
        """Begin to average; each replica gives what it has."""
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
        """Wait, and put the averages where the gradients are."""
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
    """Begin to average all gradients of a module. Every replica makes the same buckets, whatever gradients it has."""
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


class Sharded:
    """Modules of ``fully_shard``, or of the ``replicate`` that works like it: the stage itself, or parts of it."""

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._modules = modules
        self._gathers: list[UnshardHandle] = []
        self._due = False
        replicated: Any = getattr(
            sys.modules.get("torch.distributed._composable.replicate_with_fsdp"), "ReplicateModule", ()
        )
        for module in modules:
            if not isinstance(module, replicated):
                module.set_reshard_after_forward(False, recurse=False)

    def begin(self) -> None:
        """Leave gradients alone, and parameters together."""
        self._due = True
        for module in self._modules:
            module.set_is_last_backward(False)
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)

    def unshard(self) -> None:
        """Begin to gather the parameters; the next forward or backward waits for them."""
        if torch.is_inference_mode_enabled():
            # Parameters are made when they are first brought together; made here they could not be trained.
            with torch.inference_mode(False), torch.no_grad():
                for module in self._modules:
                    module.unshard()
            return
        for module in self._modules:
            handle = module.unshard(async_op=True)
            if handle is not None:
                self._gathers.append(handle)

    def reshard(self) -> None:
        """Release the parameters."""
        self._arrive()
        for module in self._modules:
            module.reshard()

    def weight_backward(self, run: Callable[[], None]) -> None:
        """Wait for the parameters, and add gradients up in the type in which they are reduced."""
        self._arrive()
        run()
        if self._reduces_in_another_type():
            self._run_post_backward()

    def reduce(self) -> None:
        """Begin to reduce the gradients."""
        if not self._due:
            return
        self._due = False
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
        self._run_post_backward()
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)

    def finish(self) -> None:
        """Wait for the gradients, and release the parameters."""
        if torch.is_grad_enabled():
            for module in self._modules:
                module.set_is_last_backward(True)
            self._run_post_backward()
        self.reshard()

    def end(self) -> None:
        """Let the modules share gradients and release parameters again."""
        self._gathers = []
        for module in self._modules:
            module.set_is_last_backward(True)
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)

    def _arrive(self) -> None:
        """Wait for parameters that are on their way."""
        for handle in self._gathers:
            handle.wait()
        self._gathers = []

    def _states(self) -> list[Any]:
        """What torch keeps of each module; several modules may share it."""
        return list({id(state): state for state in (module._get_fsdp_state() for module in self._modules)}.values())

    def _run_post_backward(self) -> None:
        """Have torch do what it does when a backward ends: it may add up gradients, share them, or wait for them."""
        for state in self._states():
            if state._is_root:
                state._root_post_backward_final_callback()

    def _reduces_in_another_type(self) -> bool:
        """Whether gradients are added up in another type than they are made in: then W must not add to what is made."""
        return any(state._mp_policy.reduce_dtype is not None for state in self._states())
