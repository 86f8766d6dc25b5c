"""What files of a model of transformers hold beside its tensors, and what they call them."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    import torch


def is_pretrained(model: object) -> bool:
    """Return whether a model is one of transformers."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


class Configuration(NamedTuple):
    """The configuration of a model, as it was given: that of a split builds no caches.

    Attributes:
        model: the configuration of the model.
        generation: that of its ``generate``, if it has one.
    """

    model: Any
    generation: Any

    @classmethod
    def of(cls, model: Any) -> Configuration | None:
        """Return that of a model; None if it is not one of transformers."""
        if not is_pretrained(model):
            return None
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        return cls(config, deepcopy(getattr(model, "generation_config", None)) if model.can_generate() else None)

    def write(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write what ``from_pretrained`` needs beside the tensors, which are of that type."""
        if dtype is not None:
            self.model.dtype = str(dtype).removeprefix("torch.")
        self.model.save_pretrained(folder)
        if self.generation is not None:
            self.generation.save_pretrained(folder)


def rename_for_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return some of a model's tensors under the names, and in the parts, that files of its family have.

    Args:
        model: the model.
        tensors: the tensors, all of those that files hold together or none of them.
    """
    if not is_pretrained(model):
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    ignored = model._keys_to_ignore_on_save or ()
    kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    return dict(revert_weight_conversion(model, kept))
