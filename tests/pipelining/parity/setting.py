"""Where a scenario runs: a rank, a package, a schedule, and stages of a model.

A scenario is a function of a ``Setting``. It uses ``setting.pp`` as a program would use the package that it has
imported, and returns plain data: what the two packages must agree on. What it compares with the unsplit model by
``setting.expect`` must hold for each of them.
"""

from __future__ import annotations

import copy
import importlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pipelining.parity.comparison import Raised, differences
from pipelining.parity.models import WIDTH, Kind, Layer, Whole, made

THEIRS = "torch.distributed.pipelining"
OURS = "penstock.pipelining"

SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
SPLITTING = ("InterleavedZeroBubble", *IN_A_V)
MULTI = (*LOOPED, *IN_A_V)
TRAINING = (*SINGLE, *MULTI)
FORWARD_ONLY = "ForwardOnly"
SCHEDULES = (*TRAINING, FORWARD_ONLY)


@dataclass(frozen=True)
class Case:
    """A scenario by its name, and what it runs with."""

    scenario: str
    schedule: str = "GPipe"
    ranks: int = 2
    static: bool = False

    def __str__(self) -> str:
        return f"{self.scenario}-{self.schedule}-{self.ranks}-{'static' if self.static else 'inferred'}"


class Package:
    """The package under test, with its modules; names of the package itself are attributes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.package = importlib.import_module(name)
        self.schedules: Any = importlib.import_module(f"{name}.schedules")
        self.stage: Any = importlib.import_module(f"{name}.stage")
        self.microbatch: Any = importlib.import_module(f"{name}.microbatch")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.package, name)


@dataclass
class Setting:
    """What a scenario has."""

    pp: Any
    case: Case
    rank: int
    group: Any
    microbatches: int = 4
    rows: int = 8
    problems: list[str] = field(default_factory=list)

    # The schedule and its stages ----------------------------------------------------------------------------------

    @property
    def kind(self) -> type:
        """The class of the schedule."""
        if self.case.schedule == FORWARD_ONLY:
            return self.pp.schedules._ScheduleForwardOnly
        return self.pp.schedules.get_schedule_class(self.case.schedule)

    @property
    def single(self) -> bool:
        return self.case.schedule in (*SINGLE, FORWARD_ONLY)

    @property
    def ranks(self) -> int:
        return self.case.ranks

    @cached_property
    def stages(self) -> int:
        """How many in all."""
        return self.ranks if self.single else 2 * self.ranks

    @property
    def mine(self) -> list[int]:
        """The stages of this rank."""
        if self.single:
            return [self.rank]
        if self.case.schedule in IN_A_V:
            return [self.rank, self.stages - 1 - self.rank]
        return [self.rank, self.rank + self.ranks]

    def modules(self, kind: Kind = Layer, mine: list[int] | None = None) -> dict[int, nn.Module]:
        """Those of this rank."""
        return {index: made(kind, index, self.stages) for index in (self.mine if mine is None else mine)}

    def pipeline_stages(
        self, modules: dict[int, nn.Module], *, sample: tuple[Any, ...] | None = None, kind: Any = None, **named: Any
    ) -> list[Any]:
        """A PipelineStage for each module. With static metadata, those of a microbatch are given.

        ``named`` are arguments of PipelineStage; one that is a dictionary has an item for each stage.
        """
        made_stages = []
        for index, module in modules.items():
            own = {name: value[index] if isinstance(value, dict) else value for name, value in named.items()}
            if self.case.static:
                own |= self._given(index, sample)
            kind_of = kind or self.pp.PipelineStage
            stage = kind_of(module, index, self.stages, torch.device("cpu"), group=self.group, **own)
            made_stages.append(stage)
        return made_stages

    def _given(self, index: int, sample: tuple[Any, ...] | None) -> dict[str, Any]:
        """Inputs and outputs of a stage for one microbatch, as on the unsplit model."""
        whole: Any = self.whole
        values = (self.batch[0][: self.rows // self.microbatches],) if sample is None else sample
        named = self.sample_named
        for stage in whole.stages[:index]:
            values = _tuple(stage(*values, **named))
        outputs = _tuple(whole.stages[index](*values, **named))
        return {"input_args": _leaves(values), "output_args": _leaves(outputs)}

    @cached_property
    def sample_named(self) -> dict[str, Any]:
        """Keyword arguments of a microbatch, for static metadata."""
        return {}

    def schedule(self, stages: list[Any], *, kind: Any = None, microbatches: int | None = None, **named: Any) -> Any:
        """The schedule of these stages; with a loss, unless it only goes forward."""
        kind = kind or self.kind
        count = self.microbatches if microbatches is None else microbatches
        if self.case.schedule != FORWARD_ONLY:
            named.setdefault("loss_fn", functional.mse_loss)
        single = issubclass(kind, self.pp.schedules.PipelineScheduleSingle)
        return kind(stages[0] if single else stages, count, **named)

    # What goes in and what comes out ------------------------------------------------------------------------------

    @cached_property
    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and target, the same on every rank."""
        generator = torch.Generator().manual_seed(5)
        shape = (self.rows, WIDTH)
        return (
            torch.randn(shape, generator=generator, dtype=torch.float64),
            torch.randn(shape, generator=generator, dtype=torch.float64),
        )

    def first(self, *values: Any) -> tuple[Any, ...]:
        """Arguments, on the rank of the first stage."""
        return values if 0 in self.mine else ()

    @property
    def has_last(self) -> bool:
        return self.stages - 1 in self.mine

    def last(self, value: Any) -> Any:
        """A target, on the rank of the last stage."""
        return value if self.has_last else None

    def step(self, schedule: Any, *, function: str = "step", batch: Any = None, **named: Any) -> dict[str, Any]:
        """A step, or an evaluation: what it returns and its losses, as values: their history has been used up."""
        x, target = batch or self.batch
        losses: list[torch.Tensor] = []
        if self.case.schedule != FORWARD_ONLY:
            named = {"target": self.last(target), "losses": losses, **named}
        output = getattr(schedule, function)(*self.first(x), **named)
        return {"output": _detached(output), "losses": _detached(losses)}

    def gradients(self, modules: dict[int, nn.Module], *, none_is_zero: bool = False) -> dict[str, Any]:
        """By name; None for a parameter without."""
        missing = torch.zeros_like if none_is_zero else lambda _: None
        return {
            f"{index}.{name}": missing(parameter.detach()) if parameter.grad is None else parameter.grad.clone()
            for index, module in sorted(modules.items())
            for name, parameter in module.named_parameters()
        }

    # The unsplit model --------------------------------------------------------------------------------------------

    whole: Whole | None = None

    def use(self, kind: Kind, **named: Any) -> dict[int, nn.Module]:
        """Take a kind of model: the modules of this rank, with the unsplit model beside them."""
        self.whole = Whole(kind, self.stages)
        self.sample_named = named
        return self.modules(kind)

    def expect(self, name: str, found: Any, wanted: Any) -> None:
        """Note a difference from what the unsplit model gives."""
        self.problems += differences(wanted, found, name)

    def expect_step(
        self,
        found: dict[str, Any],
        *,
        loss_fn: Any = functional.mse_loss,
        scale_grads: bool = True,
        backward: bool = True,
        batch: Any = None,
        named: dict[str, Any] | None = None,
    ) -> None:
        """Compare output and losses of a step; the gradients of the unsplit model are added up meanwhile.

        Rows are independent here, so the outputs of the microbatches are those of the batch.
        """
        x, target = batch or self.batch
        output = self.whole(x, **(named or {}))
        if not self.has_last:
            self.expect("output", found["output"], None)
        else:
            self.expect("output", _detached(found["output"]), _detached(output))
        losses = [
            loss_fn(part, wanted)
            for part, wanted in zip(
                torch.tensor_split(output, self.microbatches),
                torch.tensor_split(target, self.microbatches),
                strict=True,
            )
        ]
        if self.case.schedule == FORWARD_ONLY:
            return
        self.expect("losses", _detached(found["losses"]), _detached(losses) if self.has_last else [])
        if backward:
            (sum(losses) / (self.microbatches if scale_grads else 1)).backward()

    def expect_gradients(self, modules: dict[int, nn.Module], *, none_is_zero: bool = False) -> None:
        """Compare the gradients of this rank's modules with those of the unsplit model."""
        found, wanted = (
            self.gradients(each, none_is_zero=none_is_zero)
            for each in (modules, {index: self.whole.stages[index] for index in modules})
        )
        self.expect("gradients", found, wanted)

    # Errors -------------------------------------------------------------------------------------------------------

    def attempt(self, function: Callable[[], Any]) -> Any:
        """What it returns, or what it raises."""
        try:
            return function()
        except Exception as error:
            return Raised.of(error, traceback.format_exc())

    @contextmanager
    def warnings_of(self) -> Iterator[list[str]]:
        """The kinds of warnings inside, in order."""
        reported: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield reported
        reported += [each.category.__name__ for each in caught]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _leaves(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.detach().requires_grad_(value.requires_grad) for value in values)


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


# On a rank ------------------------------------------------------------------------------------------------------------

SCENARIOS: dict[str, Callable[[Setting], Any]] = {}


def scenario(function: Callable[[Setting], Any]) -> Callable[[Setting], Any]:
    """Make it known by its name."""
    SCENARIOS[function.__name__] = function
    return function


def run(rank: int, ranks: int, case: Case, package: str, *, group: Any) -> tuple[Any, list[str]]:
    """A scenario with one package: what it returns, and where that is not what the unsplit model gives."""
    for module in ("training", "customs", "mistakes"):
        importlib.import_module(f"pipelining.parity.{module}")
    setting = Setting(Package(package), copy.copy(case), rank, group, microbatches=2 * ranks if ranks > 1 else 2)
    setting.rows = 2 * setting.microbatches
    torch.manual_seed(1000 + rank)
    dist.barrier(group)
    with warnings.catch_warnings():
        if package == THEIRS:
            warnings.simplefilter("ignore")
        result = setting.attempt(lambda: SCENARIOS[case.scenario](setting))
    return result, setting.problems
