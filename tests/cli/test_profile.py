import json

import pytest

import penstock as ps
from cli.commands import penstock

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

example = ((torch.ones(2, 8),), {})
target = torch.zeros(2, 8)
loss = nn.functional.mse_loss

def fails():
    raise ValueError("no")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_models.py").write_text(MODEL)
    return tmp_path


GIVEN = ("profile", "my_models.py:build", "--example", "my_models.py:example", "--repeats", "2")


@pytest.mark.processes
def test_costs_that_other_commands_take(folder):
    loss = ("--loss", "my_models.py:loss", "--target", "my_models.py:target")
    done = penstock(*GIVEN, "--stages", "4", *loss, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "wrote costs.toml"
    assert "a message: " in done.stdout
    assert "stage 4 of 4: 3\nmessages between 2 ranks" in done.stderr
    costs = ps.Costs.read(folder / "costs.toml")
    assert costs.activation_bytes == (64.0, 64.0, 64.0)
    assert costs.bandwidth > 0
    simulated = penstock("simulate", "ZBVZeroBubble", "--ranks", "2", "--costs", "costs.toml", cwd=folder)
    assert simulated.returncode == 0, simulated.stderr


@pytest.mark.processes
def test_layers_as_json(folder):
    done = penstock(*GIVEN, "--per-layer", "--ranks", "1", "--json", "-o", "found.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["names"] == [["0"], ["1"], ["2"], ["3"]]
    assert facts["latency"] is None
    assert ps.Costs.from_dict(facts["costs"]) == ps.Costs.read(folder / "found.json")


@pytest.mark.processes
def test_a_model_that_cannot_be_built(folder):
    done = penstock("profile", "my_models.py:fails", "--stages", "2", "--example", "my_models.py:example", cwd=folder)
    assert done.returncode == 2
    assert "ValueError: no" in done.stderr
    assert not (folder / "costs.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", "2", "--per-layer"), "pass one of --stages, --layout and --per-layer"),
        ((), "pass one of --stages, --layout and --per-layer"),
        (("--stages", "2", "-o", "costs.txt"), "costs.txt: costs must be in a *.toml or *.json file"),
    ],
)
def test_bad_usage(folder, arguments, message):
    done = penstock(*GIVEN, *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
