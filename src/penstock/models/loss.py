"""Defines the loss as a model itself computes it, and what it is a mean over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

#: Labels with this value are left out of the mean, as in torch's cross entropy.
IGNORED = -100


class ModelLoss(NamedTuple):
    """The loss that a model computes when it is given labels.

    Attributes:
        loss_fn: takes the output of the model and the labels, and returns the loss of a microbatch.
        reduction: how losses of microbatches make up that of the batch: ``"weighted"`` or ``"mean"``.
        weight: takes labels, and returns what the loss of a microbatch is a mean over: how many of them count.
        target: the keyword argument that holds the labels.
        replace: takes the merged output of the microbatches and the loss of the batch, and puts it in its place.
    """

    loss_fn: Callable[..., torch.Tensor]
    reduction: str
    weight: Callable[[torch.Tensor], torch.Tensor] | None
    target: str
    replace: Callable[[Any, torch.Tensor], Any]


def model_loss(kind: str | None) -> ModelLoss | None:
    """Return the loss of a model that computes it from ``labels``; None for any other model.

    Args:
        kind: what the loss is a mean over, as ``measure_loss`` finds it. For ``UNKNOWN`` there is no weight, so a
            pipeline asks for one.
    """
    return None if kind is None else ModelLoss(loss_of, "weighted", WEIGHTS.get(kind), "labels", replace_loss)


def loss_of(output: Any, *_: Any) -> torch.Tensor:
    """Return the loss in a model's output."""
    loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output[0]
    return loss


def replace_loss(output: Any, loss: torch.Tensor) -> Any:
    """Return a merged output with the loss of the batch in place of the losses of its microbatches.

    >>> replace_loss((torch.tensor([1.0, 3.0]), torch.zeros(2)), torch.tensor(2.0))
    (tensor(2.), tensor([0., 0.]))
    """
    if not isinstance(loss_of(output), torch.Tensor):
        return output  # an output_spec keeps the losses separate
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output["loss"] = loss
    return output


def count_shifted(labels: torch.Tensor, *_: Any) -> torch.Tensor:
    """Count the labels that a causal model is trained on.

    >>> count_shifted(torch.tensor([[5, 6, -100, 7]]))
    tensor(2)
    """
    return (labels[..., 1:] != IGNORED).sum()


def count_labels(labels: torch.Tensor, *_: Any) -> torch.Tensor:
    """Count the labels that are not left out.

    >>> count_labels(torch.tensor([[5, 6, -100, 7]]))
    tensor(3)
    """
    return (labels != IGNORED).sum()


def count_samples(labels: torch.Tensor, *_: Any) -> torch.Tensor:
    """Count the samples; a class may be left out, a number or a set of classes may not.

    >>> count_samples(torch.tensor([1, -100, 2])), count_samples(torch.tensor([0.5, -100.0]))
    (tensor(2), tensor(2))
    """
    return torch.tensor(len(labels)) if labels.is_floating_point() else count_labels(labels)


#: What a loss is a mean over: the labels after the first of each sequence, all labels, or samples.
SHIFTED: Final = "shifted"
LABELS: Final = "labels"
SAMPLES: Final = "samples"
UNKNOWN: Final = "unknown"
WEIGHTS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    SHIFTED: count_shifted,
    LABELS: count_labels,
    SAMPLES: count_samples,
}
