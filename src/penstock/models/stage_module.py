"""Makes a stage of a model: a copy of its modules that shares their tensors, without those of other stages.

Other units keep their class and attributes, lose their parameters, and get another forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.models.stage_forward import StageForward
from penstock.models.tree_copy import copy_tree, keep_device_and_dtype, strip

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

    from penstock.models.plan import Plan
    from penstock.models.units import Units


def make_stage(
    model: nn.Module, units: Units, plan: Plan, held: Collection[str], *, poison: Collection[str] = ()
) -> nn.Module:
    """Make the module of a stage.

    Args:
        model: the unsplit model.
        units: its units.
        plan: what the stage does.
        held: the full names of the parameters and buffers that the stage holds.
        poison: the units whose dummies are NaN, for the self-check; ``""`` stands for the inputs.
    """
    copy = copy_tree(model)
    originals = dict(model.named_modules(remove_duplicate=False))
    placed = {id(part) for module in units.units.values() for part in module.modules()}
    for name, module in list(copy.named_modules(remove_duplicate=False)):
        buffers = module._buffers if id(originals[name]) in placed else {}
        for short in [*module._parameters, *buffers]:
            if (f"{name}.{short}" if name else short) not in held:
                strip(module, short)
    for name, module in copy.named_modules():
        keep_device_and_dtype(module, originals[name], copy)
    StageForward(copy, plan, frozenset(poison)).install(units)
    return copy
