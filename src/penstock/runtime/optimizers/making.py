"""Makes the optimizer that is wrapped, or checks one that exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.errors import StageError
from penstock.execution.value_spec import describe_tensor
from penstock.runtime.grad_clipping import parameters_of
from penstock.runtime.optimizers.groups import names_of, read_rules, sort_into_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.runtime.engine import Engine
    from penstock.runtime.optimizers.groups import GivenGroups, Rule
    from penstock.runtime.optimizers.policy import Policy

#: Makes an optimizer from groups of parameters and options: one of torch's classes, or a function.
Kind = Callable[..., torch.optim.Optimizer]


class Made(NamedTuple):
    """The optimizer of a rank, and how it was asked for.

    Attributes:
        optimizer: torch's.
        rules: which parameters are in which of its groups.
        policy: what to do with the gradients.
    """

    optimizer: torch.optim.Optimizer
    rules: Sequence[Rule]
    policy: Policy


def make_optimizer(
    engine: Engine,
    kind: Kind | torch.optim.Optimizer,
    groups: GivenGroups | None,
    options: Mapping[str, Any],
    policy: Policy,
) -> Made:
    """Make the optimizer of this rank."""
    rules = read_rules(groups)
    if isinstance(kind, torch.optim.Optimizer):
        optimizer = kind
        if rules or options:
            raise StageError(
                "groups and options are for an optimizer that is made here; pass its class, e.g. torch.optim.AdamW, or "
                "give them to the optimizer that you pass"
            )
    else:
        optimizer = kind(sort_into_groups(names_of(engine), rules), **options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise StageError(f"expected an optimizer, or a class or function that makes one, got {kind!r}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StageError(
            "LBFGS needs inner products over all parameters of the model, but a rank has only those of its stages; use "
            "an optimizer that treats each parameter by itself, e.g. torch.optim.AdamW"
        )
    _check_options(optimizer, rules)
    for group in optimizer.param_groups:
        check_parameters(group["params"], engine)
    return Made(optimizer, rules, policy)


def name_group(group: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """Add the names of its parameters to a group."""
    given = group["params"]
    parameters: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
    if "param_names" in group or any(isinstance(one, tuple) for one in parameters):
        return dict(group)
    check_parameters(parameters, engine)
    names = names_of(engine)
    return {**group, "params": parameters, "param_names": [names[parameter] for parameter in parameters]}


def check_parameters(parameters: Sequence[torch.nn.Parameter], engine: Engine) -> None:
    """Refuse parameters that are in no stage of this rank."""
    mine = set(parameters_of(engine.stages)).difference(engine.ties.borrowed)
    for parameter in parameters:
        if parameter not in mine:
            raise StageError(
                f"the optimizer has a parameter ({describe_tensor(parameter)}) that is in no stage of rank "
                f"{engine.rank}; make the optimizer after the pipeline, from pipe.parameters(), since tied parameters "
                "become one tensor, and wrappers replace parameters"
            )


def _check_options(optimizer: torch.optim.Optimizer, rules: Sequence[Rule]) -> None:
    """Refuse an option that the optimizer does not have; torch ignores it."""
    for rule in rules:
        for option in rule.options:
            if option not in optimizer.defaults:
                raise StageError(
                    f"the group {rule} has the option {option!r}, which {type(optimizer).__name__} does not have; its "
                    f"options are {', '.join(optimizer.defaults)}"
                )
