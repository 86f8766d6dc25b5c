"""Orders that nobody has designed: any that respects what depends on what."""

from __future__ import annotations

from random import Random


def random_order(
    random: Random, rank_of: tuple[int, ...], ranks: int, microbatches: int, split: bool
) -> list[list[str]]:
    """The rows of a schedule, drawn action by action; each rank runs its part of one order over all ranks.

    Args:
        random: where from.
        rank_of: the rank of each stage.
        ranks: how many ranks there are; one may have no stage.
        microbatches: how many microbatches there are.
        split: whether each backward is drawn to be whole or in two halves; else all are whole.
    """
    last = len(rank_of) - 1
    halves = {
        (stage, microbatch): split and random.random() < 0.6
        for stage in range(last + 1)
        for microbatch in range(microbatches)
    }
    ready = [(0, "F", microbatch) for microbatch in range(microbatches)]
    rows: list[list[str]] = [[] for _ in range(ranks)]
    hurry = random.choice([1, 3, 10])  # how much rather a backward is drawn than a forward
    while ready:
        weights = [hurry if kind == "B" else 1 for _, kind, _ in ready]
        (chosen,) = random.choices(range(len(ready)), weights)
        stage, kind, microbatch = ready.pop(chosen)
        is_split = kind == "B" and halves[stage, microbatch]
        rows[rank_of[stage]].append(f"{stage}{'I' if is_split else kind}{microbatch}")
        if is_split:
            ready.append((stage, "W", microbatch))
        if kind == "F":
            ready.append((stage + 1, "F", microbatch) if stage < last else (stage, "B", microbatch))
        elif kind == "B" and stage > 0:
            ready.append((stage - 1, "B", microbatch))
    return rows
