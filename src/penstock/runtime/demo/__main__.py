"""Runs one rank of the demo. ``penstock demo`` starts it, and reads the events that it writes, one JSON per line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from penstock.runtime.demo.profiling import profile_layers
from penstock.runtime.demo.training import train

TASKS = {"profile": profile_layers, "train": train}


def main() -> None:
    """Run the task of a job; the argument is its file."""
    job = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    succeeded = TASKS[job["task"]](job)
    dist.destroy_process_group()
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
