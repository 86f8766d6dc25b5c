"""Defines the options of commands that can lower a schedule first."""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias

import typer

from penstock.ir.schedule import Schedule
from penstock.lowering.pipeline import lower

Lower: TypeAlias = Annotated[
    bool, typer.Option("--lower", help="Lower it first: add transfers, sharding and reductions.")
]
DeferReceives: TypeAlias = Annotated[
    bool, typer.Option("--defer-receives", help="With --lower: post each receive right before it is needed.")
]
LookAhead: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--look-ahead",
        metavar="K",
        min=0,
        help="With --defer-receives: post at most K receives ahead of the next one that is needed.",
    ),
]
MergeBackward: TypeAlias = Annotated[
    bool, typer.Option("--merge-backward", help="With --lower: merge an adjacent I and W into one B.")
]
NoUnshard: TypeAlias = Annotated[
    bool, typer.Option("--no-unshard", help="With --lower: do not add UNSHARD and RESHARD, which are for FSDP.")
]


class Lowering(NamedTuple):
    """The options of a command."""

    lower: bool
    defer_receives: bool
    look_ahead: int | None
    merge_backward: bool
    no_unshard: bool

    def of(self, schedule: Schedule) -> Schedule:
        """Lower the schedule as requested; return it unchanged without --lower."""
        if self.look_ahead is not None and not self.defer_receives:
            raise typer.BadParameter("only applies with --defer-receives", param_hint="--look-ahead")
        for option in ("defer_receives", "merge_backward", "no_unshard"):
            if getattr(self, option) and not self.lower:
                raise typer.BadParameter("only applies with --lower", param_hint=f"--{option.replace('_', '-')}")
        if not self.lower:
            return schedule
        return lower(
            schedule,
            merge_backward=self.merge_backward,
            unshard=not self.no_unshard,
            defer_receives=self.defer_receives,
            look_ahead=self.look_ahead,
        )
