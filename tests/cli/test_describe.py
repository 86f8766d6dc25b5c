import json

import pytest

from cli.commands import penstock

MODEL = """
import torch
from torch import nn

def sequential():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden @ self.embedding.weight.T

example = ((torch.arange(6).view(2, 3),), {})
too_large = torch.tensor([[1.5]])

def helper():
    raise ValueError("no")

def fails():
    return helper()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_models.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("model = 1\nmodel / 0\n")
    return tmp_path


def test_the_table(folder):
    done = penstock("describe", "my_models.py:Tied", "--stages", "2", "--example", "my_models.py:example", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "stage  parameters     bytes  cost  modules\n"
        "    0         272  1.06 KiB   50%  embedding layers.0-1\n"
        "    1         272  1.06 KiB   50%  layers.2-3\n"
        "\n"
        "edges:\n"
        "  0 -> 1: input of layers.2\n"
        "\n"
        "ties:\n"
        "  embedding.weight of stage 0 = embedding.weight of stage 1\n"
    )


def test_for_machines(folder):
    done = penstock("describe", "my_models.py:sequential", "--stages", "3", "--json", cwd=folder)
    facts = json.loads(done.stdout)
    assert [stage["modules"] for stage in facts["stages"]] == [["0", "1"], ["2", "3"], ["4"]]
    assert [stage["parameters"] for stage in facts["stages"]] == [40, 72, 18]
    assert facts["edges"][0] == {"source": 0, "targets": [1], "value": "", "gradient": True}
    assert facts["ties"] == facts["never_called"] == []


def test_a_layout_from_a_file(folder):
    (folder / "layout.yaml").write_text("[[embedding], [layers]]")
    arguments = ("my_models.py:Tied", "--layout", "layout.yaml", "--example", "my_models.py:example", "--json")
    facts = json.loads(penstock("describe", *arguments, cwd=folder).stdout)
    assert [len(stage["modules"]) for stage in facts["stages"]] == [1, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_models.py:Tied", "--stages", "2"], "a Tied needs an example"),
        (["my_models.py:Tied", "--stages", "2"], "; here, --example FILE.py:NAME names it"),
        (
            ["my_models.py:fails", "--stages", "2"],
            "my_models.py:fails failed in my_models.py, line 23, in helper: ValueError: no",
        ),
        (["broken.py:model", "--stages", "2"], "ZeroDivisionError: division by zero (broken.py, line 2, in <module>)"),
        (
            ["my_models.py:sequential", "--stages", "2", "--example", "my_models.py:fails"],
            "my_models.py:fails failed in my_models.py, line 23, in helper: ValueError: no",
        ),
        (
            ["my_models.py:Tied", "--stages", "2", "--example", "my_models.py:too_large"],
            "raised in my_models.py, line 14, in forward",
        ),
        (["my_models.py:sequentiel", "--stages", "2"], "my_models.py has no 'sequentiel'; did you mean sequential?"),
        (["nothing.py:build", "--stages", "2"], "there is no file nothing.py"),
        (["no_such_module_of_mine:build", "--stages", "2"], "there is no module 'no_such_module_of_mine'"),
        (["my_models.py", "--stages", "2"], "'my_models.py' names no Python object; write e.g."),
        (["my_models.py:sequential", "--stages", "9"], "9 stages need at least as many units"),
        (["my_models.py:sequential"], "pass either --stages or --layout, e.g. --stages 4"),
        (["my_models.py:sequential", "--layout", "none.yaml"], "there is no file none.yaml"),
    ],
)
def test_bad_input(folder, arguments, message):
    done = penstock("describe", *arguments, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
