"""torchtitan trains with its own trainer, on two ranks with gloo, and prints the same losses with either package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.processes]

#: The environment that `make clients` creates; torchtitan needs other versions of packages than the tests do.
PYTHON = os.environ.get("PENSTOCK_CLIENTS_PYTHON", f"{sys.prefix}/clients/bin/python")
TRAINER = Path(__file__).with_name("torchtitan_on_cpu.py")
SETTINGS = {
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "training.dataset": "c4_test",
    "training.seq-len": 32,
    "training.local-batch-size": 4,
    "training.steps": 5,
    "lr-scheduler.warmup-steps": 1,
    "optimizer.implementation": "for-loop",
    "activation-checkpoint.mode": "none",
    "parallelism.pipeline-parallel-degree": 2,
    "parallelism.pipeline-parallel-microbatch-size": 1,
    "metrics.log-freq": 1,
    "debug.seed": 0,
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tokenizer whose tokens are bytes, and texts: Python's own sources."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("assets")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate([*alphabet, "<s>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    (folder / "data").mkdir()
    texts = [json.dumps({"text": path.read_text()}) for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    (folder / "data" / "texts.json").write_text("\n".join(texts))
    return folder


def train(assets, *options, dropin, **settings):
    """The loss and the norm of the gradients in each step."""
    chosen = SETTINGS | {name.replace("__", ".").replace("_", "-"): value for name, value in settings.items()}
    chosen |= {
        "model.hf-assets-path": assets,
        "training.dataset-path": assets / "data",
        "job.dump-folder": assets / "outputs",
    }
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-ranks-filter", "0,1"]
    start += ["-m", "penstock.dropin"] if dropin else []
    arguments = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(assets / "home"), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [PYTHON, *start, TRAINER, *arguments, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, **offline},
    )
    assert done.returncode == 0, done.stderr
    text = re.sub(r"\x1b\[[\d;]+m", "", done.stdout + done.stderr)
    assert ("torch.distributed.pipelining is penstock.pipelining" in text) == dropin
    found = re.findall(r"step: +(\d+) +loss: +(\S+) +grad_norm: +(\S+)", text)
    return [(step, loss, norm) for step, loss, norm in found if not loss.startswith("-")]


@pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"torchtitan is not installed: {PYTHON} is missing; run make clients"
)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_the_losses_are_the_same_with_either_package(assets, schedule):
    ours, theirs = (
        train(assets, dropin=dropin, parallelism__pipeline_parallel_schedule=schedule) for dropin in (True, False)
    )
    assert [step for step, *_ in ours] == ["1", "2", "3", "4", "5"]
    assert ours == theirs
    assert float(ours[-1][1]) < float(ours[0][1])
