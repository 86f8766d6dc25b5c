"""The part of a checkpoint that is the optimizer, by name of the parameter, so that any layout can load it.

Two things are kept for each parameter: its state, and the options of its group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils import _pytree as pytree

from penstock.errors import CheckpointError
from penstock.execution.ties import near_matches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    #: The options of a parameter's group as pairs, and as the last one which state it has.
    Options = tuple[tuple[str, Any], ...]
    #: Gives a tensor, whose name is given, the sharding of a parameter of the same shape.
    Fit = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]

_OF_GROUP: Final = ("params", "param_names")
_STATE: Final = "state"


def as_list(optimizer: Any) -> list[Any]:
    """Return the optimizers of this rank, of which there is usually one."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def collect_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], name_of: Mapping[torch.Tensor, str]
) -> dict[str, dict[str, Any]]:
    """Return the state and the options of every parameter, by name. State tensors are not copied.

    Args:
        optimizers: those of this rank.
        name_of: the names of the parameters of this rank.
    """
    state: dict[str, Any] = {}
    options: dict[str, Options] = {}
    for optimizer in optimizers:
        _check_keys(optimizer)
        for group in optimizer.param_groups:
            common = _options_of(group)
            for parameter in group["params"]:
                name = _name(parameter, name_of)
                held = optimizer.state.get(parameter, {})
                if held:
                    state[name] = dict(held)
                options[name] = (*common, (_STATE, tuple(_paths(held))))
    return {"state": state, "param_groups": options}


def prepare_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    name_of: Mapping[torch.Tensor, str],
    saved: Mapping[str, Any],
    fit: Fit = lambda _name, value, _parameter: value,
) -> Callable[[], None]:
    """Check what ``collect_optimizers`` has returned, on this layout or another one. Returns what loads it.

    Args:
        optimizers: those of this rank.
        name_of: the names of the parameters of this rank.
        saved: the state and the options by name. The optimizers take the tensors over.
        fit: gives a tensor the sharding of a parameter of the same shape.
    """
    used: set[str] = set()
    packed = [_pack(optimizer, name_of, saved, fit, used) for optimizer in optimizers]

    def load() -> None:
        for optimizer, (state, groups) in zip(optimizers, packed, strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            for number, held in state.items():
                _keep_element_types(optimizer.state[parameters[number]], held)

    return load


def options_of(name: str, saved: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[tuple[Any, ...], ...]]:
    """Return the options of a parameter's group, and where its state is: paths of keys."""
    if name not in saved["param_groups"]:
        raise CheckpointError(
            f"{name} was in no optimizer when the checkpoint was saved{near_matches(name, saved['param_groups'])}; "
            "load it without this parameter in the optimizer, and add it afterwards with add_param_group"
        )
    *pairs, (_, paths) = saved["param_groups"][name]
    return dict(pairs), tuple(map(tuple, paths))


def _options_of(group: Mapping[str, Any]) -> Options:
    copied = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), dict(group) | {"params": None})
    return tuple((key, value) for key, value in copied.items() if key not in _OF_GROUP)


def _check_keys(optimizer: torch.optim.Optimizer) -> None:
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    keys: Iterable[Any] = optimizer.state  # some optimizers keep what is not of a parameter
    for key in keys:
        if key not in known:
            shown = "a tensor" if isinstance(key, torch.Tensor) else repr(key)
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps state for {shown}, which is no parameter of its groups and cannot "
                "be saved by name"
            )


def _name(parameter: torch.Tensor, name_of: Mapping[torch.Tensor, str]) -> str:
    if parameter not in name_of:
        raise CheckpointError(
            f"the optimizer has a parameter of shape {list(parameter.shape)} that is in no stage of this rank; make it "
            "from pipe.parameters(), after the pipeline"
        )
    return name_of[parameter]


def _paths(held: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where the values of nested dictionaries are."""
    for key, value in held.items():
        if isinstance(value, dict):
            yield from _paths(value, (*path, key))
        else:
            yield (*path, key)


# Loading ------------------------------------------------------------------------------------------------------------


def _pack(
    optimizer: torch.optim.Optimizer,
    name_of: Mapping[torch.Tensor, str],
    saved: Mapping[str, Any],
    fit: Fit,
    used: set[str],
) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """Return the state by number of the parameter, and the groups, as ``Optimizer.load_state_dict`` takes them.

    `used` has the names whose tensors another parameter has already taken.
    """
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    count = 0
    for group in optimizer.param_groups:
        numbers = range(count, count + len(group["params"]))
        count += len(numbers)
        names = [_name(parameter, name_of) for parameter in group["params"]]
        for number, name, parameter in zip(numbers, names, group["params"], strict=True):
            held = _state_of(name, saved)
            if held:
                state[number] = _fitted(name, held, parameter, fit, copy=name in used)
                used.add(name)
        groups.append({**dict(_options_of(group)), **_common_options(names, saved), "params": list(numbers)})
    return state, groups


def _common_options(names: Iterable[str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the parameters of a group were saved with, which must be the same."""
    first: tuple[str, dict[str, Any]] | None = None
    for name in names:
        options, _ = options_of(name, saved)
        if first is None:
            first = name, options
        for key in options.keys() | first[1].keys():
            if not _equal(options.get(key), first[1].get(key)):
                raise CheckpointError(
                    f"{first[0]} and {name} are in one parameter group now, but were saved with {key}="
                    f"{first[1].get(key)!r} and {key}={options.get(key)!r}; make groups as they were"
                )
    return {} if first is None else first[1]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other or one != one)  # NaN is not equal to itself


def _state_of(name: str, saved: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the state of a parameter, all of which must be there."""
    _, paths = options_of(name, saved)
    held: dict[Any, Any] = {}
    for path in paths:
        value, place = saved["state"].get(name, {}), held
        for key in path:
            if not isinstance(value, dict) or key not in value:
                raise CheckpointError(
                    f"the state {'.'.join(map(str, path))} of {name} was saved, but is not in the state dict: an "
                    "optimizer has none before its first step; load it with penstock.load, which needs none, or take "
                    "the state dict after a step"
                )
            value = value[key]
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return held


def _fitted(
    name: str,
    held: dict[Any, Any],
    parameter: torch.Tensor,
    fit: Fit,
    *,
    copy: bool,
) -> Any:
    def take(value: torch.Tensor) -> torch.Tensor:
        value = value.clone() if copy else value  # two tensors of this rank are one parameter
        return fit(name, value, parameter) if value.shape == parameter.shape else value

    return pytree.tree_map_only(torch.Tensor, take, held)


def _keep_element_types(loaded: Any, held: Mapping[Any, Any]) -> None:
    """Put tensors back that ``Optimizer.load_state_dict`` has converted to the element type of the parameter."""
    for key, value in held.items():
        if isinstance(value, dict):
            _keep_element_types(loaded[key], value)
        elif isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
            loaded[key] = value.to(loaded[key].device)
