"""What is loaded by the drop-in, and what it says to a torch that is too old."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.processes

STEP = """
import sys
import torch
import torch.distributed as dist
from penstock.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble, SplitPoint, pipeline
import penstock.pipelining._schedule_visualizer
import penstock.pipelining.microbatch

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for kind, count in [(Schedule1F1B, 1), (ScheduleInterleavedZeroBubble, 2)]:
    stages = [PipelineStage(torch.nn.Linear(4, 4), index, count, torch.device("cpu")) for index in range(count)]
    schedule = kind(stages if count > 1 else stages[0], 2, loss_fn=torch.nn.functional.mse_loss)
    losses = []
    schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4), losses=losses)
    schedule.eval(torch.ones(4, 4), target=torch.zeros(4, 4))
    assert len(losses) == 2 and stages[0].submod.weight.grad is not None
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
stages = [pipe.build_stage(index, torch.device("cpu")) for index in range(2)]
schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=torch.nn.functional.mse_loss)
schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
assert model[0].weight.grad is not None
dist.destroy_process_group()
print([name for name in sys.modules if name.startswith("torch.distributed.pipelining")])
"""

OLD = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("{}")
import penstock.pipelining
print("loaded")
"""


def run(text: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_step_loads_nothing_of_the_package_that_it_replaces():
    result = run(STEP)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["[]"]


@pytest.mark.parametrize("version", ["2.8.0", "2.12.1+cu126"])
def test_a_torch_that_is_too_old_is_named(version):
    result = run(OLD.format(version))
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: penstock.pipelining needs torch 2.13 or later, but this is torch {version}")


@pytest.mark.parametrize("version", ["2.13.0a0+git1234", "3.0.0"])
def test_a_later_torch_is_taken(version):
    result = run(OLD.format(version))
    assert result.stdout.split() == ["loaded"], result.stderr


def test_penstock_alone_loads_no_torch():
    result = run("import sys, penstock; print('torch' in sys.modules, 'penstock.pipelining' in sys.modules)")
    assert result.stdout.split() == ["False", "False"]


def test_without_torch_it_says_what_to_install():
    result = run("import sys; sys.modules['torch'] = None; import penstock.pipelining")
    assert "pip install 'penstock[torch]'" in result.stderr.strip().splitlines()[-1]
