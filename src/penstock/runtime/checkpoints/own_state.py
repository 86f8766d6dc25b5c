"""Restores what belongs to ranks rather than to the model: random numbers, schedulers, positions in the data.

A rank of the layout that was saved gets its own back. On another layout there are no such ranks: there, what all had
in common counts. Random number generators that differed get a new seed, and anything else that differed is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.contents import EXTRA, RANDOM, SCALER, SCHEDULER, STATE, is_stateful
from penstock.runtime.checkpoints.encoding import decode
from penstock.runtime.checkpoints.random_states import restore_random_states, seed_generators

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, MutableMapping

    import torch

    from penstock.runtime.checkpoints.index import Checkpoint


class OwnState(NamedTuple):
    """What ranks had as their own, for a rank of the present.

    Attributes:
        checkpoint: where it is.
        rank: this rank.
        is_same_layout: whether every rank has the stages that it had.
    """

    checkpoint: Checkpoint
    rank: int
    is_same_layout: bool

    def prepare(self, kind: str, part: Any) -> Callable[[], None]:
        """Find the state of a scheduler or a scaler; returns what loads it."""
        names = self._names(kind)
        if not names:
            raise CheckpointError(f"{self.checkpoint.path} was saved without a {kind}; load it without {kind}=")
        state = decode(self._find(kind, STATE))
        return lambda: part.load_state_dict(state)

    def prepare_extra(self, extra: MutableMapping[str, Any]) -> Callable[[], None]:
        """Find what was saved as extra; returns what puts it into the dictionary, or into the objects there."""
        names = self._names(EXTRA)
        for key in extra:
            if key not in names:
                there = f"only {', '.join(map(repr, names))}" if names else "nor anything else as extra"
                raise CheckpointError(f"{self.checkpoint.path} has no extra[{key!r}], {there}; load it without that")
        mine = self.checkpoint.ranks[self.rank].own[EXTRA] if self.is_same_layout else names
        found = {key: decode(self._find(EXTRA, key)) for key in dict.fromkeys([*mine, *extra])}

        def load() -> None:
            for key, value in found.items():
                if is_stateful(extra.get(key)):
                    extra[key].load_state_dict(value)
                else:
                    extra[key] = value

        return load

    def prepare_random(self, devices: Collection[torch.device]) -> Callable[[], None]:
        """Find the states of the random number generators; returns what restores them."""
        held = {name: self._candidates(RANDOM, name) for name in self._names(RANDOM)}
        known = {name: states[0] for name, states in held.items() if len(states) == 1}
        lost = {name: states for name, states in held.items() if len(states) > 1}

        def load() -> None:
            if lost:
                seed_generators(list(lost), list(lost.values()), self.rank)
            restore_random_states(known, devices)

        return load

    def _names(self, kind: str) -> list[str]:
        return list(dict.fromkeys(name for index in self.checkpoint.ranks for name in index.own[kind]))

    def _candidates(self, kind: str, name: str) -> list[Any]:
        """Find what this rank may have had as its own: one value, unless ranks differed and no longer exist."""
        if self.is_same_layout and name in self.checkpoint.ranks[self.rank].own[kind]:
            return [self.checkpoint.ranks[self.rank].own[kind][name]]
        found: list[Any] = []
        for index in self.checkpoint.ranks:
            if name in index.own[kind] and index.own[kind][name] not in found:
                found.append(index.own[kind][name])
        return found

    def _find(self, kind: str, name: str) -> Any:
        candidates = self._candidates(kind, name)
        if len(candidates) > 1:
            what = f"extra[{name!r}]" if kind == EXTRA else f"the {kind}"
            raise CheckpointError(
                f"{what} was not the same on all ranks when {self.checkpoint.path} was saved, and the "
                f"layout has changed; load it without {kind}=, or on the layout that saved it"
            )
        return candidates[0]


def prepare_own(
    own: OwnState,
    scheduler: Any,
    scaler: Any,
    extra: MutableMapping[str, Any] | None,
    devices: Collection[torch.device],
) -> list[Callable[[], None]]:
    """Find all that belongs to this rank; returns what restores it."""
    loads = [own.prepare(kind, part) for kind, part in ((SCHEDULER, scheduler), (SCALER, scaler)) if part is not None]
    if extra is not None:
        loads.append(own.prepare_extra(extra))
    return [*loads, own.prepare_random(devices)]
