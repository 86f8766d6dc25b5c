"""Profiles of split models: times, bytes, and messages between ranks."""

from time import perf_counter

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import CostsError, RunError
from penstock.runtime import run_in_threads
from penstock.runtime.link_probe import Bounce, probe_links
from penstock.simulation.costs import LARGEST
from runtime.test_recording import Sleeper

X, Y = torch.ones(4, 8), torch.zeros(4, 2)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def test_times_of_stages_that_sleep():
    """A sleep may take longer than requested, but never less."""
    sleepers = nn.Sequential(Sleeper(forward=0.004, backward=0.006), Sleeper(forward=0.008, backward=0.002))
    found = ps.profile(ps.split(sleepers, stages=2), ((X,), {}), repeats=3)
    costs = found.costs
    for field, least in (("forward", (0.004, 0.008)), ("backward", (0.006, 0.002))):
        assert all(one >= other for one, other in zip(getattr(costs, field), least, strict=True)), field
    assert costs.forward[0] < costs.forward[1]
    assert costs.backward[1] < costs.backward[0]
    assert all(low <= middle <= high for each in found.times.values() for low, middle, high in each)
    assert costs.backward_input[1] >= 0.002
    assert ps.simulate(ps.build("1F1B", ranks=2, microbatches=4), costs).makespan > 4 * 0.012


def test_bytes():
    """A linear layer saves its input, tanh its output; the loss saves its inputs, which a stage has once."""
    whole = model()
    split = ps.split(whole, layout=[["0", "1"], ["2"]])
    found = ps.profile(split, ((X,), {}), target=Y, loss_fn=functional.mse_loss, repeats=1)
    number = 4  # bytes
    assert found.parameters == ((8 * 16 + 16) * number, (16 * 2 + 2) * number)
    assert found.costs.static == tuple(4 * size for size in found.parameters)
    assert found.costs.activation == ((X.numel() + 4 * 16) * number, (4 * 16 + 4 * 2 + Y.numel()) * number)
    assert found.costs.activation_bytes == found.costs.gradient_bytes == found.costs.edge_memory == (4 * 16 * number,)
    plain = ps.profile(split, ((X,), {}), repeats=1, optimizer_state=0)
    assert plain.costs.static == tuple(2 * size for size in found.parameters)
    assert plain.costs.activation[1] == 4 * 16 * number
    assert all(parameter.grad is None for parameter in whole.parameters())


def test_gradients_buffers_and_random_numbers_stay():
    whole = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    whole(X).sum().backward()
    before = {name: one.clone() for name, one in whole.state_dict().items()}
    gradients = [one.grad.clone() for one in whole.parameters()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ps.profile(ps.split(whole, stages=2), ((X,), {}), repeats=2)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(one, before[name]) for name, one in whole.state_dict().items())
    assert all(torch.equal(one.grad, old) for one, old in zip(whole.parameters(), gradients, strict=True))


def test_layers():
    found = ps.profile(model(), ((X,), {}), per="layer", repeats=2)
    assert found.names == (("0",), ("1",), ("2",))
    assert found.costs.activation_bytes == (256.0, 256.0)
    assert len(found.costs.forward) == len(found.costs.backward_weight) == 3
    assert found.costs.backward_input[0] == 0.0  # the inputs of the first layer need no gradient
    assert min(found.costs.backward_input[1:]) > 0
    of_split = ps.profile(ps.split(model(), stages=2), ((X,), {}), per="layer", repeats=1)
    assert of_split.names == found.names


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        first = self.layers[0](x)
        hidden = first
        for layer in self.layers[1:3]:
            hidden = layer(hidden).tanh()
        return self.layers[3](hidden + first)


def test_skip_connections():
    split = ps.split(Skipping(), stages=4, example=((X,), {}))
    found = ps.profile(split, ((X,), {}), repeats=1)
    assert len(found.costs.activation_bytes) == len(split.edges) > 3 - 1
    schedule = ps.build("Interleaved1F1B", ranks=2, microbatches=4).with_edges(split.edges)
    assert ps.simulate(schedule, found.costs).makespan > 0


@pytest.mark.parametrize("model_of", [None, ps.CommModel("rendezvous", "rank"), ps.CommModel("eager", "pair")])
def test_messages_between_threads(model_of):
    sizes = {(0, 1): (8, 64), (1, 2): (8, 1 << 20)}

    def worker(transport):
        return probe_links(transport, sizes, torch.device("cpu"), perf_counter, rounds=5)

    first, *others = run_in_threads(worker, 3, model=model_of)
    assert others == [first, first]
    for pair, bounce in first.items():
        assert set(bounce.times) == set(sizes[pair])
        assert all(len(times) == 10 for times in bounce.times.values())
        assert abs(bounce.clock) < 0.05  # it is one clock
        assert bounce.latency >= 0
        assert bounce.bandwidth > 0


def test_bytes_that_take_no_time_have_no_rate():
    quick = Bounce(0.0, {8: [2e-5] * 3, 4096: [1.9e-5, 2e-5, 2.01e-5]}, {8: [1e-6], 4096: [1e-6]})
    assert quick.bandwidth == LARGEST
    assert quick._replace(times={8: [2e-5], 4096: [1.2e-4]}).bandwidth == pytest.approx(4088 / 1e-4)


def profiled(rank, ranks, *, group=None):
    found = ps.profile(ps.split(model(), stages=2), ((X,), {}), repeats=2, group=group)
    return found.to_dict(), found.describe()


def test_processes(workers):
    (first, table), other = workers.run(profiled, ranks=2)
    assert other == (first, table)
    assert first["ranks"] == 2
    assert 0 <= first["latency"]["low"] <= first["latency"]["median"] == first["costs"]["latency"] < 0.1
    assert first["post"]["median"] > 0
    assert first["costs"]["activation_bytes"] == [256.0]
    assert "a message: " in table


def test_what_is_not_measured_is_said():
    table = ps.profile(model(), ((X,), {}), per="layer", repeats=1).describe()
    assert "transfers were not measured" in table
    assert "not modelled: cores" in table


def test_mistakes():
    with pytest.raises(RunError, match="costs per stage need a split"):
        ps.profile(model(), ((X,), {}))
    with pytest.raises(RunError, match="per must be 'stage' or 'layer', got 'rank'"):
        ps.profile(model(), ((X,), {}), per="rank")
    frozen = model().requires_grad_(False)
    with pytest.raises(RunError, match="stage 0 returns nothing that requires a gradient"):
        ps.profile(ps.split(frozen, stages=2), ((X,), {}))


def test_costs_are_written(tmp_path):
    found = ps.profile(model(), ((X,), {}), per="layer", repeats=1)
    found.write(tmp_path / "costs.toml")
    assert ps.Costs.read(tmp_path / "costs.toml") == found.costs
    with pytest.raises(ps.PenstockError, match="must be in a"):
        found.write(tmp_path / "costs.txt")
    with pytest.raises(CostsError):
        ps.Costs.read(tmp_path / "costs.toml").check(2)
