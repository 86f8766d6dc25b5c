"""Makes some of a model's parameters and buffers real, without ever holding the whole model."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from operator import index
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import SplitError
from penstock.models.construction import checked_model, construct, empty_tensor, named_tensors, replace_tensors
from penstock.models.initialization import initialize
from penstock.models.layout import near_matches, shorten
from penstock.models.registrations import names_by_tensor
from penstock.models.tree_copy import copy_tree
from penstock.models.weights import open_weights

if TYPE_CHECKING:
    from penstock.models.registrations import Survey

#: How parameters get their values: see ``materialize``.
Init: TypeAlias = Literal["exact", "per_name"] | Callable[[str, Tensor], object]

#: Where the values of parameters are: by name, or in safetensors files.
Values: TypeAlias = Mapping[str, Tensor] | str | os.PathLike[str]


def materialize(
    build: nn.Module | Callable[[], nn.Module],
    names: Collection[str],
    *,
    init: Init = "exact",
    seed: int | Tensor = 0,
    state_dict: Values | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return the named parameters and buffers of a model as real tensors; nothing else of it takes memory.

    Args:
        build: a callable that builds the model; it is called at least twice, so it should have no other effect. Or a
            model: its real tensors are returned as they are, those on the meta device are made.
        names: the parameters and buffers, as ``named_parameters`` and ``named_buffers`` call them. Several names of one
            parameter give one tensor.
        init: how parameters get their values.

            - ``"exact"``: as in ``torch.manual_seed(seed); model = build()``, bit for bit. This draws the random
              numbers of the whole model, and needs the callable.
            - ``"per_name"``: from the same distributions, with a generator for each parameter that is seeded from
              ``seed`` and its name. The values do not depend on which other names are given. For a model on the meta
              device, its modules' ``reset_parameters`` and ``_init_weights`` fill the tensors; the numbers may then
              differ from those of a callable.
            - a function: called with the name and the uninitialised tensor of each parameter, to fill it in place.

            Buffers always get what the constructor gives them.
        seed: see ``init``. For ``"exact"``, also a state of torch's generator.
        state_dict: values by name, used instead of ``init`` for parameters and persistent buffers; other names are
            ignored. A tied parameter may have any of its names here. Only what is needed is looked up. Or the path of a
            safetensors file, or of a folder that ``save_pretrained`` or ``penstock.export`` wrote.
        device: where new tensors go; by default where the callable puts them, or the CPU.

    Raises:
        SplitError: for names the model does not have, values that are missing from ``state_dict`` or have another
            shape, and values that cannot be known.
    """
    model = materialize_model(build, names, init=init, seed=seed, state_dict=state_dict, device=device)
    return {name: tensor for name, tensor in named_tensors(model) if name in set(names)}


