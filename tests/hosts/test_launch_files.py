"""The launch files for clusters can be parsed, and start the ranks of two hosts as torchrun expects."""

import subprocess

import pytest
import yaml

from examples import FOLDER

CLUSTERS = FOLDER / "clusters"
STANDS_IN = """#!/bin/bash
case "$(basename "$0")" in
  scontrol) printf 'node7\\nnode8\\n' ;;
  srun) for id in 0 1; do SLURM_NODEID=$id "${@:2}"; done ;;
  torchrun) echo "$@" ;;
esac
"""


@pytest.mark.processes
def test_the_slurm_script_starts_torchrun_on_every_node(tmp_path):
    for name in ("scontrol", "srun", "torchrun"):
        (tmp_path / name).write_text(STANDS_IN)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", CLUSTERS / "slurm.sh", "train.py", "--text", "two words"],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_JOB_ID": "5",
            "SLURM_NNODES": "2",
        },
    )
    assert done.stdout.splitlines() == [
        f"--nnodes 2 --node-rank {node} --nproc-per-node 8 --master-addr node7 --master-port 20005 "
        "train.py --text two words"
        for node in (0, 1)
    ]


def test_the_kubernetes_job_is_consistent():
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    name, pods = job["metadata"]["name"], job["spec"]["completions"]
    pod = job["spec"]["template"]["spec"]
    command = dict(part.split("=") for part in pod["containers"][0]["command"] if "=" in part)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == pods == int(command["--nnodes"])
    assert command["--nproc-per-node"] == str(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert command["--master-addr"] == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert int(command["--master-port"]) == service["spec"]["ports"][0]["port"]
