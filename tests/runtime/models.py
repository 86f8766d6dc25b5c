"""Models cut into stages, what the unsplit model gives for them, and a comparison of a pipeline with it.

A kind of model is a function of the number of stages; ``problems`` runs it in a pipeline and beside it unsplit, and
says everything that differs. It is called on each rank, in a thread or in a process, and knows all stages on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.runtime import DistributedTransport, Pipeline, Replicate, Stage

WIDTH = 3
SMALL = {torch.float64: 1e-10, torch.float32: 1e-4}


@dataclass
class Batch:
    """What a step is called with: the arguments, the keyword arguments of each rank, the target."""

    args: tuple[Any, ...]
    target: Any
    kwargs: Callable[[int], dict[str, Any]] = lambda _: {}
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    """What needs a gradient besides parameters: ``x`` on the first rank, ``kwarg<rank>`` on each."""


@dataclass
class Model:
    modules: list[nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: Callable[..., torch.Tensor] = functional.mse_loss
    options: dict[str, Any] = field(default_factory=dict)
    output: Callable[[Any], Any] = lambda output: output


def mse(output: Any, target: torch.Tensor) -> torch.Tensor:
    """For outputs of any form: the first tensor counts."""
    tensor = next(leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return functional.mse_loss(tensor, target)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        torch.get_default_dtype()
    )


# Stages ---------------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Some linear layers: more of them in some stages than in others."""

    def __init__(self, index: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(1 + index % 3)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Rich(nn.Module):
    """What makes gradients in other ways: normalization, a product of two activations, a scale, a convolution."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH, bias=index % 2 == 0)
        self.convolution = nn.Conv1d(2, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.inner(self.norm(x)).chunk(2, -1)
        both = self.convolution(torch.stack([one, two], 1))
        return x + both[:, 0] * torch.sigmoid(both[:, 1]) * self.scale


class Shared(nn.Module):
    """One layer, twice; and its weight once more."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x)))) @ self.layer.weight


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return x**3 * weight

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = context.saved_tensors
        return gradient * 3 * x**2 * weight, (gradient * x**3).sum(0)


class Own(nn.Module):
    """A Function of the user's own, something in place, and a layer whose activations are computed again."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.3))
        self.reentrant = index % 2 == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Cube.apply(torch.tanh(x), self.weight)
        # Nothing is random here. To restore a random state in two threads at once can hang in torch, each holding one
        # of its lock on the generator and the interpreter's.
        again = checkpoint(self.layer, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return functional.relu_(again) - x


class Unused(nn.Module):
    """Parameters that get no gradient: one is frozen, one takes no part."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.bias.requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Turned(nn.Module):
    """Gives a tensor that is not contiguous; every other one gives one with overlaps."""

    def __init__(self, index: int, last: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)
        self.index, self.last = index, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.index % 2 == 1:
            x = x[..., 0].mT  # the other way round, as it came
        elif self.index > 0:
            x = x.mean(1)
        x = torch.tanh(self.layer(x)).chunk(2, -1)[1]
        if self.last:
            return x
        return x.mT.unsqueeze(-1) if self.index % 2 == 0 else x.unsqueeze(1).expand(-1, 4, -1)


class Complex(nn.Module):
    """Complex numbers, conjugated first, so that the gradient comes back as a conjugate that has not been computed."""

    def __init__(self, index: int, last: bool) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.ones(WIDTH))
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_complex():
            x = torch.complex(x, x**2)
        x = x.conj() * torch.polar(torch.ones_like(self.angle), self.angle)
        return torch.tanh(x.imag) if self.last else x


