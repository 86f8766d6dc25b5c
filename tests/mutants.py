"""Schedules with one thing changed, by chance."""

import penstock as ps
from penstock.ir.actions import SHARDING

TYPES = [str(kind) for kind in ps.ComputationType if kind is not ps.ComputationType.OVERLAP_F_B]


def text_rows(schedule):
    return [["" if cell is None else str(cell) for cell in row] for row in schedule.actions]


def retyped(cell, chance):
    action = ps.Action.from_str(cell)
    if action.sub_actions is not None:
        return str(chance.choice([*action.sub_actions, ps.Action.overlap(*reversed(action.sub_actions))]))
    kind = chance.choice(TYPES)
    microbatch = None if kind in SHARDING else (action.microbatch_index or 0)
    return str(ps.Action(action.stage_index, kind, microbatch))


def reindexed(cell, chance, schedule):
    action = ps.Action.from_str(cell)
    if action.sub_actions is not None:
        first, *rest = action.sub_actions
        return str(ps.Action.overlap(ps.Action.from_str(reindexed(str(first), chance, schedule)), *rest))
    if action.microbatch_index is not None and chance.random() < 0.5:
        return str(action._replace(microbatch_index=chance.randrange(schedule.microbatches + 1)))
    return str(action._replace(stage_index=chance.randrange(schedule.stages + 1)))


def mutated(rows, schedule, chance):
    rows = [list(row) for row in rows]
    rank = chance.choice([rank for rank, row in enumerate(rows) if row])
    row, place = rows[rank], chance.randrange(len(rows[rank]))
    change = chance.choice(["delete", "duplicate", "swap", "retype", "reindex", "move"])
    if change == "delete":
        del row[place]
    elif change == "duplicate":
        row.insert(chance.randrange(len(row) + 1), row[place])
    elif change == "swap":
        place = min(place, len(row) - 2) if len(row) > 1 else 0
        row[place : place + 2] = row[place : place + 2][::-1]
    elif change == "retype":
        row[place] = retyped(row[place], chance)
    elif change == "reindex":
        row[place] = reindexed(row[place], chance, schedule)
    else:
        row.insert(chance.randrange(len(row)), row.pop(place))
    return rows
