"""Splits batches into microbatches: what this rank needs of each, and how many samples there are.

How a batch is split depends on its form alone: which tensors it has, and their shapes. Usually that is the same in
every step, so it is found once, and later batches of the same form are only split.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.errors import MicrobatchError
from penstock.execution.microbatches.spec_tree import leaf_specs
from penstock.execution.microbatches.specs import splitter_of
from penstock.execution.microbatches.split import feasible_count, is_presplit, samples, split_call, split_leaf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.execution.microbatches.specs import Spec

    #: Arguments, keyword arguments, target.
    Call = tuple[tuple[Any, ...], dict[str, Any], Any]


class Counts(NamedTuple):
    """How many samples the microbatches have.

    Attributes:
        samples: by the arguments of the first stage, if they are here and may vary.
        targets: by the target, if it has to have as many.
        known: by what this rank has.
    """

    samples: Sequence[int] | None
    targets: Sequence[int] | None
    known: Sequence[int] | None


class Batch(NamedTuple):
    """A batch in microbatches.

    Attributes:
        args: the positional arguments of each.
        kwargs: the keyword arguments of each.
        targets: the target of each.
        counts: how many samples each has.
        form: equal for batches that are split the same way; None if unknown.
    """

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any]
    counts: Counts
    form: Any = None


class _Known(NamedTuple):
    """How batches of a form are split: a spec for each tensor; and their counts."""

    form: Any
    args: list[Spec]
    target: Spec
    counts: Counts


class Batches:
    """Splits batches.

    Args:
        rank: this rank.
        first: whether the first stage is here, which gets the arguments.
        last: whether the last stage is here, which gets the target.
        microbatches: how many microbatches there are.
        specs: how arguments (``args_spec``), keyword arguments (``kwargs_spec``) and target (``target_spec``) split.
    """

    def __init__(self, rank: int, *, first: bool, last: bool, microbatches: int, specs: Mapping[str, Spec]) -> None:
        self._rank = rank
        self._first = first
        self._last = last
        self._microbatches = microbatches
        self.specs = deepcopy(specs)  # how batches are split must not change
        self._known: _Known | None = None

    def of_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, varying: bool) -> Batch:
        """Split the batch of a step. ``varying``: whether samples may vary from step to step."""
        call = self._mine(args, kwargs, target)
        form = _form(*call, varying)
        if form is not None and self._known is not None and self._known.form == form:
            return self._cut_alike(call, self._known)
        specs = self._specs_of(*call)
        split = split_call(*call, self._microbatches, **specs)
        counts = self._counts(call, split, specs, varying=varying)
        if form is not None:
            self._known = _Known(
                form,
                leaf_specs(specs["args_spec"], call[0], len(call[0]), "args"),
                leaf_specs(specs["target_spec"], call[2], 1, "target")[0],
                counts,
            )
        return Batch(*split, counts, form)

    def of_evaluation(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Batch:
        """Split the batch of an evaluation, into as many microbatches as it can have."""
        call = self._mine(args, kwargs, target)
        specs = self._specs_of(*call)
        split = split_call(*call, feasible_count(*call, self._microbatches, **specs), **specs)
        return Batch(*split, self._counts(call, split, specs, varying=True))

    def _cut_alike(self, call: Call, known: _Known) -> Batch:
        args, _, target = call
        count = self._microbatches
        columns = [split_leaf(tensor, spec, count) for tensor, spec in zip(args, known.args, strict=True)]
        return Batch(
            list(zip(*columns, strict=True)) if columns else [()] * count,
            [{} for _ in range(count)],
            [None] * count if target is None else list(split_leaf(target, known.target, count)),
            known.counts,
            known.form,
        )

    def _mine(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Call:
        """Select what to split: what this rank needs."""
        if self._first and not args and not kwargs:
            raise MicrobatchError(f"rank {self._rank} has the first stage; call step with its arguments", name="args")
        return args if self._first else (), kwargs, target if self._last else None

    def _specs_of(self, args: Any, kwargs: Any, target: Any) -> dict[str, Any]:
        """Select the specs of what this rank has; they are given for all ranks."""
        given = {"args_spec": bool(args), "kwargs_spec": bool(kwargs), "target_spec": target is not None}
        return {name: self.specs[name] if there else None for name, there in given.items()}

    def _counts(self, call: Call, split: tuple[Any, Any, Any], specs: Mapping[str, Spec], *, varying: bool) -> Counts:
        """Count the samples in each microbatch, by what this rank has; of the arguments only if they vary."""
        args, kwargs, target = call
        known = samples(kwargs, split[1], specs["kwargs_spec"]) if kwargs else None
        if args and varying:
            known = samples(args, split[0], specs["args_spec"]) or known
        of_targets = None if target is None else samples(target, split[2], specs["target_spec"])
        comparable = of_targets is not None and not is_presplit(target)
        return Counts(
            known if self._first and varying else None, of_targets if comparable else None, of_targets or known
        )


def _form(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, varying: bool) -> Any:
    """Find the form of a batch, which decides how it is split; None for one with nested tensors."""
    tensors = args if target is None else (*args, target)
    if kwargs or splitter_of(torch.Tensor) is not None:
        return None
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return None
    return varying, target is None, [(tensor.shape, tensor.dtype) for tensor in tensors]
