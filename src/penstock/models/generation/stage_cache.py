"""Keeps the keys and values of one stage, in the cache of transformers.

The parent's code runs on every stage. It makes masks and positions, and asks the cache how long it is: often its first
layer, which may be on another stage. So a cache here has all layers. Those of other stages hold no keys and values, but
know how long they would be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.errors import SplitError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

#: The argument of a model that is its cache.
CACHE: Final = "past_key_values"
#: Where the caches that are made here refer to what keeps them.
_KEEPER: Final = "_penstock_stage_cache"


class StageCache:
    """The cache of one stage, for some sequences.

    Args:
        config: the configuration of the model.
        module: the stage.

    Attributes:
        cache: what the model is called with.
        tokens: how many tokens it has seen.
    """

    def __init__(self, config: Any, module: nn.Module) -> None:
        from transformers import DynamicCache

        self.cache: Any = DynamicCache(config=config)
        self.tokens = 0
        setattr(self.cache, _KEEPER, self)
        parts = [part for part in module.modules() if any(True for _ in part.parameters())]
        self._own = {getattr(part, "layer_idx", None) for part in parts}
        self._elsewhere: list[Any] | None = None

    def advance(self, tokens: int) -> None:
        """Note that the model was called with some tokens, so that layers of other stages are as long as ours."""
        self.tokens += tokens
        if self._elsewhere is None:
            self._elsewhere = self._share_layers()
        for layer in self._elsewhere:
            nothing = torch.empty(1, 1, tokens, 1)
            layer.update(nothing, nothing)

    def _share_layers(self) -> list[Any]:
        """Replace the layers that the first call has left empty, those of other stages, by one of each kind."""
        kinds: dict[Any, Any] = {}
        for number, layer in enumerate(self.cache.layers):
            if not layer.is_initialized and number not in self._own:
                kind = type(layer), getattr(layer, "sliding_window", None)
                self.cache.layers[number] = kinds.setdefault(kind, layer)
        return list(kinds.values())


def is_given(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a stage is called with a cache that was made here."""
    return hasattr(kwargs.get(CACHE), _KEEPER)


def seen_tokens(kwargs: Mapping[str, Any]) -> int:
    """Return how many tokens are in the cache that a stage is called with."""
    keeper: StageCache | None = getattr(kwargs.get(CACHE), _KEEPER, None)
    return 0 if keeper is None else keeper.tokens


def check_layers(config: Any) -> None:
    """Refuse a model with layers whose caches are not keys and values, one for each token."""
    from transformers import cache_utils

    linear = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
    idle = getattr(cache_utils, "DummyLayer", ())
    for number, layer in enumerate(cache_utils.DynamicCache(config=config).layers):
        is_usual = isinstance(layer, cache_utils.DynamicLayer) and not isinstance(layer, linear)
        if not (is_usual or isinstance(layer, idle)):
            raise SplitError(
                f"layer {number} of a {type(config).__name__} keeps a {type(layer).__name__}, which a split model "
                "cannot generate with; only keys and values of attention, with or without a sliding window, are "
                "supported"
            )
