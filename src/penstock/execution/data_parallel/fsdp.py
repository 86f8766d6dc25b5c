"""Runs stages under ``fully_shard``, or the ``replicate`` built on it.

torch's own reduction runs once for all backwards of a step. What it does at the end of a backward is called from here,
because its hooks do not see W; everything else uses its public setters. All that depends on private names of torch's
FSDP is here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

import torch

from penstock.execution.autograd import shares_storage
from penstock.execution.data_parallel.adapter import DataParallel
from penstock.execution.distributed_tensors import is_distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule, UnshardHandle

    from penstock.execution.data_parallel.adapter import BackwardKind, T


class FsdpPartsAdapter(DataParallel):
    """Lets ``fully_shard`` around parts of a stage reduce gradients in every backward, which must be whole."""

    splits_backward = False

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._modules = modules

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups that hold shards, or replicas of them."""
        return _groups(self._modules)

    def reshard(self) -> None:
        """Release the parameters."""
        for module in self._modules:
            module.reshard()


class FsdpAdapter(DataParallel):
    """Has ``fully_shard``, or the ``replicate`` built on it, reduce once for all backwards of a step.

    Args:
        modules: the stage itself, or parts of it.
        reshard_after_forward: who decides whether a forward releases the parameters: the schedule, in which case it
            does not, or the user who wrapped the modules.
    """

    def __init__(self, modules: Sequence[FSDPModule], *, reshard_after_forward: Literal["schedule", "user"]) -> None:
        self._modules = modules
        self._gathers: list[UnshardHandle] = []
        self._has_begun = False
        self._is_due = False
        if reshard_after_forward == "user":
            return
        replicated: Any = getattr(
            sys.modules.get("torch.distributed._composable.replicate_with_fsdp"), "ReplicateModule", ()
        )
        for module in modules:
            if not isinstance(module, replicated):
                module.set_reshard_after_forward(False, recurse=False)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups that hold shards, or replicas of them."""
        return _groups(self._modules)

    def begin_step(self) -> None:
        """Stop the modules from reducing gradients, and from resharding parameters after a backward."""
        self._has_begun = self._is_due = True
        for module in self._modules:
            module.set_is_last_backward(False)
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)

    def run_backward(self, kind: BackwardKind, run: Callable[[], T], *, outputs: Any = None, last: bool = False) -> T:  # noqa: ARG002
        """Run it, and give every gradient memory of its own. The hooks of the modules do not see a W."""
        if not self._has_begun:
            self.begin_step()
        if kind == "weight":
            self._await_parameters()
        result = run()
        self._unshare_gradients()
        if kind == "weight" and self._reduces_in_another_type():  # in which gradients are added up
            self._run_post_backward()
        return result

    def unshard(self) -> None:
        """Start to gather the parameters; the next forward or backward waits for them."""
        if torch.is_inference_mode_enabled():
            # Parameters are created when first gathered; created in inference mode, they could not be trained.
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
        self._await_parameters()
        for module in self._modules:
            module.reshard()

    def reduce(self) -> None:
        """Start to reduce the gradients."""
        if not self._has_begun:  # a user's function may have run the backwards
            self.begin_step()
        if not self._is_due:
            return
        self._is_due = False
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
        self._run_post_backward()
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)

    def finish_step(self) -> None:
        """Wait for the gradients, and release the parameters."""
        if torch.is_grad_enabled():
            for module in self._modules:
                module.set_is_last_backward(True)
            self._run_post_backward()
        self.reshard()

    def end_step(self) -> None:
        """Let the modules reduce gradients and reshard parameters again."""
        self._gathers = []
        if not self._has_begun:
            return
        self._has_begun = self._is_due = False
        for module in self._modules:
            module.set_is_last_backward(True)
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)

    def drop_gradients(self) -> None:
        """Drop gradients of gathered parameters that are not reduced yet."""
        for parameter in self._parameters():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # gathered at least once
                parameter._unsharded_param.grad = None

    def _unshare_gradients(self) -> None:
        """Give every gathered parameter a gradient in memory of its own; the stage does not see all of them."""
        for parameter in self._parameters():
            gathered = getattr(parameter, "_unsharded_param", None)  # once it has been gathered
            if gathered is not None and type(gathered.grad) is torch.Tensor and shares_storage(gathered.grad):
                gathered.grad = gathered.grad.clone()

    def _parameters(self) -> Iterator[Any]:
        """Get what torch keeps of each parameter."""
        for state in self._states():
            for group in state._fsdp_param_groups:
                yield from group.fsdp_params

    def _await_parameters(self) -> None:
        """Wait for parameters in flight."""
        for handle in self._gathers:
            handle.wait()
        self._gathers = []

    def _states(self) -> list[Any]:
        """Get torch's state of each module; several modules may share one."""
        return list({id(state): state for state in (module._get_fsdp_state() for module in self._modules)}.values())

    def _run_post_backward(self) -> None:
        """Run torch's post-backward: it may accumulate gradients, reduce them, or wait for them."""
        for state in self._states():
            if state._is_root:
                state._root_post_backward_final_callback()

    def _reduces_in_another_type(self) -> bool:
        """Whether gradients accumulate in a type other than their own: then W must not add in place."""
        return any(state._mp_policy.reduce_dtype is not None for state in self._states())


def _groups(modules: Sequence[Any]) -> tuple[dist.ProcessGroup, ...]:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    meshes = {parameter.device_mesh for parameter in parameters if is_distributed(parameter)}
    return tuple(dict.fromkeys(mesh.get_group(dimension) for mesh in meshes for dimension in range(mesh.ndim)))