class Two(nn.Module):
    """Hands two tensors on, both of which need a gradient; every third stage hands one on as it came."""

    def __init__(self, index: int, last: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.index, self.last = index, last

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> Any:
        y = torch.tanh(self.layer(x))
        if self.last:
            return y if skip is None else y + skip.sum(-1, keepdim=True)
        if skip is None or self.index % 3 == 0:
            skip = torch.cat([x, y], -1)  # of another size than the first
        return y, skip


class Nested(nn.Module):
    """Hands on a dict with all sorts of things, among them tensors without a gradient."""

    def __init__(self, index: int, last: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.index, self.last = index, last

    def forward(self, value: Any) -> Any:
        if self.index == 0:
            value = {"x": value, "more": [value.new_zeros(1), {"mask": value > 0}], "none": None, "seen": 0, "at": 0.5}
        mask, seen = value["more"][1]["mask"], value["seen"]
        assert value["none"] is None
        assert value["at"] == 0.5
        assert seen == self.index
        assert not mask.requires_grad
        x = torch.tanh(self.layer(value["x"])) * mask + value["more"][0]
        more = [self.layer.bias.sum().reshape(1), {"mask": mask}]
        if self.last:
            return {"x": x, "seen": seen}
        return {"x": x, "more": more, "none": None, "seen": seen + 1, "at": 0.5}


class Degenerate(nn.Module):
    """Hands on a tensor without dimensions and one without elements, besides a plain one."""

    def __init__(self, index: int, last: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last = last

    def forward(self, x: torch.Tensor, number: Any = 1.0, empty: torch.Tensor | None = None) -> Any:
        y = torch.tanh(self.layer(x)) * number
        if empty is not None:
            y = y + empty.sum()
        return y if self.last else (y, self.layer.bias.sum(), y[:0])


class Constant(nn.Module):
    """Hands on two tensors; nothing needs the second, though it has a gradient."""

    def __init__(self, index: int, last: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last = last

    def forward(self, x: torch.Tensor, _: torch.Tensor | None = None) -> Any:
        y = torch.tanh(self.layer(x))
        return y if self.last else (y, (y * 2).sum(-1))


class Scaled(nn.Module):
    """With keyword arguments."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor, scale: torch.Tensor, power: int) -> torch.Tensor:
        return torch.tanh(self.layer(x)) ** power * scale + shift


class Embedding(nn.Module):
    def __init__(self, _: int) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


class Head(nn.Module):
    def __init__(self, _: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


# Kinds of models ------------------------------------------------------------------------------------------------------


def _plain_batch(size: int) -> Callable[[int], Batch]:
    return lambda step: Batch((numbers(10 + step, size, WIDTH),), numbers(20 + step, size, WIDTH))


def of(stage: type[nn.Module]) -> Callable[[int, int], Model]:
    return lambda stages, size: Model([stage(index) for index in range(stages)], _plain_batch(size))


def with_last(stage: type[nn.Module], loss_fn: Any = mse) -> Callable[[int, int], Model]:
    return lambda stages, size: Model(
        [stage(index, index == stages - 1) for index in range(stages)], _plain_batch(size), loss_fn
    )


def frozen(where: Callable[[int, int], bool]) -> Callable[[int, int], Model]:
    """A model of which some stages are frozen, but never all."""

    def build(stages: int, size: int) -> Model:
        modules = [Plain(index) for index in range(stages)]
        for index, module in enumerate(modules):
            module.requires_grad_(not where(index, stages))
        return Model(modules, _plain_batch(size))

    return build


def needing(stages: int, size: int) -> Model:
    """The input needs a gradient."""

    def batch(step: int) -> Batch:
        plain = _plain_batch(size)(step)
        x = plain.args[0].requires_grad_()
        return Batch((x,), plain.target, leaves={"x": x})

    return Model([Plain(index) for index in range(stages)], batch)


def needing_behind(stages: int, size: int) -> Model:
    """The input comes from a graph of the user's own, all microbatches from the same one."""

    def batch(step: int) -> Batch:
        plain = _plain_batch(size)(step)
        x = plain.args[0].requires_grad_()
        return Batch((torch.tanh(x * 2),), plain.target, leaves={"x": x})

    return Model([Plain(index) for index in range(stages)], batch)


def keywords(stages: int, size: int, *, leaf: bool = True) -> Model:
    """A tensor that is split, one that is not, and a number; both tensors need a gradient."""

    def batch(step: int) -> Batch:
        plain = _plain_batch(size)(step)
        leaves: dict[str, torch.Tensor] = {}

        def kwargs(rank: int) -> dict[str, Any]:
            if f"shift{rank}" not in leaves:
                leaves[f"shift{rank}"] = numbers(30 + rank + step, size, WIDTH).requires_grad_()
                leaves[f"scale{rank}"] = numbers(40 + rank + step, WIDTH).requires_grad_()
            shift, scale = leaves[f"shift{rank}"], leaves[f"scale{rank}"]
            if not leaf:
                shift, scale = torch.sin(shift), torch.exp(scale) * scale.sum()
            return {"shift": shift, "scale": scale, "power": 2}

        return Batch(plain.args, plain.target, kwargs, leaves)

    options = {"kwargs_spec": {"scale": Replicate}}
    return Model([Scaled(index) for index in range(stages)], batch, options=options)


def language(stages: int, size: int) -> Model:
    """Tokens in, and a loss that is a mean over those that are not padding."""
    length = 4
    modules: list[nn.Module] = [Plain(index) for index in range(stages)]
    modules[0] = nn.Sequential(Embedding(0), modules[0])
    modules[-1] = nn.Sequential(modules[-1], Head(0))

    def batch(step: int) -> Batch:
        chance = torch.Generator().manual_seed(50 + step)
        tokens = torch.randint(0, 5, (size, length), generator=chance)
        target = torch.randint(0, 5, (size, length), generator=chance)
        for row in range(size):  # padding of another length in each
            target[row, 1 + row % length :] = -100
        return Batch((tokens,), target)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    options = {"loss_reduction": "weighted", "loss_weight": lambda target: (target != -100).sum()}
    return Model(modules, batch, loss_fn, options)


def summed(stages: int, size: int) -> Model:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, target, reduction="sum")

    modules = [Plain(index) for index in range(stages)]
    return Model(list(modules), _plain_batch(size), loss_fn, {"loss_reduction": "sum"})


KINDS: dict[str, Callable[[int, int], Model]] = {
    "plain": of(Plain),
    "rich": of(Rich),
    "shared": of(Shared),
    "own": of(Own),
    "unused": of(Unused),
    "turned": with_last(Turned),
    "complex": with_last(Complex),
    "two": with_last(Two),
    "nested": with_last(Nested),
    "degenerate": with_last(Degenerate),
    "constant": with_last(Constant),
    "frozen first": frozen(lambda index, stages: index == 0 < stages - 1),
    "frozen half": frozen(lambda index, stages: index < stages // 2),
    "frozen middle": frozen(lambda index, stages: 0 < index < stages - 1),
    "frozen last": frozen(lambda index, stages: 0 < index == stages - 1),
    "input": needing,
    "input behind": needing_behind,
    "keywords": keywords,
    "keywords behind": lambda stages, size: keywords(stages, size, leaf=False),
    "language": language,
    "sum": summed,
}


# A pipeline beside the unsplit model ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What to compare.

    Attributes:
        schedule: compute-only or lowered.
        kind: of ``KINDS``.
        size: how many samples the batch has; by default more than microbatches, and not a multiple of them.
        dtype: of everything.
        steps: how many steps of the optimizer.
        batches: how many batches per step, without zero_grad between them.
        options: of the Pipeline.
    """

    schedule: ps.Schedule
    kind: str = "plain"
    size: int | None = None
    dtype: torch.dtype = torch.float64
    steps: int = 1
    batches: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    custom: bool = False

    def __str__(self) -> str:
        known = self.schedule.metadata.get("name", "a schedule")
        sizes = f"{self.schedule.ranks} ranks, {self.schedule.stages} stages, {self.schedule.microbatches} microbatches"
        return f"{known} ({sizes}), {self.kind}, {self.dtype}, {dict(self.options)}"


def problems(case: Case, transport: Any) -> list[str]:
    """What differs from the unsplit model on this rank; in words, with the size of the difference."""
    assert torch.get_default_dtype() is case.dtype, "set it for the whole process, around all cases"
    schedule, rank = case.schedule, transport.rank
    rank_of = schedule.placement.rank_of
    model = _made(case)
    whole = deepcopy(model.modules)
    mine = {index: model.modules[index] for index in schedule.placement.stages_of(rank)}
    options = {**model.options, **dict(case.options)}
    pipe = Pipeline(mine, schedule, loss_fn=model.loss_fn, transport=transport, **options)
    if case.custom:
        _register(pipe)
    found: list[str] = []
    modules = [*mine.values(), *whole]
    optimizer = torch.optim.SGD([one for module in modules for one in module.parameters()], lr=0.1, momentum=0.9)
    for step in range(case.steps):
        optimizer.zero_grad()
        for batch in range(case.batches):
            found += _step(pipe, whole, rank_of, model, case, case.batches * step + batch)
        found += _gradients(mine, whole, case)
        optimizer.step()
        found += _parameters(mine, whole, case)
        if found:
            return [f"{case}: rank {rank}: step {step}: {one}" for one in found]
    return []


def _trains(schedule: ps.Schedule) -> bool:
    return any(part.computation_type != "F" for row in schedule.actions for cell in row if cell for part in cell.parts)


def _made(case: Case) -> Model:
    """The same on every rank, in whichever thread: parameters from numbers of their own."""
    size = case.size if case.size is not None else 2 * case.schedule.microbatches + 1
    model = KINDS[case.kind](case.schedule.stages, size)
    for index, module in enumerate(model.modules):
        for place, parameter in enumerate(module.parameters()):
            with torch.no_grad():
                parameter.copy_(0.5 * numbers(1000 * index + place, *parameter.shape) + (parameter.dim() == 1) * 0.2)
    return model


def unsplit(whole: list[nn.Module], rank_of: Any, batch: Batch) -> Any:
    """What the model gives when its stages are called one after the other."""
    value: Any = batch.args
    for index, module in enumerate(whole):
        value = module(*(value if type(value) is tuple else (value,)), **batch.kwargs(rank_of[index]))
    return value


def _step(pipe: Pipeline, whole: list[nn.Module], rank_of: Any, model: Model, case: Case, number: int) -> list[str]:
    found: list[str] = []
    rank = pipe.rank
    theirs, ours = model.batch(number), model.batch(number)
    losses: list[torch.Tensor] = []
    output = pipe.step(
        *(ours.args if pipe.has_first else ()),
        target=ours.target if pipe.has_last else None,
        losses=losses,
        **(ours.kwargs(rank) if pipe.stages else {}),
    )
    expected = unsplit(whole, rank_of, theirs)
    loss = model.loss_fn(expected, theirs.target)
    if loss.requires_grad and _trains(case.schedule):
        loss.backward()
    if pipe.has_last:
        found += _alike("output", output, expected, case)
        found += _losses(losses, expected, theirs.target, model, case)
    elif output is not None or losses:
        found.append("it has an output or losses, without the last stage")
    for name, leaf in ours.leaves.items():
        if name == "x" and not pipe.has_first:
            continue
        found += _difference(f"gradient of {name}", leaf.grad, theirs.leaves[name].grad, case)
    return found


def _losses(losses: list[Any], output: Any, target: torch.Tensor, model: Model, case: Case) -> list[str]:
    """They are in the order of microbatches, each of its own part of the batch, unscaled."""
    if len(losses) != case.schedule.microbatches:
        return [f"{len(losses)} losses for {case.schedule.microbatches} microbatches"]
    found: list[str] = []
    parts = [torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: leaf, output)]
    size = target.shape[0]
    least, more = divmod(size, len(losses))
    start = 0
    for microbatch, loss in enumerate(losses):
        length = least + (microbatch < more)
        part = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda leaf, at=start, count=length: leaf[at : at + count], parts[0]
        )
        wanted = model.loss_fn(part, target[start : start + length])
        found += _difference(f"loss of microbatch {microbatch}", loss, wanted, case)
        if loss.requires_grad:
            found.append(f"the loss of microbatch {microbatch} has history")
        start += length
    return found


def _pairs(mine: dict[int, nn.Module], whole: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    for index, module in mine.items():
        theirs = dict(whole[index].named_parameters())
        for name, parameter in module.named_parameters():
            yield f"stage {index} {name}", parameter, theirs[name]


def _gradients(mine: dict[int, nn.Module], whole: list[nn.Module], case: Case) -> list[str]:
    pairs = _pairs(mine, whole)
    return [
        one for name, ours, theirs in pairs for one in _difference(f"gradient of {name}", ours.grad, theirs.grad, case)
    ]


def _parameters(mine: dict[int, nn.Module], whole: list[nn.Module], case: Case) -> list[str]:
    return [one for name, ours, theirs in _pairs(mine, whole) for one in _difference(name, ours, theirs, case)]


def _alike(name: str, one: Any, other: Any, case: Case) -> list[str]:
    ours, structure = torch.utils._pytree.tree_flatten(one)
    theirs, wanted = torch.utils._pytree.tree_flatten(other)
    if structure != wanted:
        return [f"{name} is {structure}, not {wanted}"]
    return [
        found
        for number, pair in enumerate(zip(ours, theirs, strict=True))
        for found in _equal(name, number, *pair, case)
    ]


def _equal(name: str, number: int, one: Any, other: Any, case: Case) -> list[str]:
    if isinstance(one, torch.Tensor):
        return _difference(f"{name} (leaf {number})", one, other, case)
    return [] if one == other else [f"{name} (leaf {number}) is {one!r}, not {other!r}"]


def _difference(name: str, one: torch.Tensor | None, other: torch.Tensor | None, case: Case) -> list[str]:
    if one is None or other is None:
        return [] if one is other else [f"{name} is {one}, not {other}"]
    if one.shape != other.shape or one.dtype != other.dtype:
        return [f"{name} is {one.dtype}{list(one.shape)}, not {other.dtype}{list(other.shape)}"]
    gap = (one.detach() - other.detach()).abs().max().item() if one.numel() else 0.0
    scale = max(1.0, other.detach().abs().max().item()) if one.numel() else 1.0
    return [] if gap <= SMALL[case.dtype] * scale else [f"{name} is off by {gap:.3g}"]


# In processes ---------------------------------------------------------------------------------------------------------


def compared(rank: int, ranks: int, cases: list[Case], *, group: Any) -> list[str]:
    """The differences of all cases, over one transport."""
    transport = DistributedTransport(group, timeout=60.0)
    found: list[str] = []
    default = torch.get_default_dtype()
    try:
        for case in cases:
            torch.set_default_dtype(case.dtype)
            found += problems(case, transport)
    finally:
        torch.set_default_dtype(default)
        transport.close()
    return found


def _register(pipe: Pipeline) -> None:
    """Overlaps and forwards by functions of our own, which do what the runtime does."""

    def overlap(action: ps.Action, context: Any) -> None:
        for part in reversed(action.sub_actions or ()):
            context.run(part)

    def forward(action: ps.Action, context: Any) -> None:
        assert isinstance(context.stage(action), Stage)
        context.run(action)

    pipe.register_custom_function(ps.ComputationType.OVERLAP_F_B, overlap)
    pipe.register_custom_function(ps.ComputationType.FORWARD, forward)
