"""Defines the loss as a model itself computes it, and what it is a mean over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

#: Labels with this value are left out of the mean, as in torch's cross entropy.
IGNORED = -100


class ModelLoss(NamedTuple):
    """The loss that a model computes when it is given labels.

    Attributes:
        loss_fn: takes the output of the model and the labels, and returns the loss of a microbatch.
        reduction: how losses of microbatches make up that of the batch: ``"weighted"`` or ``"mean"``.
        weight: takes labels, and returns what the loss of a microbatch is a mean over: how many of them count.
        target: the keyword argument that holds the labels.
    """

    loss_fn: Callable[..., torch.Tensor]
    reduction: str
    weight: Callable[[torch.Tensor], torch.Tensor] | None
    target: str


def model_loss(model: nn.Module) -> ModelLoss | None:
    """Return the loss of a Hugging Face model that takes ``labels``; None for any other model.

    Causal models compare a label with the output before it, so the first label of each sequence does not count.
    """
    kind = _kind(model)
    if kind is None:
        return None
    weight = {"shifted": count_shifted, "labels": count_labels, "samples": count_samples}[kind]
    return ModelLoss(loss_of, "weighted", weight, "labels")


def loss_of(output: Any, *_: Any) -> torch.Tensor:
    """Return the loss in a model's output."""
    loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output[0]
    return loss


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
    """Count the samples.

    >>> count_samples(torch.tensor([1, 0, 2]))
    tensor(3)
    """
    return torch.tensor(len(labels))


def _kind(model: nn.Module) -> str | None:
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or "loss_function" not in dir(type(model)):
        return None
    if name.endswith(("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")):
        return "samples"
    if getattr(config, "is_encoder_decoder", False) and name.endswith("ForConditionalGeneration"):
        return "labels"
    if name.endswith(("ForMaskedLM", "ForTokenClassification")):
        return "labels"
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return "shifted"
    return None