def materialize_model(
    build: nn.Module | Callable[[], nn.Module],
    names: Collection[str],
    *,
    init: Init = "exact",
    seed: int | Tensor = 0,
    state_dict: Values | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Return a model with the named tensors as ``materialize`` makes them.

    From a callable, the others are on the meta device. From a model, it is a copy of the modules, with the same tensors
    for all other names.
    """
    wanted = set(names)
    seed = checked_seed(seed, init)
    if not callable(init) and init not in ("exact", "per_name"):
        raise SplitError(f"unknown init {init!r}; use 'exact', 'per_name', or a function of a name and a tensor")
    if state_dict is not None and not isinstance(state_dict, Mapping | str | os.PathLike):
        raise SplitError(f"state_dict= must have tensors by name, or be a path, got a {type(state_dict).__name__}")
    if isinstance(build, nn.Module):
        model = copy_tree(build)
    else:
        if not callable(build):
            checked_model(build)
        model = _construct(build, wanted, init, seed, is_loaded=state_dict is not None)
        init = init if callable(init) else "exact"  # which the tensors are, if they are real
    if isinstance(state_dict, str | os.PathLike):
        state_dict = open_weights(state_dict, model)
    made = _make(model, wanted, init=init, seed=seed, state_dict=state_dict, device=device or "cpu")
    replace_tensors(model, lambda called, tensor: _replacement(called, tensor, made, wanted, device))
    return model


def checked_seed(seed: object, init: Init) -> int | Tensor:
    """Return a seed as an ``int``, of whatever integer type it is, and a state of torch's generator as it is.

    >>> checked_seed(torch.tensor(3), "per_name")
    3
    """
    if isinstance(seed, Tensor) and seed.dtype == torch.uint8 and seed.ndim == 1 and init != "per_name":
        return seed
    try:
        return index(seed)  # type: ignore[arg-type]  # which index finds out
    except TypeError:
        got = f"a tensor of shape {[*seed.shape]}" if isinstance(seed, Tensor) else repr(seed)
        raise SplitError(
            f"seed= must be an integer, or with init='exact' a state of torch's generator, got {got}"
        ) from None


def _construct(
    build: Callable[[], nn.Module], wanted: set[str], init: Init, seed: int | Tensor, *, is_loaded: bool
) -> nn.Module:
    """Build the model; parameters that get their values from elsewhere remain on the meta device."""
    buffers_only = is_loaded or callable(init)

    def kept(known: Survey) -> set[str]:
        _check_names(wanted, known.parameters | known.buffers)
        return wanted & known.buffers if buffers_only else wanted

    return construct(build, kept, seed=seed, per_name=buffers_only or init == "per_name")


def _make(
    model: nn.Module,
    wanted: set[str],
    *,
    init: Init,
    seed: int | Tensor,
    state_dict: Mapping[str, Tensor] | None,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Return new tensors, by name, for those of the model that are not used as they are."""
    tensors = dict(named_tensors(model))
    _check_names(wanted, tensors)
    parameters = {name for name in wanted if isinstance(tensors[name], nn.Parameter)}
    loaded = wanted - _non_persistent(model) if state_dict is not None else set()
    filled = parameters - loaded if callable(init) else set()
    drawn = {name for name in wanted if tensors[name].is_meta} - loaded - filled
    if state_dict is None and init == "per_name":
        drawn |= parameters
    elif state_dict is None and init == "exact" and drawn:
        raise SplitError(
            f"{shorten(sorted(drawn))} is on the meta device, and init='exact' needs the constructor to give it the "
            "values of the whole model: pass a callable that builds the model, e.g. lambda: Model(config); or use "
            "init='per_name', a function, or state_dict="
        )
    made = initialize(model, drawn, seed=seed, device=device) if drawn else {}
    if state_dict is not None:
        made |= _load(model, loaded, state_dict, device)
    elif callable(init):
        made |= _fill(model, filled, init, device)
    return made


def _fill(
    model: nn.Module, names: set[str], init: Callable[[str, Tensor], object], device: torch.device | str
) -> dict[str, Tensor]:
    """Have a function fill each parameter, under the first of its names."""
    made: dict[str, Tensor] = {}
    tensors = dict(named_tensors(model))
    for called in names_by_tensor(model).values():
        if names.intersection(called):
            tensor = empty_tensor(tensors[called[0]], device)
            with torch.no_grad():
                init(called[0], tensor)
            made |= dict.fromkeys(called, tensor)
    return made


def _load(
    model: nn.Module, names: set[str], state_dict: Mapping[str, Tensor], device: torch.device | str
) -> dict[str, Tensor]:
    """Copy each tensor from the first of its names that has a value."""
    made: dict[str, Tensor] = {}
    missing: list[str] = []
    wrong: list[str] = []
    tensors = dict(named_tensors(model))
    declared = _declared_ties(model)
    for called in names_by_tensor(model).values():
        if not names.intersection(called):
            continue
        name = next(name for name in called if name in names)
        key = next((key for key in [name, *called, *declared.get(name, ())] if key in state_dict), None)
        if key is None:
            missing.append(name)
            continue
        value, tensor = state_dict[key], tensors[name]
        if not isinstance(value, Tensor):
            wrong.append(f"{key}: a {type(value).__name__}, expected a tensor")
            continue
        if value.shape != tensor.shape:
            wrong.append(f"{key}: {tuple(value.shape)}, expected {tuple(tensor.shape)}")
            continue
        new = empty_tensor(tensor, device)
        with torch.no_grad():
            new.copy_(value)
        made |= dict.fromkeys(called, new)
    _report(missing, wrong, state_dict)
    return made


def _report(missing: list[str], wrong: list[str], state_dict: Mapping[str, Tensor]) -> None:
    problems = [f"it lacks {shorten(missing)}"] if missing else []
    problems += [f"it has other shapes: {'; '.join(wrong)}"] if wrong else []
    if not problems:
        return
    if missing and not wrong:
        problems.append(f"its own names are {shorten(list(state_dict))}")
    raise SplitError(f"the state_dict does not fit the model: {'; '.join(problems)}")


def _declared_ties(model: nn.Module) -> dict[str, list[str]]:
    """Return what transformers declares as tied, by name, in both directions."""
    ties: dict[str, list[str]] = {}
    declared: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in declared.items():
        ties.setdefault(target, []).append(source)
        ties.setdefault(source, []).append(target)
    return ties


def _non_persistent(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def _replacement(
    called: list[str], tensor: Tensor, made: dict[str, Tensor], wanted: set[str], device: torch.device | str | None
) -> Tensor:
    tensor = next((made[name] for name in called if name in made), tensor)
    if device is None or tensor.is_meta or not wanted.intersection(called) or tensor.device == torch.device(device):
        return tensor
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _check_names(wanted: set[str], known: Collection[str]) -> None:
    if unknown := sorted(wanted.difference(known)):
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise SplitError(
            f"the model has no parameter or buffer {unknown[0]!r}{more}{near_matches(unknown[0], sorted(known))}",
            unit=unknown[0],
        )
