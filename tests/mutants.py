"""Schedules with one thing changed, by chance."""

import penstock as ps
from penstock.ir.actions import SHARDING
from penstock.ir.edges import Edge, chain

TYPES = [str(kind) for kind in ps.ComputationType if kind is not ps.ComputationType.OVERLAP_F_B]


def text_rows(schedule):
    return [["" if cell is None else str(cell) for cell in row] for row in schedule.actions]


def retyped(cell, chance):
    action = ps.Action.from_str(cell)
    if action.sub_actions is not None:
        return str(chance.choice([*action.sub_actions, ps.Action.overlap(*reversed(action.sub_actions))]))
    kind = chance.choice(TYPES)
    microbatch = None if kind in SHARDING else (action.microbatch_index or 0)
    return with_peer(ps.Action(action.stage_index, kind, microbatch), action.peer_index)


def with_peer(action, peer):
    """The action with this other stage, or with none if it cannot have it."""
    try:
        return str(action._replace(peer_index=peer))
    except ps.ActionError:
        return str(action)


def reindexed(cell, chance, schedule):
    action = ps.Action.from_str(cell)
    if action.sub_actions is not None:
        first, *rest = action.sub_actions
        return str(ps.Action.overlap(ps.Action.from_str(reindexed(str(first), chance, schedule)), *rest))
    if action.microbatch_index is not None and chance.random() < 0.5:
        return str(action._replace(microbatch_index=chance.randrange(schedule.microbatches + 1)))
    elsewhere = ps.Action(chance.randrange(schedule.stages + 1), action.computation_type, action.microbatch_index)
    return with_peer(elsewhere, action.peer_index)


def redirected(cell, chance, schedule):
    action = ps.Action.from_str(cell)
    if action.sub_actions is not None:
        return cell
    return with_peer(action._replace(peer_index=None), chance.randrange(schedule.stages + 1))


def mutated(rows, schedule, chance):
    rows = [list(row) for row in rows]
    busy = [rank for rank, row in enumerate(rows) if row]
    if not busy:
        return rows  # everything has been deleted
    rank = chance.choice(busy)
    row, place = rows[rank], chance.randrange(len(rows[rank]))
    changes = ["delete", "duplicate", "swap", "retype", "reindex", "move"]
    change = chance.choice(changes if schedule.is_chain else [*changes, "redirect"])
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
    elif change == "redirect":
        row[place] = redirected(row[place], chance, schedule)
    else:
        row.insert(chance.randrange(len(row)), row.pop(place))
    return rows


def some_edges(stages, chance):
    """A chain, mostly, and some more edges, to several stages and without a gradient too."""
    edges = [Edge(stage, (stage + 1,), gradient=chance.random() < 0.8) for stage in range(stages - 1)]
    edges = [edge for edge in edges if chance.random() < 0.9]
    for _ in range(chance.randrange(4) if stages > 1 else 0):
        source = chance.randrange(stages - 1)
        targets = chance.sample(range(source + 1, stages), chance.randint(1, min(2, stages - 1 - source)))
        edges.append(Edge(source, tuple(targets), gradient=chance.random() < 0.8))
    return edges


def some_schedule(chance, *, skips=True):
    """A schedule in any order that can run: what is ready is taken by chance, on any placement."""
    ranks = chance.randint(1, 4)
    rank_of = [*range(ranks), *(chance.randrange(ranks) for _ in range(chance.randrange(4)))]
    chance.shuffle(rank_of)
    stages, microbatches = len(rank_of), chance.randint(1, 3)
    edges = some_edges(stages, chance) if skips else chain(stages)
    todo, done, rows = [], set(), [[] for _ in range(ranks)]
    for stage in range(stages):
        for microbatch in range(microbatches):
            kinds = chance.choice(["FB", "FIW"])
            todo += [(stage, kind, microbatch) for kind in kinds]
    while todo:
        ready = [leaf for leaf in todo if _is_ready(*leaf, done, edges)]
        leaf = stage, kind, microbatch = chance.choice(ready)
        todo.remove(leaf)
        done.add(("I" if kind == "B" else kind, stage, microbatch))
        rows[rank_of[stage]].append(f"{stage}{kind}{microbatch}")
    placement = ps.Placement(tuple(rank_of), ranks)
    return ps.Schedule(rows, placement=placement, microbatches=microbatches, edges=edges)


def _is_ready(stage, kind, microbatch, done, edges):
    if kind == "W":
        return ("I", stage, microbatch) in done
    if kind == "F":
        return all(("F", edge.source, microbatch) in done for edge in edges if stage in edge.targets)
    consumers = {target for edge in edges if edge.source == stage and edge.gradient for target in edge.targets}
    return ("F", stage, microbatch) in done and all(("I", target, microbatch) in done for target in consumers)
