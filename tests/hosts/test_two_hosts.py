"""Two hosts train as one does; when one of them is gone, the ranks of the other say so, and end."""

import re

import pytest

from examples import FOLDER, losses_of
from hosts.two_hosts import TwoHosts, reason_against

pytestmark = [pytest.mark.full, pytest.mark.processes]

SCRIPT = FOLDER / "two_hosts.py"
#: Far longer than a test: whatever ends before, has not waited for it.
PATIENT = ["--steps", "1000000", "--timeout", "900"]


@pytest.fixture
def hosts():
    if (reason := reason_against()) is not None:
        pytest.skip(reason)
    with TwoHosts() as both:
        yield both


def errors(host):
    """What the ranks of a host have raised."""
    return re.findall(r"penstock\.errors\.(\w+: .*)", host.text)


def test_the_losses_are_those_of_one_host(hosts):
    hosts.torchrun(SCRIPT)
    for host in hosts.hosts:
        assert host.code(120) == 0, host.text
    losses = [line for host in hosts.hosts for line in host.lines if re.match(r"step \d+ loss", line)]
    assert losses == losses_of(SCRIPT, ranks=4)
    assert len(losses) == 8


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_dies(hosts, victim):
    """The first one hosts the store, too."""
    hosts.torchrun(SCRIPT, *PATIENT)
    hosts.wait_for(r"step 20 ")
    hosts.hosts[victim].kill()
    survivor = hosts.hosts[1 - victim]
    assert survivor.code(60) == 1
    found = errors(survivor)
    causes = [
        r"StepError: rank [23] lost the store.*; the process that hosts it \(usually rank 0, or torchrun on the first "
        r"host\) may have been killed",
        r"StepError: rank [0-3] lost the connection to rank [0-3] in \dRECV_[FB]\d; the process of rank [0-3] may have "
        "been killed",
    ]
    assert found
    assert all(any(re.match(cause, text) for cause in causes) for text in found), found


def test_a_link_that_goes_down(hosts):
    """Nothing closes the connections: both ends wait for the timeout, and not for longer."""
    hosts.torchrun(SCRIPT, "--steps", "1000000", "--timeout", "6")
    hosts.wait_for(r"step 20 ")
    hosts.hosts[1].unplug()
    first, second = hosts.hosts
    assert first.code(60) == 1
    assert second.code(60) == 1
    assert errors(first)
    for text in errors(first):
        assert re.search(
            r"for rank 2, which was in 2\w+ and has not reported for \d+ s: its host or the network", text
        ), text
    assert errors(second)
    for text in errors(second):
        assert re.search(
            r"rank [23] lost the store.* for rank \d; its host, that of rank 0, or the network to it may be down", text
        ), text
