"""Two hosts with a network between them: network namespaces on this machine, joined by a pair of virtual interfaces."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_NUMBERS = itertools.count()


def reason_against() -> str | None:
    """Why this machine cannot have namespaces; None if it can."""
    if shutil.which("ip") is None:
        return "the command ip is missing: make network installs it"
    name = f"penstock{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be created here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


@dataclass
class Host:
    """One of them, with the job that runs on it."""

    name: str
    address: str
    interface: str
    job: subprocess.Popen | None = None
    reader: threading.Thread | None = None
    lines: list[str] = field(default_factory=list)

    def start(self, *command: str, **variables: str) -> None:
        """Start a command on this host, and read what it writes."""
        settings = {"GLOO_SOCKET_IFNAME": self.interface, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
        self.job = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **settings, **variables},
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        with self.job.stdout:
            self.lines.extend(map(str.rstrip, self.job.stdout))

    def code(self, seconds: float) -> int:
        """Wait until the job has ended, and all that it has written is read."""
        found = self.job.wait(seconds)
        self.reader.join(seconds)
        return found

    @property
    def text(self) -> str:
        """All that the job has written."""
        return "\n".join(self.lines)

    def processes(self) -> list[int]:
        """The processes on this host."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(number) for number in found.stdout.split()]

    def kill(self) -> None:
        """Kill everything that runs on this host, as a power cut does, except that the kernel closes connections."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def unplug(self) -> None:
        """Take the link down: nothing arrives any more, and nobody is notified."""
        subprocess.run(["ip", "-n", self.name, "link", "set", self.interface, "down"], check=True)


class TwoHosts:
    """Two hosts that reach each other under 10.77.x.1 and 10.77.x.2."""

    def __enter__(self) -> TwoHosts:
        net = os.getpid() % 200 + 1
        mark = f"{os.getpid()}{next(_NUMBERS)}"
        self.hosts = [Host(f"ps{mark}{end}", f"10.77.{net}.{end + 1}", f"v{mark}{end}") for end in range(2)]
        first, second = self.hosts
        for host in self.hosts:
            _ip("netns", "add", host.name)
        _ip(
            "link",
            "add",
            first.interface,
            "netns",
            first.name,
            "type",
            "veth",
            "peer",
            "name",
            second.interface,
            "netns",
            second.name,
        )
        for host in self.hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.kill()
            if host.job is not None:
                host.code(10)
            _ip("netns", "delete", host.name)

    def torchrun(self, script: str | Path, *arguments: str, ranks: int = 2) -> None:
        """Start a script on both hosts."""
        for number, host in enumerate(self.hosts):
            meeting = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(ranks)]
            meeting += ["--master-addr", self.hosts[0].address, "--master-port", "29500"]
            host.start(*TORCHRUN, *meeting, str(script), *arguments)

    def wait_for(self, pattern: str, seconds: float = 60.0) -> None:
        """Wait until one of the jobs has written something."""
        deadline = time.monotonic() + seconds
        while not any(re.search(pattern, host.text) for host in self.hosts):
            assert time.monotonic() < deadline, [host.text for host in self.hosts]
            assert all(host.job.poll() is None for host in self.hosts), [host.text for host in self.hosts]
            time.sleep(0.02)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
