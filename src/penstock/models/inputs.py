"""Makes a tiny batch to probe a text model with, for models that say what they take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from penstock.errors import SplitError

#: The positional and the keyword arguments of a call.
Example = tuple[tuple[Any, ...], dict[str, Any]]

_SAMPLES: Final = 2
_TOKENS: Final = 7
_FREE: Final = frozenset(
    {"attention_mask", "decoder_attention_mask", "position_ids", "token_type_ids", "num_items_in_batch"}
)


def checked_example(example: Any) -> Example:
    """Return ``(args, kwargs)`` of an example: of a tensor, the call with it; of a dictionary, that with its keywords.

    >>> checked_example({"x": 1})
    ((), {'x': 1})
    >>> checked_example([1, 2])
    Traceback (most recent call last):
        ...
    penstock.errors.SplitError: example= must be (args, kwargs), a tuple and a dict, got list; write e.g. \
example=((x,), {}) for model(x), or example=((), {"x": x}) for model(x=x)
    """
    match example:
        case torch.Tensor():
            return (example,), {}
        case (tuple() as args, Mapping() as kwargs) if all(isinstance(name, str) for name in kwargs):
            return args, dict(kwargs)
        case Mapping() if all(isinstance(name, str) for name in example):
            return (), dict(example)
    is_tuple = isinstance(example, tuple)
    got = f"({', '.join(type(part).__name__ for part in example)})" if is_tuple else type(example).__name__
    raise SplitError(
        f"example= must be (args, kwargs), a tuple and a dict, got {got}; write e.g. "
        'example=((x,), {}) for model(x), or example=((), {"x": x}) for model(x=x)'
    )


def example_for(model: nn.Module) -> Example | None:
    """Return ``(args, kwargs)`` for a Hugging Face text model, with labels if it takes them; None for other models."""
    config = getattr(model, "config", None)
    parameters = inspect.signature(model.forward).parameters
    if config is None or getattr(model, "main_input_name", None) != "input_ids" or "input_ids" not in parameters:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int):
        return None
    limit = getattr(text, "max_position_embeddings", None)
    tokens = min(_TOKENS, limit) if isinstance(limit, int) and limit > 0 else _TOKENS
    ids = _tokens(text, vocabulary, tokens)
    kwargs: dict[str, Any] = {"input_ids": ids}
    if "labels" in parameters:
        kwargs["labels"] = _labels(model, config, ids)
    elif "decoder_input_ids" in parameters:
        kwargs["decoder_input_ids"] = ids.clone()
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))
    return (), {name: value.to(device) for name, value in kwargs.items()}


def free_keywords(model: nn.Module) -> frozenset[str]:
    """Return the keyword arguments that may come and go with any value.

    Hugging Face models turn them into masks and positions, which every stage computes, or pass them to the loss.
    """
    is_known = hasattr(model, "config") and hasattr(model, "main_input_name")
    return _FREE if is_known else frozenset()


def _tokens(config: Any, vocabulary: int, tokens: int) -> torch.Tensor:
    """Return different tokens, none of them a special one if that is possible."""
    special = {value for name, value in vars(config).items() if name.endswith("token_id") and isinstance(value, int)}
    usual = [token for token in range(min(vocabulary, 256)) if token not in special] or [0]
    chosen = [usual[(5 * number + 3) % len(usual)] for number in range(_SAMPLES * tokens)]
    return torch.tensor(chosen).view(_SAMPLES, tokens)


def _labels(model: nn.Module, config: Any, ids: torch.Tensor) -> torch.Tensor:
    name = type(model).__name__
    classes = max(getattr(config, "num_labels", 2) or 2, 1)
    if name.endswith(("SequenceClassification", "MultipleChoice", "NextSentencePrediction")):
        return torch.arange(_SAMPLES) % classes
    if name.endswith("TokenClassification"):
        return ids % classes
    # Different lengths, so that an encoder's sizes are not taken for a decoder's.
    return ids[:, : max(ids.shape[1] - 2, 1)].clone() if getattr(config, "is_encoder_decoder", False) else ids.clone()
