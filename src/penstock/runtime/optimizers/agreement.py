"""Agrees with the other ranks on an optimizer: its groups, when it clips, and how tied parameters are trained."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

from penstock.errors import MetadataError, PenstockError, StageError
from penstock.execution.parameter_names import places_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from penstock.runtime.engine import Engine
    from penstock.runtime.optimizers.groups import Rule
    from penstock.runtime.optimizers.making import Made


def make_together(make: Callable[[], Made], engine: Engine) -> Made:
    """Make the optimizer of each rank, on all ranks or on none. All ranks call it."""
    made, mistake = None, None
    try:
        made = make()
        mine = _describe(made, engine)
    except Exception as error:  # the others must not wait for this rank
        mistake, mine = error, {"error": str(error) if isinstance(error, PenstockError) else repr(error)}
    ranks = [_read(data, rank) for rank, data in enumerate(engine.transport.exchange(json.dumps(mine).encode()))]
    if mistake is not None:
        raise mistake
    assert made is not None
    for rank, other in enumerate(ranks):
        if "error" in other:
            raise StageError(f"rank {rank} could not make its optimizer: {other['error']}")
    for rank, other in enumerate(ranks):
        _compare(mine, other, engine.rank, rank)
    _warn_of_unused(made.rules, ranks)
    return made


def _describe(made: Made, engine: Engine) -> dict[str, Any]:
    """Describe an optimizer: what must be the same on all ranks, and which groups are empty here."""
    return {
        "policy": {name: str(value) for name, value in made.policy._asdict().items()},
        "groups": [str(rule) for rule in made.rules],
        "taken": [bool(group["params"]) for group in made.optimizer.param_groups[1:]] if made.rules else [],
        "tied": _describe_tied(engine, made.optimizer),
    }


def _read(data: bytes, rank: int) -> Mapping[str, Any]:
    try:
        found: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise MetadataError(f"what rank {rank} sent of its optimizer could not be decoded") from error
    return found


def _compare(mine: Mapping[str, Any], other: Mapping[str, Any], here: int, there: int) -> None:
    for name, value in mine["policy"].items():
        if (theirs := other["policy"].get(name)) != value:
            raise StageError(
                f"the optimizer of rank {there} has {name}={theirs}, that of rank {here} has {name}={value}; they "
                "must be the same on all ranks"
            )
    if other["groups"] != mine["groups"]:
        raise StageError(
            f"rank {there} has the groups {', '.join(other['groups']) or 'none'}, rank {here} has "
            f"{', '.join(mine['groups']) or 'none'}; pass the same groups on all ranks"
        )
    for tie, text in mine["tied"].items():
        if (theirs := other["tied"].get(tie, text)) != text:
            raise StageError(
                f"the tied parameters {tie} would be trained differently: with {theirs} on rank {there}, with {text} "
                f"on rank {here}"
            )


def _describe_tied(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Describe how each tied parameter of this rank is trained."""
    options = {
        parameter: {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    found = {}
    for tie in engine.ties.ties:
        for index, name in tie.members:
            if index in engine.stages:
                parameter = places_by_name(engine.stages[index].module)[name].parameter
                trained = options.get(parameter)
                text = "no optimizer" if trained is None else f"{type(optimizer).__name__} {trained}"
                if parameter not in engine.ties.borrowed:
                    found[str(tie)] = text
    return found


def _warn_of_unused(rules: Sequence[Rule], ranks: Sequence[Mapping[str, Any]]) -> None:
    for number, rule in enumerate(rules):
        if not any(rank["taken"][number] for rank in ranks):
            warnings.warn(f"the group {rule} takes no parameter of any stage", stacklevel=4)
