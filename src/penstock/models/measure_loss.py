"""Measures what the loss of a Hugging Face model is a mean over: the names of its classes do not say that reliably."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.execution.preserved_state import preserved_state
from penstock.models.loss import IGNORED, LABELS, SAMPLES, SHIFTED, UNKNOWN, WEIGHTS, loss_of
from penstock.models.model_source import examination
from penstock.models.modes import preserved_modes
from penstock.models.tree_copy import copy_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

#: How close a loss has to come to the mean of others, as a part of the distance between the possible means.
_NEAR: Final = 0.25
_CLASSIFIERS: Final = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def measure_loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Find out what the loss of a model is a mean over.

    Args:
        model: the model, in any mode; it may be on the meta device.
        args: the positional arguments of a small call.
        kwargs: its keyword arguments.

    Returns:
        One of the keys of ``WEIGHTS``; None if the model is not a Hugging Face model or is not given labels.
    """
    labels = kwargs.get("labels")
    is_hugging_face = getattr(model, "config", None) is not None and "loss_function" in dir(type(model))
    if not is_hugging_face or not isinstance(labels, torch.Tensor):
        return None
    is_classifier = type(model).__name__.endswith(_CLASSIFIERS)
    if labels.is_floating_point() or (labels.dim() == 1 and len(labels) == 1):  # of which none can be left out
        return SAMPLES if is_classifier else UNKNOWN
    with examination(model), preserved_state(model, labels.device), preserved_modes(model), torch.no_grad():
        model.eval()
        try:
            return _measure(copy_tree(model), args, kwargs, labels)
        except Exception:  # a loss that takes no ignored labels
            return UNKNOWN


def _measure(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], labels: torch.Tensor) -> str:
    """Compare the loss of some labels with the losses of two parts of them.

    With two labels in one part, the first of which a causal model would leave out, and one in the other, the loss of
    all is (2a + b) / 3 or (a + b) / 2. Anything that is added to the loss and does not depend on labels cancels out.
    """
    valid = labels[labels != IGNORED]
    filled = torch.where(labels == IGNORED, valid[0] if len(valid) else 0, labels)
    parts: list[list[int]]
    if labels.dim() == 1:
        parts, kinds = [[0], [1]], [SAMPLES]
    elif labels.dim() == 2 and labels.shape[1] > 2:
        parts, kinds = [[0, 1], [2]], [LABELS, SHIFTED]
        if "decoder_input_ids" in inspect.signature(model.forward).parameters:  # or they depend on the labels
            kwargs = {"decoder_input_ids": filled, **kwargs}
    else:
        return UNKNOWN
    for row in range(len(labels) if labels.dim() == 2 else 1):
        targets = [_only(filled, row, places) for places in (*parts, parts[0] + parts[1])]
        losses = [loss_of(model(*args, **{**kwargs, "labels": target})) for target in targets]
        rounding = 4 * torch.finfo(losses[-1].dtype).eps * abs(float(losses[-1]))
        found = _fitting(kinds, [float(loss) for loss in losses], targets, rounding)
        if found is not None:
            return found
    return UNKNOWN


def _only(labels: torch.Tensor, row: int, places: list[int]) -> torch.Tensor:
    """Return labels that are ignored except in some places, of one row if there are several."""
    result = torch.full_like(labels, IGNORED)
    kept, given = (result[row], labels[row]) if labels.dim() == 2 else (result, labels)
    kept[places] = given[places]
    return result


def _fitting(
    kinds: Sequence[str], losses: Sequence[float], targets: Sequence[torch.Tensor], rounding: float
) -> str | None:
    """Return the kind of mean that the last loss is, of those before; None if none fits or several do."""
    means = {}
    for kind in kinds:
        weights = [float(WEIGHTS[kind](target)) for target in targets]
        means[kind] = sum(weight * loss for weight, loss in zip(weights[:2], losses[:2], strict=True)) / weights[2]
    others = [*means.values()] if len(kinds) > 1 else [*means.values(), losses[0] + losses[1]]
    distance = max(others) - min(others)
    if distance * _NEAR < rounding:
        return None
    near = [kind for kind, mean in means.items() if abs(mean - losses[2]) <= _NEAR * distance]
    return near[0] if len(near) == 1 else None
