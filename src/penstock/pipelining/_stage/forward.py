"""Runs the forward of a stage for one microbatch."""

from __future__ import annotations

from typing import Any

import torch

from penstock.pipelining._debug import map_debug_info
from penstock.pipelining._stage.sharing import check_unmodified, watch
from penstock.pipelining._stage.training_check import TrainingCheck
from penstock.pipelining._stage.transfers import _normalize_model_output_as_tuple
from penstock.pipelining._utils import (
    PipeliningMetadataError,
    TensorMeta,
    flatten_args,
    validate_tensors_metadata,
)


class StageForward(TrainingCheck):
    """A stage that runs its module."""

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the module for a microbatch.

        Args:
            fwd_chunk_id: the microbatch.
            args: what the first stage is called with; the others take what they have received.
            kwargs: further arguments, for any stage.
            save_forward_output: whether the last stage keeps what it returns in ``output_chunks``.

        Returns:
            What the module returns.
        """
        if not self.is_first:
            args = self._retrieve_recv_activations(fwd_chunk_id)
        kwargs = kwargs or {}
        if self._runtime_validate:
            self._validate_stage_tensors(
                f"Stage {self.stage_index} forward inputs", self._metas_of(fwd_chunk_id).inputs, args
            )
        watched = watch(args, self._shared_inputs) if self._shared_inputs and not self.is_first else ()
        try:
            output = (self.submod if self._is_plain else self.forward_maybe_with_nosync)(*args, **kwargs)
        except Exception as error:
            raise self._forward_failure(fwd_chunk_id, args, kwargs, error) from error
        if watched:
            check_unmodified(watched, self.stage_index, fwd_chunk_id)
        outputs = _normalize_model_output_as_tuple(output)
        is_last = self.is_last
        if is_last and save_forward_output:
            self._keep_output(fwd_chunk_id, output)
        if self._runtime_validate and not is_last:
            self._validate_stage_tensors(
                f"Stage {self.stage_index} forward outputs", self._metas_of(fwd_chunk_id).outputs, outputs
            )
        self._keep(fwd_chunk_id, args, kwargs, outputs)
        return output

    def _keep_output(self, microbatch: int, output: Any) -> None:
        self.output_chunks.append(output)
        self._output_microbatches.append(microbatch)

    def _order_outputs(self) -> None:
        """Put the outputs of a step in the order of its microbatches, in which an order may not have run them."""
        numbers = self._output_microbatches
        if len(numbers) == len(self.output_chunks) and any(map(int.__gt__, numbers, numbers[1:])):
            places = sorted(range(len(numbers)), key=numbers.__getitem__)
            self.output_chunks[:] = [self.output_chunks[place] for place in places]
            numbers.sort()

    def _keep(self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Any, ...]) -> None:
        """Keep what a backward begins and ends with.

        Outputs that nothing can be differentiated of are kept only to be sent.
        """
        if self._has_backward or torch.is_grad_enabled() or not (self.is_last or self._is_next_local()):
            self.fwd_cache[microbatch] = outputs, flat(args, kwargs)
            if kwargs:
                self._by_keyword[microbatch] = len(flatten_args(kwargs))

    def _is_next_local(self) -> bool:
        """Whether the next stage is on this rank, and takes the outputs as they are."""
        rank_of: dict[int, int] = getattr(self, "stage_index_to_group_rank", {})
        return rank_of.get(self.stage_index + 1) == getattr(self, "group_rank", None)

    def _forward_failure(
        self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> RuntimeError:
        return RuntimeError(
            f"{self.log_prefix} failed to run forward of microbatch {microbatch}: {type(error).__name__}: "
            f"{error}\nargs: {map_debug_info(args)}\nkwargs: {map_debug_info(kwargs)}"
        )

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; one whose gradients are reduced over replicas does not prepare for it in this microbatch."""
        parallel = self._parallel
        if parallel is None:
            return self.submod(*args, **kwargs)
        with parallel.forward():
            return self.submod(*args, **kwargs)

    def _validate_stage_tensors(
        self, desc: str, expected: tuple[TensorMeta | None, ...] | None, actual: tuple[Any, ...]
    ) -> None:
        if expected is None:
            raise PipeliningMetadataError(f"{desc}: no metadata available to compare with")
        validate_tensors_metadata(desc, expected, actual)


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """List all that a module is called with, without the containers that it comes in."""
    for value in args:
        if not isinstance(value, torch.Tensor):
            break
    else:
        return [*args, *flatten_args(kwargs)] if kwargs else list(args)
    return [*flatten_args(args), *flatten_args(kwargs)]
