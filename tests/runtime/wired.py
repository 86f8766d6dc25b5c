"""Stages that pass values to any later stages, what the unsplit model gives, and a comparison of a pipeline with it.

A stage is made from the forms of the values that enter and leave it; ``differences`` runs the stages in a pipeline and
beside it one after the other, and says everything that differs. It is called on each rank, in a thread or a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

import penstock as ps
from differential.orders import random_order
from penstock.ir.edges import Edge, chain
from penstock.runtime import DistributedTransport, Pipeline, run_in_threads

WIDTH, CLOSE = 4, 1e-10

FORMS = {
    "tensor": lambda h: h * 1.5,
    "pair": lambda h: (h.sin(), h * 2),
    "tree": lambda h: {"deep": [h.cos(), None], "scale": 0.5, "text": "x"},
    "same": lambda h: h,
    "view": lambda h: h[:, 1:3],
    "transposed": lambda h: (h * 3).T.contiguous().T,
    "integers": lambda h: h.detach().argmax(1),
    "none": lambda _: None,
    "number": lambda _: 3,
    "single": lambda h: (h * 4).detach().float(),
}


class Node(nn.Module):
    """A stage: mixes all tensors that it is given, and returns values of some forms."""

    def __init__(self, forms: list[str], *, ignores: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.forms = forms
        self.ignores = ignores

    def forward(self, *args: Any) -> Any:
        tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        mixed = torch.zeros(len(tensors[0]), WIDTH)
        for number, tensor in enumerate(tensors):
            if number == self.ignores:
                continue
            if tensor.is_floating_point():
                padded = functional.pad(tensor.to(mixed.dtype), (0, WIDTH - tensor.shape[1]))
                mixed = mixed + self.layers[number % 3](padded) / (1 + number)
            else:
                mixed = mixed + self.table(tensor)
        mixed = mixed.tanh()
        values = tuple(FORMS[form](mixed) for form in self.forms)
        return values if len(values) > 1 else values[0]


@dataclass(frozen=True)
class Wired:
    """A model, and how it is run.

    Attributes:
        schedule: the compute schedule, without edges.
        edges: the edges.
        forms: the form of the value of each edge.
        shapes: how shapes are found: inferred, per_microbatch or given.
        samples: how many samples a batch has.
        steps: how many steps an optimizer makes.
        ignoring: a stage that does not use the first tensor that it is given.
        halves: also compare the gradients in both halves, by check_parity.
        evaluates: how many samples to evaluate after the steps, if any.
    """

    schedule: ps.Schedule
    edges: tuple[Edge, ...]
    forms: tuple[str, ...]
    shapes: str = "inferred"
    samples: int = 8
    steps: int = 3
    ignoring: int | None = None
    halves: bool = False
    evaluates: int = 0

    def build(self) -> list[Node]:
        stages = range(self.schedule.stages)
        forms = {index: [form for edge, form in self.values if edge.source == index] for index in stages}
        nodes = [Node(forms[index] or ["tensor"], ignores=0 if index == self.ignoring else None) for index in stages]
        # From a generator of its own: threads share the global one.
        generator = torch.Generator().manual_seed(len(self.edges))
        for parameter in nn.ModuleList(nodes).parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        return nodes

    @property
    def values(self) -> list[tuple[Edge, str]]:
        """The edges in the order in which stages return their values."""
        return sorted(zip(self.edges, self.forms, strict=True), key=lambda value: value[0].source)

    def __str__(self) -> str:
        name = self.schedule.metadata.get("name", "custom")
        edges = " ".join(f"{edge}:{form}" for edge, form in self.values)
        return f"{name} on {self.schedule.placement.rank_of}, {self.shapes}, {self.samples} samples: {edges}"


def unsplit(modules: list[Node], values: list[tuple[Edge, str]], x: torch.Tensor) -> list[Any]:
    """What each stage returns, one after the other."""
    returned: list[Any] = []
    passed: dict[int, Any] = {}
    for stage, module in enumerate(modules):
        entering = [passed[number] for number, (edge, _) in enumerate(values) if stage in edge.targets]
        if stage == 0:
            args: tuple[Any, ...] = (x,)
        elif len(entering) == 1:
            args = entering[0] if type(entering[0]) is tuple else (entering[0],)
        else:
            args = tuple(entering)
        returned.append(module(*args))
        leaving = [number for number, (edge, _) in enumerate(values) if edge.source == stage]
        for number, value in zip(leaving, returned[-1] if len(leaving) > 1 else [returned[-1]], strict=False):
            edge = values[number][0]
            passed[number] = value if edge.gradient else tree_map_only(torch.Tensor, torch.Tensor.detach, value)
    return returned


def numbers(seed: int, samples: int) -> torch.Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def examples(case: Wired) -> dict[int, Any]:
    """What each stage returns for one microbatch. Which tensors need a gradient is said only where it is not all."""
    says = "single" in case.forms

    def example(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("meta").requires_grad_(says and tensor.requires_grad)

    returned = unsplit(case.build(), case.values, numbers(0, case.samples // case.schedule.microbatches))
    return dict(enumerate(tree_map_only(torch.Tensor, example, returned[:-1])))


def differences(case: Wired, transport: Any) -> list[str]:
    """Everything in which a pipeline differs from the unsplit model, on one rank."""
    whole, mine = case.build(), case.build()
    stages = {index: mine[index] for index in case.schedule.placement.stages_of(transport.rank)}
    shapes = examples(case) if case.shapes == "given" else case.shapes
    ours = torch.optim.AdamW([one for index in stages for one in mine[index].parameters()] or [torch.zeros(1)])
    theirs = torch.optim.AdamW([one for module in whole for one in module.parameters()])
    found: list[str] = []
    pipe = Pipeline(
        stages, case.schedule, edges=case.edges, loss_fn=functional.mse_loss, transport=transport, shapes=shapes
    )
    for step in range(case.steps):
        x, target = numbers(step, case.samples), numbers(100 + step, case.samples)
        if case.halves:
            pipe.check_parity(x, target=target)
        losses: list[torch.Tensor] = []
        output = pipe.step(x, target=target, losses=losses)
        expected = unsplit(whole, case.values, x)[-1]
        functional.mse_loss(expected, target).backward()
        if pipe.has_last:
            found += _compare("output", output, expected)
            found += [] if len(losses) == case.schedule.microbatches else [f"{len(losses)} losses"]
        for index in stages:
            for (name, one), other in zip(mine[index].named_parameters(), whole[index].parameters(), strict=True):
                found += _compare(f"step {step}: gradient of stage {index} {name}", one.grad, other.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    if case.evaluates:
        x = numbers(7, case.evaluates)
        output = pipe.eval(x)
        if pipe.has_last:
            found += _compare("evaluation", output, unsplit(whole, case.values, x)[-1])
    return [f"{case}: {each}" for each in found]


def _compare(name: str, one: torch.Tensor | None, other: torch.Tensor | None) -> list[str]:
    # A parameter that nothing depends on has no gradient in one piece; a stage may get zeros for it.
    one = torch.zeros(1) if one is None else one.detach()
    other = torch.zeros(1) if other is None else other.detach()
    gap = (one - other).abs().max().item()
    return [] if gap <= CLOSE else [f"{name} is off by {gap:.3g}"]


def compared_in_threads(cases: list[Wired], model: ps.CommModel | None = None) -> list[str]:
    """The differences of all cases, in threads; the default element type must be float64."""
    found: list[str] = []
    for ranks in sorted({case.schedule.ranks for case in cases}):
        some = [case for case in cases if case.schedule.ranks == ranks]
        results = run_in_threads(
            lambda transport, some=some: [each for case in some for each in differences(case, transport)],
            ranks,
            model=model,
            timeout=120,
        )
        found += [each for rank in results for each in rank]
    return found


def compared(_rank: int, _ranks: int, cases: list[Wired], *, group: Any) -> list[str]:
    """The differences of all cases on one rank, in a process."""
    transport = DistributedTransport(group, timeout=60.0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return [each for case in cases for each in differences(case, transport)]
    finally:
        torch.set_default_dtype(default)
        transport.close()


# Cases ----------------------------------------------------------------------------------------------------------------


def unet(stages: int) -> tuple[tuple[Edge, ...], tuple[str, ...]]:
    """A chain, and from every stage of the first half a skip to its counterpart in the second."""
    skips = [Edge(index, (stages - 1 - index,), "skip") for index in range(stages // 2 - 1)]
    return (*chain(stages), *skips), ("tensor",) * (stages - 1 + len(skips))


def broadcast(stages: int) -> tuple[tuple[Edge, ...], tuple[str, ...]]:
    """A chain, and a value of the first stage that all later ones read, as well as the next one."""
    return (*chain(stages), Edge(0, tuple(range(1, stages)))), (*["tensor"] * (stages - 1), "tensor")


def forward_only(stages: int) -> tuple[tuple[Edge, ...], tuple[str, ...]]:
    """A chain, a value without a gradient, integers and plain values."""
    last = stages - 1
    extra = [Edge(0, (last,), gradient=False), Edge(0, (1, last)), Edge(last // 2, (last,)), Edge(last // 2, (last,))]
    return (*chain(stages), *extra), (*["tensor"] * last, "pair", "integers", "none", "number")


def nested(stages: int) -> tuple[tuple[Edge, ...], tuple[str, ...]]:
    """Trees of tensors, and values that share memory."""
    last = stages - 1
    extra = [Edge(0, (1, last), gradient=False), Edge(last // 2, (last,)), Edge(0, (last,)), Edge(last // 3, (last,))]
    return (*chain(stages), *extra), (*(["pair", "same", "tree"] * stages)[:last], "tree", "view", "same", "pair")


GRAPHS = {"unet": unet, "broadcast": broadcast, "forward_only": forward_only, "nested": nested}


def random_case(seed: int) -> Wired:
    """Any number of stages anywhere, in any order, with any edges."""
    random = Random(seed)
    stages, ranks = random.randint(2, 7), random.randint(1, 4)
    microbatches = random.randint(1, 4)
    schedule = random_schedule(random, ranks, stages, microbatches, split=random.random() < 0.5)
    shapes = random.choice(["inferred", "per_microbatch", "given"])
    extra = 0 if shapes == "given" else random.randint(0, 2)
    edges = random_edges(random, stages)
    # What comes first for each stage has a gradient, so that all of them are trained.
    forms = [
        random.choice([*FORMS]) if index and edges[index - 1].source == edge.source else random.choice(DIFFERENTIABLE)
        for index, edge in enumerate(edges)
    ]
    return Wired(
        schedule,
        tuple(edges),
        tuple(forms),
        shapes,
        samples=2 * microbatches + extra,
        steps=2,
        evaluates=random.choice([0, 1, 3, 5]),
    )


DIFFERENTIABLE = ("tensor", "pair", "tree", "same", "view", "transposed")


def random_edges(random: Random, stages: int) -> list[Edge]:
    edges: list[Edge] = []
    for source in range(stages - 1):
        later = range(source + 1, stages)
        for number in range(random.choice([1, 1, 2, 3])):
            targets = set(random.sample(later, min(len(later), random.choice([1, 1, 2, 3]))))
            if number == 0 and random.random() < 0.8:
                targets.add(source + 1)
            edges.append(Edge(source, tuple(sorted(targets)), gradient=number == 0 or random.random() < 0.8))
    first = {edge.source: place for place, edge in reversed([*enumerate(edges)])}
    for stage in range(1, stages):
        if not any(stage in edges[place].targets for place in first.values()):
            place = first[stage - 1]
            edges[place] = edges[place]._replace(targets=(stage, *edges[place].targets))
    return edges


def random_schedule(random: Random, ranks: int, stages: int, microbatches: int, *, split: bool) -> ps.Schedule:
    """Stages anywhere, in any order that respects what depends on what."""
    rank_of = tuple(random.randrange(ranks) for _ in range(stages))
    rows = random_order(random, rank_of, ranks, microbatches, split=split)
    return ps.Schedule(rows, placement=ps.Placement(rank_of, ranks), microbatches=microbatches)
