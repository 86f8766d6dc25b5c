"""Stages whose parameters are shared with other replicas: when gradients are shared, and by whom.

A wrapper for data parallelism shares gradients in every backward. In a pipeline only the sum over all microbatches is
to be shared: by the last backward of ``DistributedDataParallel``, by ``perform_reduce_grad`` of ``fully_shard``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from penstock.execution.data_parallel import adapter_for
from penstock.execution.data_parallel.ddp import DdpAdapter
from penstock.execution.data_parallel.fsdp import FsdpAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.execution.data_parallel import DataParallel


class Parallel(Protocol):
    """What a stage asks of its module."""

    #: Whether no other replica has the parameters.
    is_alone: bool
    #: Whether every gradient needs its own memory after this backward: not where it becomes part of a bucket,
    #: nor where the adapter sees to it.
    has_own_gradients: bool
    #: Whether a backward can be cut in two; if not, all of it is done with the gradient of the inputs.
    divisible: bool
    #: Whether outputs are needed as tensors until the backward.
    keeps_outputs: bool
    #: Whether a forward must run under ``silent``.
    is_loud: bool

    def silent(self) -> AbstractContextManager[Any]:
        """Wrap a forward, and a dry run."""

    def backward(self, kind: str, run: Callable[[], Any], outputs: Any, last: bool) -> Any:
        """Run a backward of a kind: full, input or weight; ``last`` is the last one of a step."""

    def reduce(self) -> None:
        """All backwards of a step are done."""

    def after_dry_run(self) -> None:
        """Clean up after a dry run."""

    def forget(self) -> None:
        """A step has failed."""


def parallel_of(module: Any) -> Parallel:
    """How the parameters of a module are shared."""
    if isinstance(module, DistributedDataParallel):
        return Replicated(module)
    if isinstance(module, FSDPModule):
        return FullySharded(torch.nn.Module.modules(module))  # type: ignore[arg-type]
    if not isinstance(module, torch.nn.Module):
        return NotShared()
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if sharded:
        return PartlySharded(sharded)
    adapter = adapter_for(module)
    return NotShared() if adapter is None else PartlyReplicated(adapter)


class NotShared:
    """A module of this rank alone."""

    is_alone = True
    has_own_gradients = True
    divisible = True
    keeps_outputs = False
    is_loud = False

    def silent(self) -> AbstractContextManager[Any]:
        """Nothing is to be silenced."""
        return nullcontext()

    def backward(self, kind: str, run: Callable[[], Any], outputs: Any, last: bool) -> Any:  # noqa: ARG002
        """Run it."""
        return run()

    def reduce(self) -> None:
        """Nothing is shared."""

    def after_dry_run(self) -> None:
        """Nothing is to be undone."""

    def forget(self) -> None:
        """The gradients that there are belong to the user."""


class Replicated:
    """``DistributedDataParallel``: its reducer runs in a last full backward; after a last W, averages are made here."""

    is_alone = False
    divisible = True
    keeps_outputs = True
    is_loud = True

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module
        self.has_own_gradients = True

    def silent(self) -> AbstractContextManager[Any]:
        """Share nothing."""
        return self._module.no_sync()

    def backward(self, kind: str, run: Callable[[], Any], outputs: Any, last: bool) -> Any:
        """Run it; share gradients if it is the last."""
        if last and kind == "full":
            self._module.reducer.prepare_for_backward(list(_find_tensors(outputs)))  # type: ignore[no-untyped-call]
            self.has_own_gradients = not self._module.gradient_as_bucket_view
            try:
                return run()
            finally:
                self.has_own_gradients = True
        with self._module.no_sync():
            result = run()
        if last and kind == "weight":
            averages = DdpAdapter([self._module])
            averages.begin()
            try:
                averages.reduce()
                averages.finish()
            finally:
                averages.end()
        return result

    def reduce(self) -> None:
        """The last backward has done it."""

    def after_dry_run(self) -> None:
        """Nothing was shared."""

    def forget(self) -> None:
        """The gradients that there are belong to the user."""


class FullySharded:
    """``fully_shard``, or the ``replicate`` made of it, around the stage: nothing is shared before ``reduce``."""

    is_alone = False
    has_own_gradients = False
    divisible = True
    keeps_outputs = False
    is_loud = False

    def __init__(self, parts: Iterable[torch.nn.Module]) -> None:
        self._modules: list[FSDPModule] = [part for part in parts if isinstance(part, FSDPModule)]
        self._adapter = _InStage(self._modules)
        self._begun = False

    def silent(self) -> AbstractContextManager[Any]:
        """A forward shares no gradients."""
        return nullcontext()

    def backward(self, kind: str, run: Callable[[], Any], outputs: Any, last: bool) -> Any:  # noqa: ARG002
        """Run it with gradients left alone, and parameters left together."""
        if not self._begun:
            self._begun = True
            self._adapter.begin()
        if kind == "weight":
            self._adapter.weight_backward(lambda: self._owned(run))
            return (), None
        return self._owned(run)

    def _owned(self, run: Callable[[], Any]) -> Any:
        result = run()
        self._adapter.own_gradients()
        return result

    def reduce(self) -> None:
        """Share the gradients, wait for them, and release the parameters."""
        if not self._begun:  # a user's function may have run the backwards
            self._adapter.begin()
        self._begun = False
        self._adapter.reduce()
        self._adapter.finish()
        self._adapter.end()

    def after_dry_run(self) -> None:
        """Release the parameters, which a forward has brought together."""
        for module in self._modules:
            module.reshard()

    def forget(self) -> None:
        """Drop gradients that are not shared yet, which ``zero_grad`` does not reach, and release the parameters."""
        self._begun = False
        self._adapter.drop_gradients()
        self._adapter.end()
        self.after_dry_run()


class PartlySharded(NotShared):
    """Parts of the stage are ``fully_shard``: each shares the gradients of every backward, which must be whole."""

    is_alone = False
    divisible = False

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._modules = modules

    def after_dry_run(self) -> None:
        """Release the parameters."""
        for module in self._modules:
            module.reshard()


class PartlyReplicated(NotShared):
    """Parts of the stage are ``DistributedDataParallel``, or it is the composable ``replicate`` around it.

    Averages are made here, after the last backward of a step.
    """

    is_alone = False
    is_loud = True

    def __init__(self, adapter: DataParallel) -> None:
        self._adapter = adapter

    def silent(self) -> AbstractContextManager[Any]:
        """Share nothing, from the first forward of a step on."""
        self._adapter.begin()
        return nullcontext()

    def backward(self, kind: str, run: Callable[[], Any], outputs: Any, last: bool) -> Any:  # noqa: ARG002
        """Run it; average gradients if it is the last."""
        result = run()
        if last and kind != "input":
            self._adapter.reduce()
            self._adapter.finish()
            self._adapter.end()
        return result

    def after_dry_run(self) -> None:
        """Share again."""
        self._adapter.end()

    def forget(self) -> None:
        """Share again."""
        self._adapter.end()


class _InStage(FsdpAdapter):
    """Without a say in what happens after a forward: that is how the user has wrapped the module."""

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._modules = modules
        self._gathers = []
        self._due = False

    def drop_gradients(self) -> None:
        """Forget what has been added up and not been shared."""
        for state in self._states():
            for parameter in [one for group in state._fsdp_param_groups for one in group.fsdp_params]:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # brought together at least once
                    parameter._unsharded_param.grad = None
