"""Looks weights up by the names of the model where files of its family have others.

For most families names are equal, or differ by a prefix. Some files hold what their model fuses, such as one tensor per
expert; transformers knows how, and its own rules are used: on names first, so that only what is needed is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.errors import ReadError
from penstock.models.weights.files import CONFIG, WeightFiles
from penstock.models.weights.pretrained import is_pretrained

if TYPE_CHECKING:
    import os

    from torch import nn


def open_weights(path: str | os.PathLike[str], model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the tensors of files by the names that they have in the model.

    Args:
        path: a safetensors file, an index, or a folder; see ``WeightFiles``.
        model: the model, whose parameters may be on the meta device.
    """
    files = WeightFiles(path)
    if not is_pretrained(model):
        return files
    _check_plain(files)
    return ConvertedWeights(files, model)


def _check_plain(files: WeightFiles) -> None:
    config = files.path / CONFIG
    if config.exists() and json.loads(config.read_text()).get("quantization_config"):
        raise ReadError(
            f"the weights in {files.path} are quantized, and stages need plain ones: load them with from_pretrained, "
            "dequantize(), and save_pretrained"
        )


class _Group(NamedTuple):
    """Tensors of files that are converted together.

    Attributes:
        rule: the rule of transformers; None if there is one tensor, which is only renamed.
        sources: the names in the files, with the pattern of the rule that each matches.
    """

    rule: Any
    sources: list[tuple[str, str]]


class ConvertedWeights(Mapping[str, torch.Tensor]):
    """The tensors of files, by the names that they have in a model of transformers.

    Args:
        files: the files.
        model: the model.
    """

    def __init__(self, files: WeightFiles, model: nn.Module) -> None:
        self.files = files
        self._model = model
        self._groups = _group_names(files, model)
        self._converted: dict[str, torch.Tensor] = {}  # made beside one that was looked up

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor, or make it from others."""
        if name in self._converted:
            return self._converted.pop(name)
        group = self._groups[name]
        if group.rule is None:
            return self.files[group.sources[0][0]]
        rule = deepcopy(group.rule)
        first = next(each for each, other in self._groups.items() if other is group)
        for source, pattern in group.sources:
            rule.add_tensor(first, source, pattern, lambda source=source: self.files[source])
        made = rule.convert(first, model=self._model, config=self._model.config)
        self._converted |= {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        return self._converted.pop(name)

    def __contains__(self, name: object) -> bool:
        return name in self._groups  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)


def _group_names(files: WeightFiles, model: Any) -> dict[str, _Group]:
    """Return what each tensor of the model is made from, as far as the files have it."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    rule_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    values = model.state_dict()
    context: dict[str, Any] = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": values}
    groups: dict[str, _Group] = {}
    for source in sorted(files, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(source, renamings, converters, **context)
        if name not in values and source in values:
            name, pattern = source, None
        rule: Any = rule_of[pattern] if pattern is not None else None
        group = groups.setdefault(name, _Group(rule, []))
        group.sources.append((source, pattern or source))
        for target in rule.target_patterns[1:] if rule else ():
            groups.setdefault(name.replace(rule.target_patterns[0], target), group)
    return groups
