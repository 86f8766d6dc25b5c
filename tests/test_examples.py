"""The examples run, and with torch's package in place of ours they print the same losses."""

import json
from functools import cache

import pytest

import notebooks
from examples import FOLDER, SHARED, losses_of, losses_with_torch, recorded_losses

pytestmark = pytest.mark.processes


@cache
def ours(name, *arguments):
    """An example as it is."""
    return losses_of(FOLDER / name, *arguments)


@pytest.mark.parametrize(("name", "arguments"), SHARED)
def test_only_the_import_changes(name, arguments):
    lines = ours(name, *arguments)
    assert len(lines) == (10 if "--evaluate" in arguments else 8)
    texts, losses = _numbers(lines)
    kept_texts, kept = _numbers(recorded_losses(name, *arguments))
    assert texts == kept_texts
    assert losses == pytest.approx(kept, rel=1e-4), "they were recorded on another machine, maybe"
    assert losses[-1] < losses[0]


def _numbers(lines):
    parts = [line.rpartition(" ") for line in lines]
    return [text for text, _, _ in parts], [float(number) for _, _, number in parts]


@pytest.mark.full
@pytest.mark.parametrize(("name", "arguments"), SHARED)
def test_torch_prints_the_same(name, arguments):
    assert losses_with_torch(name, *arguments) == ours(name, *arguments)


def test_an_evaluation_in_a_v():
    lines = ours("several_stages_per_rank.py", "--schedule", "DualPipeV", "--evaluate")
    assert sum("evaluated" in line for line in lines) == 2


def test_a_hugging_face_model():
    lines = losses_of(FOLDER / "huggingface.py")
    texts, losses = _numbers(lines)
    assert len(texts) == 8
    assert losses[-1] < losses[0]
    one_texts, one = _numbers(losses_of(FOLDER / "huggingface.py", ranks=1))
    assert texts == one_texts
    assert losses == pytest.approx(one, rel=1e-3), "two ranks train as one does"


def test_under_torchrun():
    name, arguments = "one_stage_per_rank.py", ["--schedule", "1F1B"]
    assert losses_of(FOLDER / name, *arguments, launcher="torchrun") == ours(name, *arguments)


def test_a_traced_model():
    texts, losses = _numbers(losses_of(FOLDER / "traced.py"))
    assert len(texts) == 8
    assert losses[-1] < losses[0] / 2


def test_a_schedule_from_a_file():
    texts, losses = _numbers(losses_of(FOLDER / "schedule_from_csv.py"))
    assert len(texts) == 8
    assert losses[-1] < losses[0] / 2


def test_fsdp_and_a_pipeline():
    texts, losses = _numbers(losses_of(FOLDER / "fsdp_and_pipeline.py", ranks=4))
    assert len(texts) == 8
    assert losses[-1] < losses[0] / 2


@pytest.mark.full
def test_two_sharded_pipelines_train_as_one_does():
    texts, losses = _numbers(losses_of(FOLDER / "fsdp_and_pipeline.py", ranks=4))
    whole_texts, whole = _numbers(losses_of(FOLDER / "fsdp_and_pipeline.py", ranks=2))
    assert texts == whole_texts
    assert losses == pytest.approx(whole, rel=1e-4)


@pytest.mark.full
def test_two_hosts_as_one():
    texts, losses = _numbers(losses_of(FOLDER / "two_hosts.py", ranks=2))
    assert len(texts) == 8
    assert losses[-1] < losses[0] / 2


def test_the_notebook_writes_what_is_kept_in_it():
    notebook = json.loads((FOLDER / "planner.ipynb").read_text())
    assert notebooks.run(notebook) == notebooks.kept_outputs(notebook)
