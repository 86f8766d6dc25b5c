"""Finds parameters that several stages have: one object on ranks that are threads, or copies that train apart."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from penstock.errors import MetadataError
from penstock.execution.ties import Member, Tie
from penstock.runtime.parity.preserve import pop_gradients

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from penstock.runtime.parity.comparison import Gradients, ParameterPath
    from penstock.runtime.transport.protocol import Transport

#: How many elements of a parameter are compared to find copies of it.
_SAMPLES: Final = 64
_adding: Final = threading.Lock()


class SharedParameters:
    """Decides which parameters this rank compares, where other ranks are threads of its process and may share them.

    All ranks add to one ``.grad`` then. The lowest rank that has a parameter compares it, when all have added to it.

    Attributes:
        mine: the parameters that this rank compares.
    """

    def __init__(self, transport: Transport, parameters: Mapping[torch.nn.Parameter, ParameterPath]) -> None:
        """Find which parameters other ranks have. All ranks call it."""
        self._transport = transport
        ids = [set[int]()] * transport.ranks
        if transport.in_one_process and transport.ranks > 1:
            ids = [set(json.loads(data)) for data in transport.exchange(json.dumps([*map(id, parameters)]).encode())]
        lower, others = _union(ids[: transport.rank]), _union(_without(ids, transport.rank))
        self.mine = {one: owned for one, owned in parameters.items() if id(one) not in lower}
        self._shared = [one for one in parameters if id(one) in others]
        self._is_shared = sum(map(len, ids)) > len(_union(ids))

    def wait(self) -> None:
        """Wait until all ranks have added their gradients, if they share any. All ranks call it."""
        if self._is_shared:
            self._transport.exchange(b"added")

    def add_up(self, gradients: Gradients) -> Gradients:
        """Add up what ranks have computed for parameters that they share; returns those of `mine`.

        All ranks call it, when the shared parameters have no gradients.
        """
        if not self._is_shared:
            return gradients
        self.wait()
        with _adding:
            for one in self._shared:
                if (gradient := gradients[one]) is not None:
                    one.grad = gradient if one.grad is None else one.grad + gradient
        self.wait()
        found = pop_gradients([one for one in self._shared if one in self.mine])
        return gradients | found


class Copy(NamedTuple):
    """A parameter that has the same values as another.

    Attributes:
        stage: its stage.
        name: its name there.
        module: the type of the module that has it.
    """

    stage: int
    name: str
    module: str

    def __str__(self) -> str:
        return str(Member(self.stage, self.name))


def copies_among(
    transport: Transport,
    parameters: Mapping[torch.nn.Parameter, ParameterPath],
    tied: Collection[torch.nn.Parameter] = (),
) -> tuple[tuple[Copy, ...], ...]:
    """Find parameters of all ranks that have equal values, although they are distinct. All ranks call it.

    Those in which one number is repeated, as in biases of 0, are left out; so are those that are tied to another
    one that is not left out.
    """
    tied = set(tied)
    mine = [
        (sample, owned.stage, owned.name, owned.module)
        for one, owned in parameters.items()
        if one not in tied and (sample := _sampled(one))
    ]
    found: dict[str, list[Copy]] = {}
    for rank, data in enumerate(transport.exchange(json.dumps(mine).encode())):
        try:
            for sample, stage, name, module in json.loads(data):
                found.setdefault(sample, []).append(Copy(int(stage), str(name), str(module)))
        except (TypeError, ValueError) as error:
            raise MetadataError(f"the parameters that rank {rank} described could not be decoded") from error
    return tuple(sorted(tuple(sorted(places)) for places in found.values() if len(places) > 1))


def likely_ties(copies: Iterable[tuple[Copy, ...]]) -> tuple[Tie, ...]:
    """Select copies that are hardly layers which were copied to begin alike: of an embedding, or in unlike modules.

    >>> layers = Copy(0, "0.weight", "Linear"), Copy(1, "0.weight", "Linear")
    >>> words = Copy(0, "wte.weight", "Embedding"), Copy(1, "head.weight", "Linear")
    >>> print(*likely_ties([layers, words]))
    wte.weight of stage 0 = head.weight of stage 1
    """
    return tuple(
        Tie(tuple((copy.stage, copy.name) for copy in places))
        for places in copies
        if len({copy.module for copy in places}) > 1 or places[0].module == torch.nn.Embedding.__name__
    )


def _sampled(parameter: Any) -> str:
    """Describe a trained parameter by type, shape and some elements; empty if all elements are equal."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if not parameter.requires_grad or local.layout is not torch.strided or local.numel() < 2:
        return ""
    flat = local.detach().flatten()
    samples: list[Any] = flat[:: max(1, flat.numel() // _SAMPLES)].tolist()
    if all(one == samples[0] for one in samples):
        return ""
    return f"{local.dtype} {tuple(parameter.shape)} {tuple(local.shape)} {samples}"


def _union(sets: Iterable[set[int]]) -> set[int]:
    return set[int]().union(*sets)


def _without(ids: list[set[int]], rank: int) -> list[set[int]]:
    return [*ids[:rank], *ids[rank + 1 :]]
