"""Runs stages under ``fully_shard``, or the ``replicate`` built on it.

torch's own reduction runs once for all backwards of a step. What it does at the end of a backward is called from here,
because its hooks do not see W; everything else uses its public setters.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from penstock.execution.autograd import shares_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.fsdp import FSDPModule, UnshardHandle


class FsdpAdapter:
    """Adapts modules under ``fully_shard``, or the ``replicate`` built on it: the stage itself, or parts of it."""

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
        """Stop the modules from reducing gradients and resharding parameters."""
        self._due = True
        for module in self._modules:
            module.set_is_last_backward(False)
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)

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
        self._arrive()
        for module in self._modules:
            module.reshard()

    def weight_backward(self, run: Callable[[], None]) -> None:
        """Wait for the parameters, and accumulate gradients in the type in which they are reduced."""
        self._arrive()
        run()
        if self._reduces_in_another_type():
            self._run_post_backward()

    def own_gradients(self) -> None:
        """Give the gradient of every gathered parameter its own memory."""
        for state in self._states():
            for parameter in [one for group in state._fsdp_param_groups for one in group.fsdp_params]:
                together = getattr(parameter, "_unsharded_param", None)  # once it has been gathered
                if together is not None and type(together.grad) is torch.Tensor and shares_storage(together.grad):
                    together.grad = together.grad.clone()

    def reduce(self) -> None:
        """Start to reduce the gradients."""
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
        """Let the modules reduce gradients and reshard parameters again."""
        self._gathers = []
        for module in self._modules:
            module.set_is_last_backward(True)
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)

    def _arrive(self) -> None:
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
