"""Splits the batch of a step into microbatches, and merges their outputs."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from penstock.pipelining._schedule.upstream_names import upstream_names
from penstock.pipelining._stage.sharded_batch import (
    check_same_sharding,
    check_samples,
    count_samples,
    has_dtensors,
    restore_order,
)

if TYPE_CHECKING:
    from penstock.pipelining._stage.sharded_batch import Samples
    from penstock.pipelining.microbatch import TensorChunkSpec


#: What ``step`` takes besides the arguments of the model, for batches that are split already.
_SPLIT = ("arg_mbs", "kwarg_mbs", "target_mbs")


class ScheduleMicrobatches:
    """A schedule that splits batches."""

    scale_grads: bool
    _n_microbatches: int
    _has_backward: bool
    _args_chunk_spec: tuple[TensorChunkSpec, ...] | None
    _kwargs_chunk_spec: dict[str, TensorChunkSpec] | None
    _output_merge_spec: dict[str, Any] | tuple[Any] | None
    #: What all microbatches of the step that begins are called with.
    _next_microbatches: tuple[list[Any], list[Any]] = ([], [])
    #: The batch of the step that begins, and the target, if they are not split yet.
    _whole: tuple[Any, Any, Any] | None = None
    #: The samples of the batch for which stages were prepared; None if the user split it.
    _batch_samples: Samples | None = None
    #: Whether DTensors go into or out of a stage of this rank.
    _has_dtensors = False

    def _microbatches_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[list[Any] | None, list[Any] | None, list[Any] | None]:
        """Split what ``step`` is given; return the arguments, keyword arguments and targets of each microbatch."""
        self._whole = None
        if kwargs:
            split = {name: kwargs.get(name) for name in _SPLIT}
            kwargs = {name: value for name, value in kwargs.items() if name not in _SPLIT}
            if any(value is not None for value in split.values()):
                _check_split(split, args, kwargs, target)
                return split["arg_mbs"], split["kwarg_mbs"], split["target_mbs"]
        arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
        self._whole = args, kwargs, target
        if target is None:
            return arg_mbs, kwarg_mbs, None
        names = upstream_names()
        targets = list(names._split_tensor(target, names._TARGET_CHUNK_SPEC, self._n_microbatches))
        if self._has_backward and self.scale_grads:
            _warn_of_sizes(targets)
        return arg_mbs, kwarg_mbs, targets

    def _split_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[list[Any], list[Any]]:
        """Split the arguments; into empty ones where the rank has no first stage."""
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        chunks: tuple[list[Any], list[Any]] = upstream_names().split_args_kwargs_into_chunks(
            args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec
        )
        return chunks

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """Merge the outputs of all microbatches; along dimension 0 by default."""
        merged = upstream_names().merge_chunks(output_chunks, self._output_merge_spec)
        batch = self._batch_samples
        if batch is None or (batch.is_whole and not has_dtensors(merged)):
            return merged
        return restore_order(merged, self._output_merge_spec, batch, self._n_microbatches)

    def _check_inputs(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Check what a step was given; return the arguments of each microbatch, empty ones if there are none."""
        for name, given in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
            if given is not None and not isinstance(given, list):
                raise TypeError(f"{name} must be a list but got a {type(given)}")
            if given is not None and len(given) != self._n_microbatches:
                raise ValueError(
                    f"Expecting {self._n_microbatches} {name} but got {len(given)}: a batch needs at least one sample "
                    "for each microbatch"
                )
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list but got a {type(losses)}")
        arg_mbs = [()] * self._n_microbatches if arg_mbs is None else arg_mbs
        kwarg_mbs = [{}] * self._n_microbatches if kwarg_mbs is None else kwarg_mbs
        return arg_mbs, kwarg_mbs

    def _count_samples(self) -> dict[str, Samples]:
        """Count the samples of what this rank splits, the batch first."""
        if self._whole is None:
            return {}
        specs = self._args_chunk_spec, self._kwargs_chunk_spec, upstream_names()._TARGET_CHUNK_SPEC
        named = zip(("args", "kwargs", "target"), self._whole, specs, strict=True)
        return {place: samples for each in named for place, samples in count_samples(*each).items()}

    def _check_later_samples(self, stages: list[Any]) -> None:
        """Hold the batch of a later step to what ranks agreed on; without DTensors samples have one order."""
        agreed = self._batch_samples
        target = None if self._whole is None else self._whole[2]
        if not self._has_dtensors and (agreed is None or agreed.is_whole) and not has_dtensors(target):
            return
        counts = self._count_samples()
        if any(stage.is_first for stage in stages):
            check_same_sharding(next(iter(counts.values()), None), agreed)
        check_samples(counts, agreed, self._n_microbatches)


def _check_split(split: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> None:
    """Check that a step is given microbatches and nothing else, in the form in which a stage is called with them."""
    if args:
        raise ValueError(f"{len(args)} arguments are not split; pass pre-split positional inputs through arg_mbs")
    if kwargs:
        raise ValueError(f"Unexpected keyword arguments with pre-split inputs: {', '.join(kwargs)}; use kwarg_mbs")
    if target is not None:
        raise ValueError("target is not split; pass pre-split targets through target_mbs")
    for name, kind in (("arg_mbs", tuple), ("kwarg_mbs", dict)):
        for index, value in enumerate(split[name] if isinstance(split[name], list) else ()):
            if not isinstance(value, kind):
                raise TypeError(
                    f"{name} must be a list of {kind.__name__}s, but that of microbatch {index} is a "
                    f"{type(value).__qualname__}"
                )


def _warn_of_sizes(targets: list[Any]) -> None:
    """Warn if sizes differ: microbatches count alike, so the mean of their means is not that of the batch."""
    sizes = [one.shape[0] if isinstance(one, torch.Tensor) else len(one) for one in targets]  # len takes much longer
    if len(set(sizes)) > 1:
        warnings.warn(
            f"microbatches have {', '.join(map(str, sizes))} samples but equal weight, because gradients are divided "
            "by the number of microbatches; with a mean loss they differ from the whole batch's. Use an evenly "
            "divisible batch, or a sum loss with scale_grads=False",
            stacklevel=5,
        )
