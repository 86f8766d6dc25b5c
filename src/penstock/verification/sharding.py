"""Checks that parameters are unsharded before they are used, and resharded after their last use."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.graph.array_blocks import blocks, row_blocks
from penstock.graph.sorting import stable_order
from penstock.ir import packed
from penstock.ir.actions import COMPUTE, RESHARD, UNSHARD, Action
from penstock.verification.findings import Finding, Problem, action_at, describe_at, rank_and_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.graph.action_table import ActionTable, Positions


def check_sharding(actions: ActionTable) -> Iterator[Problem]:
    """Find uses of sharded parameters. Finds nothing in a schedule without any UNSHARD or RESHARD."""
    if not len(actions.positions_of(UNSHARD, RESHARD)):
        return
    positions = actions.positions_of(UNSHARD, RESHARD, *COMPUTE)
    if actions.all_placed and all(_Uses.of(actions, mine).is_consistent for mine in _in_parts(actions, positions)):
        return
    positions, stage, unshards, changes, gathered = _Uses.of(actions, positions)
    begins = np.append(True, stage[1:] != stage[:-1])
    behind_change = begins | np.append(False, changes[:-1])
    starved = ~changes & ~gathered
    yield from _starved(actions, positions, starved & behind_change, changes | begins)
    yield Problem(
        "unsharded_twice",
        positions[unshards & gathered],
        describe_at(actions, "unsharded_twice", "{}, but the stage is already unsharded", "drop it"),
    )
    # After uses that lack an UNSHARD, the RESHARD is not the mistake: it is correct once the UNSHARD is added.
    yield Problem(
        "resharded_twice",
        positions[changes & ~unshards & ~gathered & behind_change],
        describe_at(actions, "resharded_twice", "{}, but the stage is not unsharded", "drop it"),
    )


class _Uses(NamedTuple):
    """The uses of parameters and their UNSHARDs and RESHARDs (changes), stage by stage, in order.

    Attributes:
        positions: the positions of all of them.
        stage: the stage of each.
        unshards: whether each is an UNSHARD.
        changes: whether each is an UNSHARD or a RESHARD.
        gathered: whether the parameters are unsharded when each begins.
    """

    positions: Positions
    stage: Positions
    unshards: NDArray[np.bool_]
    changes: NDArray[np.bool_]
    gathered: NDArray[np.bool_]

    @classmethod
    def of(cls, actions: ActionTable, positions: Positions) -> _Uses:
        """Return those at these positions."""
        stage = packed.stages(actions.codes[positions])
        order = stable_order(stage)
        positions, stage = positions[order], stage[order]
        unshards = actions.is_kind(positions, UNSHARD)
        changes = unshards | actions.is_kind(positions, RESHARD)
        # The last change before each, if it is of the same stage.
        last = np.zeros(len(positions), np.int64)
        np.maximum.accumulate((changes * np.arange(len(positions)))[:-1], out=last[1:])
        gathered = unshards[last] & (stage[last] == stage)
        gathered[:1] = False
        return cls(positions, stage, unshards, changes, gathered)

    @property
    def is_consistent(self) -> bool:
        """Whether every UNSHARD finds the parameters sharded, and everything else finds them unsharded."""
        return bool((self.gathered != self.unshards).all())


def _in_parts(actions: ActionTable, positions: Positions) -> Iterator[Positions]:
    """Yield the positions of some ranks at a time, which fill a block. All must be placed: a stage is on one rank."""
    if len(blocks(len(positions))) == 1:
        return iter((positions,))
    bounds = positions.searchsorted(actions.offsets).tolist()
    return (positions[bounds[ranks.start] : bounds[ranks.stop]] for ranks in row_blocks(bounds))


def _starved(
    actions: ActionTable, positions: Positions, first: NDArray[np.bool_], ends: NDArray[np.bool_]
) -> Iterator[Problem]:
    """Report uses of sharded parameters: one problem for all uses up to the next change, at the first of them.

    Args:
        actions: the actions.
        positions: the positions of uses and changes, stage by stage, in order.
        first: whether each is the first use of sharded parameters.
        ends: whether each is a change, or the first of its stage.
    """
    boundaries = np.append(ends.nonzero()[0], len(positions))

    def run(number: int) -> _Run:
        end = int(boundaries[np.searchsorted(boundaries, number, side="right")])
        stage = actions.stage[positions[number]]
        before = int(positions[number - 1]) if number and actions.stage[positions[number - 1]] == stage else None
        after = int(positions[end]) if end < len(positions) and actions.stage[positions[end]] == stage else None
        return _Run(int(positions[number]), int(positions[end - 1]), end - number, before, after)

    resharded = first & np.append(False, actions.stage[positions[1:]] == actions.stage[positions[:-1]])
    numbers = first.nonzero()[0]
    never = numbers[~resharded[numbers]]
    yield Problem("not_unsharded", never, lambda number: _not_unsharded(actions, run(number)))
    yield Problem("resharded_in_use", resharded.nonzero()[0], lambda number: _resharded_in_use(actions, run(number)))


class _Run(NamedTuple):
    """Consecutive uses of a stage while it is sharded, and the changes before and after them, if any."""

    first: int
    last: int
    uses: int
    before: int | None
    after: int | None


def _more(actions: ActionTable, run: _Run) -> str:
    """Describe the uses after the first one."""
    if run.uses == 1:
        return ""
    end = f"until {_named(actions, run.after)}" if run.after is not None else "to the end"
    return f" (and {run.uses - 1} more {end})"


def _named(actions: ActionTable, position: int) -> str:
    return f"{action_at(actions, position)} at step {rank_and_step(actions, position)[1]}"


def _not_unsharded(actions: ActionTable, run: _Run) -> Finding:
    action, (rank, step) = action_at(actions, run.first), rank_and_step(actions, run.first)
    unshard = Action(action.stage_index, UNSHARD)
    late = run.after is not None and actions.is_kind(np.array([run.after]), UNSHARD).all()
    return Finding(
        "not_unsharded",
        rank,
        step,
        action,
        f"{action} runs on a stage that is not unsharded{_more(actions, run)}",
        f"{'move' if late else 'add'} {unshard} before it",
        ((rank, step),),
    )


def _resharded_in_use(actions: ActionTable, run: _Run) -> Finding:
    action, (rank, step) = action_at(actions, run.first), rank_and_step(actions, run.first)
    assert run.before is not None
    reshard, unshard = action_at(actions, run.before), Action(action.stage_index, UNSHARD)
    if run.after is None:
        fix = f"move {reshard} after {action_at(actions, run.last)}"
    elif actions.is_kind(np.array([run.after]), UNSHARD).all():
        fix = f"move {reshard} after {action_at(actions, run.last)}, or {unshard} before {action}"
    else:
        fix = f"drop that {reshard}, or add {unshard} before {action}"
    return Finding(
        "resharded_in_use",
        rank,
        step,
        action,
        f"{action} runs on a stage that was already resharded, by {_named(actions, run.before)}{_more(actions, run)}",
        fix,
        (rank_and_step(actions, run.before), (rank, step)),
    )
