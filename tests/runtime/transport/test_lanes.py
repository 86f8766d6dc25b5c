"""The thread transport against the literal machine: a schedule completes in both or in neither."""

import random
import re

import pytest
import torch

import literal
import penstock as ps
from penstock.errors import StepError
from penstock.graph.comm_model import CommModel
from penstock.runtime.transport.threads import run_in_threads

MODELS = [
    CommModel(buffering, lanes)
    for buffering in ("rendezvous", "bounded(1)", "bounded(2)", "eager")
    for lanes in ("rank", "pair", "direction", "message")
]
CASES = 40
ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B)(\d+)")


def rows_of(random_numbers):
    """A small lowered schedule with some actions of each rank out of their order."""
    name = random_numbers.choice(["GPipe", "1F1B", "Interleaved1F1B"])
    schedule = ps.build(name, ranks=random_numbers.choice([2, 3]), microbatches=random_numbers.choice([2, 3]))
    lowered = ps.lower(schedule)
    rows = [[str(action) for action in row if "SHARD" not in str(action)] for row in lowered.actions]
    rows = [[cell for cell in row if "REDUCE" not in cell] for row in rows]
    for row in rows:
        for _ in range(random_numbers.choice([0, 1, 1, 2])):
            first = random_numbers.randrange(len(row) - 1)
            second = min(len(row) - 1, first + random_numbers.randrange(1, 4))
            row[first], row[second] = row[second], row[first]
    return rows, list(schedule.placement.rank_of), schedule.microbatches


STEP = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1, "F": -1, "B": 1}


def parsed(cell):
    """Stage, kind, microbatch, F or B, and the stage at the other end."""
    stage, kind, microbatch = ACTION.fullmatch(cell).groups()
    return int(stage), kind, int(microbatch), kind[-1], int(stage) + STEP[kind]


def has_inputs_in_time(row, stages):
    """Whether a rank has the inputs of every action in time, if all that it has posted a receive for arrives."""
    there = {(label, stage, microbatch) for label, stage in (("F", -1), ("B", stages)) for microbatch in range(9)}
    for stage, kind, microbatch, label, other in map(parsed, row):
        if kind.startswith("RECV"):
            there.add((label, other, microbatch))
            continue
        needed = {(label, stage if kind.startswith("SEND") else other, microbatch)}
        needed |= {("F", stage, microbatch)} if kind == "B" else set()
        if not needed <= there:
            return False
        there.add((label, stage, microbatch))
    return True


def run(transport, row, rank_of):
    """Run a row: post transfers, wait for what a compute action needs, and for all sends at the end."""
    pending, sent, values = {}, [], {}
    transport.progress.labels = row
    for index, cell in enumerate(row):
        transport.progress.index = index
        stage, kind, microbatch, label, other = parsed(cell)
        there, here = (label, other, microbatch), (label, stage, microbatch)
        if kind.startswith("SEND"):
            sent.append(transport.send(values[here], rank_of[other], tag(*here)))
        elif kind.startswith("RECV"):
            values[there] = torch.zeros(1)
            pending[there] = transport.receive(values[there], rank_of[other], tag(*there))
        else:
            if there in pending:
                pending.pop(there).wait()
            values[here] = values.get(there, torch.zeros(1)) + 1
    for transfer in sent:
        transfer.wait()
    return {key: value.item() for key, value in values.items()}


def tag(label, stage, microbatch):
    return (stage * 100 + microbatch) * 2 + (label == "B")


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_completes_if_the_literal_machine_does(model):
    random_numbers = random.Random(f"{model}")
    completed = stuck = 0
    while completed + stuck < CASES:
        rows, rank_of, microbatches = rows_of(random_numbers)
        if not all(has_inputs_in_time(row, len(rank_of)) for row in rows):
            continue
        verdict = literal.verdict(rows, rank_of, microbatches, model.buffering, model.lanes)
        if verdict is None:
            results = run_in_threads(lambda t: run(t, rows[t.rank], rank_of), len(rows), model=model, timeout=20)  # noqa: B023
            for values in results:
                assert all(value == stage + 1 for (label, stage, _), value in values.items() if label == "F")
                assert all(value == len(rank_of) - stage for (label, stage, _), value in values.items() if label == "B")
            completed += 1
        elif "is stuck" in verdict or "never completes" in verdict:
            with pytest.raises(StepError, match=r"deadlock: rank \d waits in"):
                run_in_threads(lambda t: run(t, rows[t.rank], rank_of), len(rows), model=model, timeout=20)  # noqa: B023
            stuck += 1
    assert completed > 3
    assert stuck > 3 or (model.lanes, model.buffering) != ("pair", "rendezvous")
