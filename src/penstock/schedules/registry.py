"""Looks up and builds schedules by name."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from penstock.errors import CostsError, SizeError, UnknownScheduleError
from penstock.ir.numbers import whole_number
from penstock.schedules.cost_fitting import fit_to_costs
from penstock.schedules.dual_pipe_v import dual_pipe_v
from penstock.schedules.forward_only import forward_only
from penstock.schedules.gpipe import gpipe
from penstock.schedules.interleaved_one_f_one_b import interleaved_one_f_one_b
from penstock.schedules.interleaved_zero_bubble import interleaved_zero_bubble
from penstock.schedules.looped_bfs import looped_bfs
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.schedules.v_half import v_half
from penstock.schedules.v_min import v_min
from penstock.schedules.zb_h1 import zb_h1
from penstock.schedules.zb_h2 import zb_h2
from penstock.schedules.zbv_zero_bubble import zbv_zero_bubble

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.ir.schedule import Schedule
    from penstock.schedules.action_costs import StageCosts


@dataclass(frozen=True, slots=True)
class Recipe:
    """A schedule that can be built by name.

    Attributes:
        name: its name; case and punctuation do not matter.
        generate: the pure function that builds it.
        stages_per_rank: the default number of stages per rank.
        any_stages: whether another number of stages per rank is possible.
        fits_costs: whether it can be built for given costs: those that split the backward can.
        summary: a description in one line.
    """

    name: str
    generate: Callable[..., Schedule]
    stages_per_rank: int
    any_stages: bool
    fits_costs: bool
    summary: str


def _recipe(
    name: str,
    generate: Callable[..., Schedule],
    stages_per_rank: int,
    *,
    any_stages: bool = False,
    fits_costs: bool = False,
) -> Recipe:
    summary = (generate.__doc__ or "").partition("\n")[0]
    return Recipe(name, generate, stages_per_rank, any_stages, fits_costs, summary)


#: Every schedule, the classic ones first.
RECIPES: Final = (
    _recipe("ForwardOnly", forward_only, 1, any_stages=True),
    _recipe("GPipe", gpipe, 1),
    _recipe("1F1B", one_f_one_b, 1),
    _recipe("Interleaved1F1B", interleaved_one_f_one_b, 2, any_stages=True),
    _recipe("LoopedBFS", looped_bfs, 2, any_stages=True),
    _recipe("ZB-H1", zb_h1, 1, fits_costs=True),
    _recipe("ZB-H2", zb_h2, 1, fits_costs=True),
    _recipe("InterleavedZeroBubble", interleaved_zero_bubble, 2, any_stages=True, fits_costs=True),
    _recipe("ZBVZeroBubble", zbv_zero_bubble, 2, fits_costs=True),
    _recipe("V-Half", v_half, 2, fits_costs=True),
    _recipe("V-Min", v_min, 2, fits_costs=True),
    _recipe("DualPipeV", dual_pipe_v, 2),
)


def recipe(name: str) -> Recipe:
    """Return the recipe with this name, regardless of case and punctuation.

    >>> recipe("zbh1").name
    'ZB-H1'
    >>> recipe("interleaved-1f1b").stages_per_rank
    2
    """
    found = _BY_KEY.get(_key(str(name)))
    if found is None:
        near = dict.fromkeys(_BY_KEY[key].name for key in get_close_matches(_key(str(name)), _BY_KEY, n=3))
        raise UnknownScheduleError(str(name), near=list(near), known=[known.name for known in RECIPES])
    return found


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    costs: StageCosts | None = None,
) -> Schedule:
    """Build the schedule with this name.

    Args:
        name: e.g. ``"1F1B"``; ``penstock show`` lists them all.
        ranks: the number of ranks of the pipeline.
        microbatches: the number of microbatches in a training step; any positive number works.
        stages_per_rank: the number of stages per rank, for the schedules that allow several.
        costs: what the actions cost, to place weight gradients accordingly; for the schedules that split the backward.
            The span is then no longer than without costs, and the memory no larger.

    >>> build("GPipe", ranks=2, microbatches=2)
    <Schedule GPipe: 2 ranks, 2 stages, 2 microbatches, 8 actions>
    """
    chosen = recipe(name)
    schedule = chosen.generate(ranks, microbatches, *_stages(chosen, stages_per_rank))
    if costs is None:
        return schedule
    if not chosen.fits_costs:
        able = ", ".join(known.name for known in RECIPES if known.fits_costs)
        raise CostsError(f"{chosen.name} does not depend on costs; omit costs=, or choose one of {able}", value=costs)
    return fit_to_costs(schedule, costs)


def _stages(chosen: Recipe, stages_per_rank: int | None) -> tuple[int, ...]:
    """Return the number of stages per rank, if the generator takes one."""
    if chosen.any_stages:
        return (chosen.stages_per_rank if stages_per_rank is None else stages_per_rank,)
    if stages_per_rank is not None and whole_number("stages_per_rank", stages_per_rank) != chosen.stages_per_rank:
        raise SizeError(
            f"{chosen.name} has {chosen.stages_per_rank} stage{'s' * (chosen.stages_per_rank > 1)} per rank, not "
            f"{stages_per_rank}; omit stages_per_rank",
            field="stages_per_rank",
            value=stages_per_rank,
        )
    return ()


def _key(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


#: Other common names, from PyTorch and from papers.
_ALIASES: Final = {"zbv": "ZBVZeroBubble", "zb1p": "InterleavedZeroBubble", "interleaved": "Interleaved1F1B"}

_BY_KEY: Final = {_key(known.name): known for known in RECIPES}
_BY_KEY.update({f"schedule{key}": known for key, known in list(_BY_KEY.items())})
_BY_KEY.update({alias: _BY_KEY[_key(name)] for alias, name in _ALIASES.items()})
