"""Knows where the model of a split comes from, and makes as much of it real as is needed."""

from __future__ import annotations

import inspect
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.models.construction import checked_model, construct, named_tensors, replace_tensors
from penstock.models.initialization import initialize
from penstock.models.materialize import materialize_model
from penstock.models.meta_forward import MetaForward
from penstock.models.tree_copy import copy_tree, make_stand_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator


class ModelSource:
    """A model, which may be on the meta device, or a callable that builds one.

    Args:
        given: the model or the callable.

    Attributes:
        state: the state of torch's generator when this was made: what a callable would have drawn from.
        state_after: that after the callable has built the model last.
    """

    def __init__(self, given: nn.Module | Callable[[], nn.Module]) -> None:
        if not isinstance(given, nn.Module):
            _check_callable(given)
        self.state = self.state_after = torch.get_rng_state()
        self._given = given

    @property
    def is_callable(self) -> bool:
        """Whether the model can be built."""
        return not isinstance(self._given, nn.Module)

    def skeleton(self) -> nn.Module:
        """Return the model to examine: as it was given, or with its parameters on the meta device and its buffers real.

        Buffers of a model on the meta device are filled as far as its modules do that.
        """
        model = self._skeleton()
        if model._forward_hooks or model._forward_pre_hooks:
            raise SplitError(
                "the model has a hook of its own forward, which would run on every stage; put that code into its "
                "forward, into a layer, or around the pipeline"
            )
        return model

    def _skeleton(self) -> nn.Module:
        if not isinstance(self._given, nn.Module):
            return construct(self._given, lambda known: set(known.buffers), seed=0, per_name=True)
        absent = {name for name, buffer in self._given.named_buffers(remove_duplicate=False) if buffer.is_meta}
        if not absent:
            return self._given
        model = copy_tree(self._given)
        with suppress(SplitError):
            made = initialize(self._given, absent, seed=0, device="cpu")
            replace_tensors(model, lambda called, tensor: next((made[n] for n in called if n in made), tensor))
        return model

    def part(self, names: Collection[str], **options: Any) -> nn.Module:
        """Return the model with the named tensors real, as ``materialize`` makes them; others take no memory.

        Parameters that are not there are NaN, on the device of those that are: libraries read device and type.
        """
        model = materialize_model(self._build if self.is_callable else self._given, names, **options)
        wanted = set(names)
        real = [tensor.device for name, tensor in named_tensors(model) if name in wanted]
        device = next(iter(real), torch.device("cpu"))
        replace_tensors(model, lambda _, tensor: _stand_in(tensor, device) if tensor.is_meta else tensor)
        return model

    def _build(self) -> nn.Module:
        assert not isinstance(self._given, nn.Module)
        model = self._given()
        self.state_after = torch.get_rng_state()
        return model


def _check_callable(given: object) -> None:
    """Raise ``SplitError`` unless this can be called without arguments."""
    if not callable(given):
        checked_model(given)
        return
    try:
        inspect.signature(given).bind()
    except TypeError as error:
        raise SplitError(
            f"split calls {getattr(given, '__qualname__', given)} without arguments to build the model, but it is "
            f"{error}; pass a function that needs none, e.g. lambda: Model(config)"
        ) from None
    except ValueError:  # it does not say what it takes
        return


def is_on_meta(model: nn.Module) -> bool:
    """Return whether any parameter of a model has no values."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def examination(model: nn.Module) -> Iterator[None]:
    """Make a context in which a forward of the model runs, even on the meta device."""
    if not is_on_meta(model):
        yield
        return
    try:
        with MetaForward():
            yield
    except SplitError as error:
        if error.__cause__ is None:
            raise
        raise SplitError(
            f"{error}; the model has no values here: if it runs when it has some, split the built model, or use the "
            "description of a smaller one with the same modules (Split.from_json)",
            unit=error.unit,
        ) from error


def _stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    filled = make_stand_in(tensor, device)
    return nn.Parameter(filled, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else filled
