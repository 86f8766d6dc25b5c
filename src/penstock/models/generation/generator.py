"""Says how a split model generates tokens, or why it cannot."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.models.generation.stage_cache import CACHE, StageCache, check_layers
from penstock.models.weights.pretrained import is_pretrained

if TYPE_CHECKING:
    from penstock.models.split import Split

_IDS: Final = "input_ids"
#: What a text model may have been split with: whatever else it needs, ``generate`` does not pass.
_TEXT: Final = frozenset({_IDS, "labels", "attention_mask", "position_ids", "token_type_ids"})
#: Settings of a model's own ``generate`` that are read here, or that choose between ways of doing the same.
_READ: Final = frozenset(
    {"bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p"}
    | {"max_length", "max_new_tokens", "use_cache", "transformers_version", "cache_implementation"}
    | {"output_attentions", "output_hidden_states", "return_dict_in_generate", "num_return_sequences"}
)


class Generator(NamedTuple):
    """How a split model generates tokens.

    Attributes:
        config: its configuration.
        takes: the keyword arguments of its forward.
        ids_by_position: whether it was split with its tokens as a positional argument, which the first stage gets.
        vocabulary: how many tokens it knows.
        longest: how many positions it has an embedding for; None if there is no limit.
        ends: the tokens that end a sequence.
        padding: the token that follows.
        ignored: settings of its own ``generate`` that have no effect here, as text.
    """

    config: Any
    takes: frozenset[str]
    ids_by_position: bool
    vocabulary: int
    longest: int | None
    ends: tuple[int, ...]
    padding: int | None
    ignored: tuple[str, ...]

    @classmethod
    def of(cls, split: Split) -> Generator:
        """Find out how the model of a split generates.

        Raises:
            SplitError: it is not a decoder of transformers whose layers keep keys and values.
        """
        model: Any = split.model
        takes = _check_model(model)
        _check_example(split)
        record = split.description.record
        settings = None if split.configuration is None else split.configuration.generation
        vocabulary = model.get_input_embeddings().num_embeddings
        ends = _numbers(getattr(settings, "eos_token_id", None))
        padding = getattr(settings, "pad_token_id", None)
        return cls(
            model.config,
            takes,
            bool(record is not None and record.positional),
            vocabulary,
            _longest(model, vocabulary),
            ends,
            ends[0] if padding is None and ends else padding,
            _ignored(settings),
        )

    def new_cache(self, module: nn.Module) -> StageCache:
        """Make the cache of a stage for some sequences."""
        return StageCache(self.config, module)

    def call(
        self, stage: int, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: StageCache
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Return what a stage is called with, beside the values that it receives.

        Args:
            stage: the stage.
            ids: the new tokens.
            mask: which tokens count, of those in the cache and the new ones; None if all do.
            positions: those of the new tokens, without padding.
            cache: that of the stage.
        """
        kwargs: dict[str, Any] = {CACHE: cache.cache, "use_cache": True, "return_dict": True}
        args: tuple[torch.Tensor, ...] = ()
        if not self.ids_by_position:
            kwargs[_IDS] = ids
        elif stage == 0:
            args = (ids,)
        wanted = {
            "attention_mask": mask,
            "position_ids": positions,
            "logits_to_keep": 1,
            "output_router_logits": False,  # their loss would need those of all tokens
        }
        return args, kwargs | {name: value for name, value in wanted.items() if name in self.takes}


def _check_model(model: Any) -> frozenset[str]:
    """Refuse a model that cannot generate with a cache; returns what its forward takes."""
    name = type(model).__name__
    if not is_pretrained(model):
        raise SplitError(f"a {name} is not a model of transformers, whose caches are used to generate tokens")
    if model.config.is_encoder_decoder:
        raise SplitError(f"a {name} is an encoder with a decoder; only decoders can generate in a pipeline")
    if not model.can_generate():
        raise SplitError(f"a {name} has no head that generates tokens; split the model for causal language modelling")
    takes = frozenset(inspect.signature(model.forward).parameters)
    if CACHE not in takes:
        raise SplitError(f"a {name} takes no {CACHE}=, so it cannot generate with a cache on each stage")
    check_layers(model.config)
    return takes


def _check_example(split: Split) -> None:
    """Refuse a model that was split with inputs that are no text."""
    record = split.description.record
    if record is None:
        return
    more = [
        name
        for name, leaves in zip(record.keywords, record.keyword_leaves, strict=True)
        if name not in _TEXT and any(leaf.kind == "tensor" for _, leaf in leaves)
    ]
    if more or len(record.positional) > 1:
        given = ", ".join(f"{name}=" for name in more) or f"{len(record.positional)} positional arguments"
        raise SplitError(
            f"the model was split with {given}; tokens are generated from {_IDS} alone, so split it with an example "
            "of text"
        )


def _longest(model: nn.Module, vocabulary: int) -> int | None:
    """Return how many positions a model has an embedding for; some tables begin with two rows for padding."""
    config: Any = model.config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    sizes = {part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)} - {vocabulary}
    return limit if limit is not None and sizes & {limit, limit + 2} else None


def _numbers(tokens: Any) -> tuple[int, ...]:
    if tokens is None:
        return ()
    return (tokens,) if isinstance(tokens, int) else tuple(tokens)


def _ignored(settings: Any) -> tuple[str, ...]:
    """Name the settings that would change which tokens the model's own ``generate`` chooses."""
    if settings is None:
        return ()
    differing = settings.to_diff_dict()
    return tuple(
        f"{name}={value!r}"
        for name, value in sorted(differing.items())
        if name not in _READ and not name.startswith("_") and value not in (None, False)
    )
