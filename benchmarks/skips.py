"""Measures what the skip connections of a U-Net cost to send: as edges, and in a chain that carries them all the way.

On a V placement both ends of every skip are on one rank, so as edges they send nothing. In a chain each stage has to
pass on what later ones need. Bytes are predicted by a simulation and measured by a recording; the two must agree, and
so must the losses. Times are not measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from goals import Goal, finish, parser_of
from penstock.ir.edges import chain
from penstock.runtime import Pipeline, run_in_threads

Tensors = tuple[torch.Tensor, ...]
#: The name of a schedule, and its placement in words.
SCHEDULES = {"ZBVZeroBubble": "V", "DualPipeV": "V", "Interleaved1F1B": "loop"}


class Down(nn.Module):
    """Halves the image, but for the first stage, and doubles the channels."""

    def __init__(self, level: int, width: int) -> None:
        super().__init__()
        stride = 2 if level else 1
        self.layer = nn.Conv2d(width << (level - 1) if level else 3, width << level, 3, stride=stride, padding=1)
        self.has_skip = False

    def forward(self, image: torch.Tensor) -> torch.Tensor | Tensors:
        """Return the output, twice if there is a skip."""
        hidden = self.layer(image).relu()
        return (hidden, hidden) if self.has_skip else hidden


class Up(nn.Module):
    """Doubles the image, and adds to it what the way down had at this level."""

    def __init__(self, level: int, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(width << (level + 1), width << level, 3, padding=1)

    def forward(self, skip: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        grown = functional.interpolate(hidden, scale_factor=2)
        return (self.layer(grown) + skip).relu()


class Bottom(nn.Module):
    """The stage after the last one down, at the same level."""

    def __init__(self, level: int, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(width << level, width << level, 3, padding=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return self.layer(hidden).relu()


class CarryDown(nn.Module):
    """A stage down that also passes on all skips so far."""

    def __init__(self, stage: nn.Module, *, keeps: bool) -> None:
        super().__init__()
        self.stage = stage
        self.keeps = keeps

    def forward(self, hidden: torch.Tensor, *skips: torch.Tensor) -> Tensors:
        """Return the output and all skips."""
        hidden = self.stage(hidden)
        return (hidden, *skips, hidden) if self.keeps else (hidden, *skips)


class CarryUp(nn.Module):
    """A stage up that takes the latest skip, and passes on the rest."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden: torch.Tensor, *skips: torch.Tensor) -> torch.Tensor | Tensors:
        """Return the output and the skips that are left."""
        hidden = self.stage(skips[-1], hidden)
        return (hidden, *skips[:-1]) if skips[:-1] else hidden


class Net(NamedTuple):
    """A U-Net in stages, its edges, and how many numbers per sample each edge carries."""

    stages: list[nn.Module]
    edges: list[ps.Edge]
    sizes: list[int]


def build(half: int, width: int, side: int, *, carries: bool) -> Net:
    """Build a U-Net of ``2 * half`` stages."""
    torch.manual_seed(1)
    downs = [Down(level, width) for level in range(half)]
    bottom = Bottom(half - 1, width)
    ups = [Up(level, width) for level in reversed(range(half - 1))]
    numbers = [(width << level) * (side >> level) ** 2 for level in range(half)]
    after = [*numbers, *reversed(numbers)][: 2 * half - 1]  # of what leaves each stage but the last
    if not carries:
        for stage in downs[:-1]:
            stage.has_skip = True
        skips = [ps.Edge(level, (2 * half - 1 - level,), "skip") for level in range(half - 1)]
        order = sorted(zip([*chain(2 * half), *skips], [*after, *numbers], strict=False), key=lambda one: one[0].source)
        return Net([*downs, bottom, *ups], *map(list, zip(*order, strict=True)))
    stages = [CarryDown(stage, keeps=level < half - 1) for level, stage in enumerate(downs)]
    stages += [CarryDown(bottom, keeps=False), *map(CarryUp, ups)]
    carried = [sum(numbers[: min(index + 1, half - 1, 2 * half - 1 - index)]) for index in range(2 * half - 1)]
    return Net(stages, list(chain(2 * half)), [one + other for one, other in zip(after, carried, strict=True)])


class Outcome(NamedTuple):
    """What a step sent, predicted and measured, and its losses."""

    predicted: tuple[float, ...]
    measured: tuple[int, ...]
    losses: list[float]


def run(schedule: ps.Schedule, net: Net, width: int, side: int, samples: int) -> Outcome:
    """Record one step in threads, and simulate it."""
    schedule = schedule.with_edges(net.edges)
    images = torch.randn(schedule.microbatches * samples, 3, side, side, generator=torch.Generator().manual_seed(2))
    target = torch.zeros(len(images), width, side, side)

    def train(transport) -> tuple[tuple[int, ...], list[float]]:
        stages = {index: net.stages[index] for index in schedule.placement.stages_of(transport.rank)}
        losses: list[torch.Tensor] = []
        with Pipeline(stages, schedule, loss_fn=functional.mse_loss, share_losses=True, transport=transport) as pipe:
            with pipe.recording() as record:
                pipe.step(images, target=target, losses=losses, return_outputs=False)
            return record.bytes_sent, [float(loss) for loss in losses]

    measured, losses = run_in_threads(train, schedule.ranks)[0]
    costs = ps.Costs(activation_bytes=[4 * samples * size for size in net.sizes], bandwidth=1e9)
    return Outcome(ps.simulate(schedule, costs).bytes_sent, measured, losses)


def main() -> None:
    """Print a table; exit with 1 if a prediction is wrong, or skips on a V placement are sent."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="per microbatch")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage")
    parser.add_argument("--side", type=int, default=64, help="of an image, in pixels")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{2 * given.ranks} stages, {given.microbatches} microbatches of {given.samples} images of {given.side}^2")
    print(f"{'schedule':16} {'placement':9} {'skips':8} {'predicted':>12} {'measured':>12}  by rank (measured, MiB)")
    goals = []
    for name, placement in SCHEDULES.items():
        schedule = ps.build(name, ranks=given.ranks, microbatches=given.microbatches)
        outcomes = {}
        for carries in (False, True):
            net = build(given.ranks, given.width, given.side, carries=carries)
            found = outcomes[carries] = run(schedule, net, given.width, given.side, given.samples)
            shares = " ".join(f"{sent / 2**20:6.1f}" for sent in found.measured)
            totals = f"{sum(found.predicted) / 2**20:8.1f} MiB {sum(found.measured) / 2**20:8.1f} MiB"
            print(f"{name:16} {placement:9} {'in chain' if carries else 'edges':8} {totals}  {shares}")
            off = max(abs(one - other) for one, other in zip(found.predicted, found.measured, strict=True))
            goals.append(Goal(f"bytes of {name}, {'chain' if carries else 'edges'}, predicted - measured", off, 0))
        as_edges, in_chain = (torch.tensor(outcome.losses) for outcome in outcomes.values())
        apart = float(((as_edges - in_chain) / in_chain).abs().max())
        goals.append(Goal(f"losses of {name}, edges against chain, relative", apart, 1e-5))
        ratio = sum(outcomes[True].measured) / sum(outcomes[False].measured)
        print(f"{'':16} a chain sends {ratio:.2f} times as much")
        if placement == "V":
            goals.append(Goal(f"bytes of {name}, chain over edges", ratio, 1.1, at_least=True))
    finish(goals, given.goals)


if __name__ == "__main__":
    main()
