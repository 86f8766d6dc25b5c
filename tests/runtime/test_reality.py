"""What the verifier says of a schedule is what happens when it runs: it ends with the right gradients, or it blocks.

The schedules are made by chance: any order of compute actions that can be, on any placement, lowered in any way; then
their communication is shuffled. The verifier says which of them are free of deadlock under a communication model, and
the transport in threads, which plays that model, shows whether it is right. No run waits for a time to pass: when all
ranks wait for each other, the transport knows.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import StepError
from penstock.graph.comm_model import MODELS
from penstock.ir.actions import RECV_B, RECV_F, SEND_B, SEND_F
from penstock.runtime import Pipeline, run_in_threads

TRANSFERS = {SEND_F, SEND_B, RECV_F, RECV_B}
ALL_MODELS = [*MODELS, ps.CommModel("bounded(2)", "pair"), ps.CommModel("bounded(2)", "direction")]
WIDTH = 2


@pytest.fixture(autouse=True)
def _exact():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


# Schedules by chance --------------------------------------------------------------------------------------------------


def random_schedule(chance: random.Random) -> ps.Schedule:
    """Compute actions in any order that what they need allows, on any placement."""
    ranks, microbatches = chance.randint(1, 4), chance.randint(1, 4)
    rank_of = [*range(ranks), *chance.choices(range(ranks), k=chance.randint(0, 3))]
    chance.shuffle(rank_of)
    stages = len(rank_of)
    needs: dict[tuple[int, str, int], set[tuple[int, str, int]]] = {}
    split = {
        (stage, microbatch): chance.random() < 0.5 for stage in range(stages) for microbatch in range(microbatches)
    }
    for stage, microbatch in split:
        needs[stage, "F", microbatch] = {(stage - 1, "F", microbatch)} if stage else set()
        backward = "I" if split[stage, microbatch] else "B"
        needs[stage, backward, microbatch] = {(stage, "F", microbatch)}
        if stage < stages - 1:
            needs[stage, backward, microbatch].add(
                (stage + 1, "I" if split[stage + 1, microbatch] else "B", microbatch)
            )
        if backward == "I":
            needs[stage, "W", microbatch] = {(stage, "I", microbatch)}
    rows: list[list[str]] = [[] for _ in range(ranks)]
    done: set[tuple[int, str, int]] = set()
    eager = chance.random()  # how much forwards are preferred: from GPipe to 1F1B
    while len(done) < len(needs):
        ready = [action for action in needs if action not in done and needs[action] <= done]
        forwards = [action for action in ready if action[1] == "F"]
        action = chance.choice(forwards if forwards and chance.random() < eager else ready)
        done.add(action)
        rows[rank_of[action[0]]].append("{}{}{}".format(*action))
    return ps.Schedule(
        [_overlapped(row, chance) for row in rows],
        placement=ps.Placement(tuple(rank_of), ranks),
        microbatches=microbatches,
    )


def _overlapped(row: list[str], chance: random.Random) -> list[str]:
    """Some forwards together with the backward behind them."""
    if chance.random() < 0.7:
        return row
    cells: list[str] = []
    for cell in row:
        if (
            cells
            and "F" in cells[-1]
            and ";" not in cells[-1]
            and ("B" in cell or "I" in cell)
            and chance.random() < 0.3
        ):
            cells[-1] = f"({cells[-1]};{cell})OVERLAP_F_B"
        else:
            cells.append(cell)
    return cells


def lowered_by_chance(schedule: ps.Schedule, chance: random.Random, model: ps.CommModel) -> ps.Schedule | None:
    """Lowered in any way that is safe under the model; None if the schedule itself would not run."""
    options = {
        "merge_backward": chance.random() < 0.3,
        "unshard": chance.random() < 0.5,
        "reduce": chance.random() < 0.5,
        "defer_receives": model.lanes == "message" and chance.random() < 0.5,
    }
    try:
        return ps.lower(schedule, model=model, **options)
    except ps.VerificationError:
        return None


def shuffled(schedule: ps.Schedule, chance: random.Random, moves: int, model: ps.CommModel) -> tuple[ps.Schedule, str]:
    """The same with transfers elsewhere in their rows, and what the verifier says of it."""
    said = "runs"
    for _ in range(moves):
        rows = [list(row) for row in schedule.actions]
        row = chance.choice(rows)
        places = [place for place, action in enumerate(row) if action and action.computation_type in TRANSFERS]
        if not places:
            continue
        place = chance.choice(places)
        action = row.pop(place)
        row.insert(min(len(row), max(0, place + chance.choice([-4, -2, -1, 1, 2, 4]))), action)
        moved = ps.Schedule(rows, placement=schedule.placement, microbatches=schedule.microbatches)
        kinds = {finding.kind for finding in ps.check(moved, model=model)}
        if kinds <= {"deadlock"}:  # anything else is no question of communication
            schedule, said = moved, "deadlock" if kinds else "runs"
    return schedule, said


def outcomes(seed: int, model: ps.CommModel) -> dict[ps.Schedule, str]:
    """A schedule that was lowered by chance and its shuffles, each with what the verifier says of it."""
    chance = random.Random(f"{seed} {model}")
    lowered = lowered_by_chance(random_schedule(chance), chance, model)
    if lowered is None:
        return {}
    return {lowered: "runs"} | dict(shuffled(lowered, chance, moves, model) for moves in (2, 4, 8))


# Runs -----------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One tensor in and out, or two that both need a gradient."""

    def __init__(self, tensors: int, *, last: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.tensors = 1 if last else tensors

    def forward(self, value):
        x, more = value if isinstance(value, list) else (value, 0)
        y = torch.tanh(self.layer(x) + more)
        return y if self.tensors == 1 else [y, y * x]


def run(schedule: ps.Schedule, model: ps.CommModel, tensors: int = 1, shapes: str = "inferred") -> list[str]:
    """Train a batch under the model; returns which gradients, losses and outputs are not those of the unsplit model."""
    chance = torch.Generator().manual_seed(schedule.stages)
    modules = [Block(tensors, last=index == schedule.stages - 1) for index in range(schedule.stages)]
    whole = nn.Sequential(*deepcopy(modules))
    size = schedule.microbatches + 1
    x, y = torch.randn(size, WIDTH, generator=chance), torch.randn(size, WIDTH, generator=chance)
    losses: list[torch.Tensor] = []

    def worker(transport):
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        pipe = Pipeline(mine, schedule, loss_fn=functional.mse_loss, transport=transport, verify=False, shapes=shapes)
        return pipe.step(
            *([x] if pipe.has_first else []),
            target=y if pipe.has_last else None,
            losses=losses if pipe.has_last else None,
        )

    outputs = run_in_threads(worker, schedule.ranks, model=model, timeout=60)
    output = outputs[schedule.placement.rank_of[-1]]
    expected = whole(x)
    functional.mse_loss(expected, y).backward()
    wrong = [] if torch.allclose(output, expected, atol=1e-12) else ["output"]
    parts = zip(expected.tensor_split(schedule.microbatches), y.tensor_split(schedule.microbatches), strict=True)
    wanted = torch.stack([functional.mse_loss(*part) for part in parts])
    wrong += [] if torch.allclose(torch.stack(losses), wanted, atol=1e-12) else ["losses"]
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            gradient = whole[index].get_parameter(name).grad
            if parameter.grad is None or not torch.allclose(parameter.grad, gradient, atol=1e-10):
                wrong.append(f"gradient of stage {index} {name}")
    return wrong


def disagreements(
    seeds: range, models: list[ps.CommModel], tensors: int = 1, shapes: str = "inferred"
) -> tuple[Counter, list[str]]:
    """Run everything; count what was found, and say where the verifier was wrong."""
    counts: Counter = Counter()
    wrong: list[str] = []
    for seed in seeds:
        model = models[seed % len(models)]
        for schedule, said in outcomes(seed, model).items():
            try:
                differences = run(schedule, model, tensors, shapes)
                happened = "runs"
            except StepError as error:
                differences = []
                happened = "deadlock" if "deadlock" in str(error) else f"fails: {error}"
            counts[f"{said}, under {model}"] += 1
            counts[said] += 1
            if happened != said or differences:
                wrong.append(f"seed {seed} under {model}: said {said}, {happened} {differences}\n{schedule.grid()}")
    return counts, wrong


def describe(counts: Counter) -> str:
    return "\n".join(f"{counts[name]:5} {name}" for name in sorted(counts))


def test_the_verifier_is_right_about_reality(capsys):
    """300 schedules and more that run, 100 and more that block: in all of them it is right."""
    counts, wrong = disagreements(range(18 * len(ALL_MODELS)), ALL_MODELS)
    with capsys.disabled():
        sys.stdout.write(f" {counts['runs']} random schedules ran, {counts['deadlock']} blocked, as predicted ")
    assert wrong == []
    assert counts["runs"] >= 300, describe(counts)
    assert counts["deadlock"] >= 100, describe(counts)
    for model in ALL_MODELS:
        assert counts[f"runs, under {model}"] > 0, describe(counts)
        assert counts[f"deadlock, under {model}"] > 0, describe(counts)


def test_a_message_of_several_tensors_is_one_message():
    counts, wrong = disagreements(range(500, 500 + 4 * len(ALL_MODELS)), ALL_MODELS, tensors=2)
    assert wrong == []
    assert min(counts["runs"], counts["deadlock"]) > 20, describe(counts)


def test_described_messages():
    """With shapes per microbatch, what is proved for a lane per rank runs, whatever the lanes are."""
    counts: Counter = Counter()
    for seed in range(700, 700 + 10 * len(ALL_MODELS)):
        model = ALL_MODELS[seed % len(ALL_MODELS)]
        proved_for = model if model.lanes == "message" else ps.CommModel(model.buffering, "rank")
        for schedule, said in outcomes(seed, proved_for).items():
            if said == "runs":
                assert run(schedule, model, tensors=2, shapes="per_microbatch") == [], f"seed {seed}\n{schedule.grid()}"
                counts[model] += 1
    assert min(counts[model] for model in ALL_MODELS) > 3, counts


@pytest.mark.full
def test_the_verifier_is_right_about_much_more():
    counts, wrong = disagreements(range(1000, 1000 + 120 * len(ALL_MODELS)), ALL_MODELS)
    assert wrong == []
    assert counts["runs"] >= 2000, describe(counts)
