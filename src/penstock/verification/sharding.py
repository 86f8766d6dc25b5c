"""Parameters are gathered before they are used, and released after their last use."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.graph.array_blocks import blocks, whole_rows
from penstock.graph.sorting import stable_order
from penstock.ir import packed
from penstock.ir.actions import COMPUTE, RESHARD, UNSHARD, Action
from penstock.verification.findings import Finding, Problem, action_at, at, position

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.graph.action_table import Leaves, Places


def wrongly_sharded(leaves: Leaves) -> Iterator[Problem]:
    """Uses of parameters that are not there; nothing in a schedule without any UNSHARD or RESHARD."""
    if not len(leaves.are(UNSHARD, RESHARD)):
        return
    places = leaves.are(UNSHARD, RESHARD, *COMPUTE)
    if leaves.all_at_home and all(_Uses.of(leaves, mine).are_well for mine in _in_parts(leaves, places)):
        return
    places, stage, unshards, changes, gathered = _Uses.of(leaves, places)
    begins = np.append(True, stage[1:] != stage[:-1])
    behind_change = begins | np.append(False, changes[:-1])
    starved = ~changes & ~gathered
    yield from _starved(leaves, places, starved & behind_change, changes | begins)
    yield Problem(
        "unsharded_twice",
        places[unshards & gathered],
        at(leaves, "unsharded_twice", "{}, but the stage is unsharded already", "drop it"),
    )
    # Behind uses that lack an UNSHARD a RESHARD is not what is wrong: with the UNSHARD it is right.
    yield Problem(
        "resharded_twice",
        places[changes & ~unshards & ~gathered & behind_change],
        at(leaves, "resharded_twice", "{}, but the stage is not unsharded", "drop it"),
    )


class _Uses(NamedTuple):
    """The uses of parameters and the changes to them, stage by stage, in order.

    Attributes:
        places: where they are.
        stage: the stage of each.
        unshards: which of them are an UNSHARD.
        changes: which are that or a RESHARD.
        gathered: which of them find the parameters gathered.
    """

    places: Places
    stage: Places
    unshards: NDArray[np.bool_]
    changes: NDArray[np.bool_]
    gathered: NDArray[np.bool_]

    @classmethod
    def of(cls, leaves: Leaves, places: Places) -> _Uses:
        """Those at these places."""
        stage = packed.stages(leaves.codes[places])
        order = stable_order(stage)
        places, stage = places[order], stage[order]
        unshards = leaves.is_kind(places, UNSHARD)
        changes = unshards | leaves.is_kind(places, RESHARD)
        # The last change before each of them, if it is of the same stage.
        last = np.zeros(len(places), np.int64)
        np.maximum.accumulate((changes * np.arange(len(places)))[:-1], out=last[1:])
        gathered = unshards[last] & (stage[last] == stage)
        gathered[:1] = False
        return cls(places, stage, unshards, changes, gathered)

    @property
    def are_well(self) -> bool:
        """Whether whatever is not an UNSHARD has the parameters, and no UNSHARD has."""
        return bool((self.gathered != self.unshards).all())


def _in_parts(leaves: Leaves, places: Places) -> Iterator[Places]:
    """The places on some ranks at once, as many as fill a block: if all are at home, each stage is on one of them."""
    if len(blocks(len(places))) == 1:
        return iter((places,))
    bounds = places.searchsorted(leaves.offsets).tolist()
    return (places[bounds[ranks.start] : bounds[ranks.stop]] for ranks in whole_rows(bounds))


def _starved(leaves: Leaves, places: Places, first: NDArray[np.bool_], ends: NDArray[np.bool_]) -> Iterator[Problem]:
    """Uses without parameters, one problem for all up to the next change: the first use, and what to do.

    Args:
        leaves: the actions.
        places: where the uses and changes are, stage by stage, in order.
        first: which of them are the first use without parameters.
        ends: which of them are a change, or the first of a stage.
    """
    boundaries = np.append(ends.nonzero()[0], len(places))

    def run(number: int) -> _Run:
        end = int(boundaries[np.searchsorted(boundaries, number, side="right")])
        stage = leaves.stage[places[number]]
        before = int(places[number - 1]) if number and leaves.stage[places[number - 1]] == stage else None
        after = int(places[end]) if end < len(places) and leaves.stage[places[end]] == stage else None
        return _Run(int(places[number]), int(places[end - 1]), end - number, before, after)

    resharded = first & np.append(False, leaves.stage[places[1:]] == leaves.stage[places[:-1]])
    numbers = first.nonzero()[0]
    never = numbers[~resharded[numbers]]
    yield Problem("not_unsharded", never, lambda number: _not_unsharded(leaves, run(number)))
    yield Problem("resharded_in_use", resharded.nonzero()[0], lambda number: _resharded_in_use(leaves, run(number)))


class _Run(NamedTuple):
    """Uses of a stage in a row without its parameters, and the changes before and after them, where there are any."""

    first: int
    last: int
    uses: int
    before: int | None
    after: int | None


def _more(leaves: Leaves, run: _Run) -> str:
    """The uses behind the first one, in words."""
    if run.uses == 1:
        return ""
    end = f"until {_named(leaves, run.after)}" if run.after is not None else "to the end"
    return f" (and {run.uses - 1} more {end})"


def _named(leaves: Leaves, place: int) -> str:
    return f"{action_at(leaves, place)} at step {position(leaves, place)[1]}"


def _not_unsharded(leaves: Leaves, run: _Run) -> Finding:
    action, (rank, step) = action_at(leaves, run.first), position(leaves, run.first)
    unshard = Action(action.stage_index, UNSHARD)
    late = run.after is not None and leaves.is_kind(np.array([run.after]), UNSHARD).all()
    return Finding(
        "not_unsharded",
        rank,
        step,
        action,
        f"{action} runs on a stage that was not unsharded{_more(leaves, run)}",
        f"{'move' if late else 'add'} {unshard} before it",
        ((rank, step),),
    )


def _resharded_in_use(leaves: Leaves, run: _Run) -> Finding:
    action, (rank, step) = action_at(leaves, run.first), position(leaves, run.first)
    assert run.before is not None
    reshard, unshard = action_at(leaves, run.before), Action(action.stage_index, UNSHARD)
    if run.after is None:
        fix = f"move {reshard} behind {action_at(leaves, run.last)}"
    elif leaves.is_kind(np.array([run.after]), UNSHARD).all():
        fix = f"move {reshard} behind {action_at(leaves, run.last)}, or {unshard} before {action}"
    else:
        fix = f"drop that {reshard}, or add {unshard} before {action}"
    return Finding(
        "resharded_in_use",
        rank,
        step,
        action,
        f"{action} runs on a stage that was resharded before it, by {_named(leaves, run.before)}{_more(leaves, run)}",
        fix,
        (position(leaves, run.before), (rank, step)),
    )
