"""Random orders that run, for random stages, edges and placements: what bounds and limits are tested against."""

import random

from penstock.errors import VerificationError
from penstock.ir.edges import Edge, chain, links
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.simulation.costs import Costs


def random_placement(chance: random.Random, ranks: int) -> Placement:
    kind = chance.choice(["loop", "v", "any"])
    if kind != "any":
        return getattr(Placement, kind)(ranks, chance.randint(1, 2 * ranks))
    stages = chance.randint(1, 2 * ranks + 1)
    return Placement(tuple(chance.randrange(ranks) for _ in range(stages)), ranks)


def random_edges(chance: random.Random, stages: int) -> list[Edge]:
    """Return a chain, a chain with further edges, or edges that leave gaps."""
    further = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    kind = chance.choice(["chain", "more", "other"])
    edges = list(chain(stages)) if kind != "other" else []
    if kind != "chain":
        picked = chance.sample(further, chance.randint(0, min(len(further), stages)))
        edges += [Edge(a, (b,), "more", chance.random() < 0.7) for a, b in picked]
    return sorted(edges, key=lambda edge: edge.source)


def random_costs(chance: random.Random, stages: int, edges: int, *, fine: bool = True) -> Costs:
    def times(least: float = 0.0) -> list[float]:
        most = chance.choice([1, 3])
        pick = chance.choice([lambda: float(chance.randint(int(least), most)), lambda: chance.uniform(least, most)])
        values = [pick() for _ in range(stages)]
        return values if chance.random() < 0.6 else values[:1] * stages

    inward, weight = times(), times()
    given = {"forward": times(), "backward_input": inward, "backward_weight": weight, "activation": times()}
    if fine:
        given["latency"] = [chance.choice([0.0, 0.0, 0.5, chance.random() * 2]) for _ in range(edges)]
        given["dispatch"] = chance.choice([0.0, 0.0, 0.1, chance.random()])
        given["overlap"] = chance.choice([1.0, 1.0, 0.7, 1.2])
        given["input_release"] = [chance.choice([0.0, 0.5, 1.0, chance.random()]) for _ in range(stages)]
        given["static"], given["optimizer"] = times(), times()
        if chance.random() < 0.3:
            given["backward"] = [(i + w) * chance.uniform(0.3, 1.3) for i, w in zip(inward, weight, strict=True)]
    return Costs(**given)


class _Stages:
    """Which actions can run next, in a schedule that grows action by action."""

    def __init__(self, edges: list[Edge], stages: int, microbatches: int, splits: list[bool]) -> None:
        between = links(edges)
        self.sources = [[link.source for link in between if link.target == s] for s in range(stages)]
        self.targets = [[link.target for link in between if link.source == s and link.gradient] for s in range(stages)]
        self.splits = splits
        self.done: set[tuple[str, int, int]] = set()
        self.open = [("F", s, m) for s in range(stages) for m in range(microbatches)]

    def ready(self) -> list[tuple[str, int, int]]:
        return [action for action in self.open if self._can_run(*action)]

    def run(self, kind: str, stage: int, microbatch: int) -> None:
        self.open.remove((kind, stage, microbatch))
        self.done.add((kind, stage, microbatch))
        if kind == "F":
            self.open.append(("B", stage, microbatch))
        elif kind == "I":
            self.open.append(("W", stage, microbatch))

    def _can_run(self, kind: str, stage: int, microbatch: int) -> bool:
        if kind == "F":
            return all(("F", other, microbatch) in self.done for other in self.sources[stage])
        return kind == "W" or all(
            ("B", other, microbatch) in self.done or ("I", other, microbatch) in self.done
            for other in self.targets[stage]
        )


def random_schedule(
    chance: random.Random, placement: Placement, microbatches: int, edges: list[Edge], splits: list[bool]
) -> Schedule:
    """Return an order in which some action that can run runs next, with a random taste for F, B, I, W and overlaps."""
    stages = _Stages(edges, placement.stages, microbatches, splits)
    taste = {kind: chance.choice([0.01, 0.3, 1.0, 10.0]) for kind in "FBW"}
    fused = chance.choice([0.0, 0.0, 0.5, 1.0])
    in_order = chance.random() < 0.7
    rows: list[list[str]] = [[] for _ in range(placement.ranks)]
    while stages.open:
        ready = stages.ready()
        if in_order:
            ready = [a for a in ready if not any(b[:2] == a[:2] and b[2] < a[2] for b in ready)]
        kind, stage, microbatch = chance.choices(ready, [taste[kind] for kind, _, _ in ready])[0]
        if kind == "B" and stages.splits[stage] and chance.random() >= fused:
            stages.open[stages.open.index((kind, stage, microbatch))] = ("I", stage, microbatch)
            kind = "I"
        stages.run(kind, stage, microbatch)
        rows[placement.rank_of[stage]].append(f"{stage}{kind}{microbatch}")
    plain = Schedule(rows, placement=placement, microbatches=microbatches, edges=edges)
    return _with_overlaps(chance, plain) if chance.random() < 0.3 else plain


def _with_overlaps(chance: random.Random, schedule: Schedule) -> Schedule:
    """Return the schedule with some neighbours overlapped, as many as still run."""
    from penstock.verification.check import verify

    rows = [[str(action) for action in row] for row in schedule.actions]
    for row in rows:
        place = 0
        while place + 1 < len(row):
            pair = sorted(row[place : place + 2], key=lambda text: "F" not in text)
            if "F" in pair[0] and ("B" in pair[1] or "I" in pair[1]) and chance.random() < 0.5:
                kept = row[place : place + 2]
                row[place : place + 2] = [f"({pair[0]};{pair[1]})OVERLAP_F_B"]
                try:
                    schedule_now = Schedule(
                        rows, placement=schedule.placement, microbatches=schedule.microbatches, edges=schedule.edges
                    )
                    verify(schedule_now)
                    schedule = schedule_now
                except VerificationError:
                    row[place : place + 1] = kept
            place += 1
    return schedule
