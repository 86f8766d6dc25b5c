"""How the examples are run, and what they print with torch's package in place of ours, kept in ``examples.json``.

`make test` compares with what is kept, `make test-full` with torch's package itself. After a change to an example, or
with another version of torch, record again with

    .venv/bin/python tests/examples.py
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[1] / "examples"
FILE = Path(__file__).with_suffix(".json")
PROGRAMS = Path(sys.executable).parent
#: Examples that torch's package runs as well, with their arguments.
SHARED = [
    ("one_stage_per_rank.py", ["--schedule", "1F1B"]),
    ("several_stages_per_rank.py", ["--schedule", "Interleaved1F1B", "--evaluate"]),
    ("several_stages_per_rank.py", ["--schedule", "ZBVZeroBubble"]),
]


def losses_of(script: Path, *arguments: str, ranks: int = 2, launcher: str = "penstock") -> list[str]:
    """Run a script; the lines about losses that it prints."""
    start = {
        "penstock": ["penstock", "run", "--ranks", str(ranks), "--no-prefix", "--timeout", "280"],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", str(ranks)],
    }[launcher]
    command = [str(PROGRAMS / start[0]), *start[1:], str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return re.findall(r"^step \d+ .*$", done.stdout, re.MULTILINE)


def losses_with_torch(name: str, *arguments: str) -> list[str]:
    """Run an example with nothing but its imports changed to torch's package."""
    text = (FOLDER / name).read_text()
    changed = re.sub(r"^from penstock\.pipelining\b", "from torch.distributed.pipelining", text, flags=re.MULTILINE)
    assert changed != text
    assert not re.search(r"^(from|import) penstock", changed, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / name
        copy.write_text(changed)
        return losses_of(copy, *arguments)


def recorded_losses(name: str, *arguments: str) -> list[str]:
    """What ``losses_with_torch`` returned when it was recorded."""
    again = "Record again: .venv/bin/python tests/examples.py"
    made_with, losses = _kept()["made_with"], _kept()["losses"]
    assert made_with == _made_with(), f"what torch prints is stale: it is of {made_with}. {again}"
    return losses[" ".join([name, *arguments])]


@cache
def _kept() -> dict[str, dict]:
    return json.loads(FILE.read_text())


def _made_with() -> dict[str, str]:
    """The version of torch, and a digest of the examples."""
    digest = hashlib.sha256(b"\0".join((FOLDER / name).read_bytes() for name in sorted({name for name, _ in SHARED})))
    return {"torch": torch.__version__.partition("+")[0], "examples": digest.hexdigest()}


if __name__ == "__main__":
    found = {" ".join([name, *arguments]): losses_with_torch(name, *arguments) for name, arguments in SHARED}
    FILE.write_text(json.dumps({"made_with": _made_with(), "losses": found}, indent=1) + "\n")
