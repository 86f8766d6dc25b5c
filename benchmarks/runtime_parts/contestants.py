"""Defines the contestants that run a schedule: the installed torch, a hand-written loop, and penstock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import penstock as ps
from penstock.execution.split_backward.split import SplitBackward
from penstock.pipelining import PipelineStage as OurStage
from penstock.pipelining import schedules as our_schedules
from penstock.runtime import Pipeline
from runtime_parts.models import Model, loss_function

if TYPE_CHECKING:
    from torch import nn

#: All schedules that torch has; the first two have one stage per rank.
SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
SINGLE = ("GPipe", "1F1B")
SPLITTING = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")


@dataclass(frozen=True)
class Case:
    """A schedule of a model on a rank."""

    schedule: str
    microbatches: int
    model: Model
    rank: int
    ranks: int = 2

    @property
    def compute(self) -> ps.Schedule:
        """Without transfers."""
        return ps.build(self.schedule, ranks=self.ranks, microbatches=self.microbatches)

    @property
    def lowered(self) -> ps.Schedule:
        """The schedule with transfers; nothing is sharded here, so nothing is unsharded or reduced."""
        return ps.lower(self.compute, unshard=False, reduce=False)

    @cached_property
    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and target of a step."""
        return self.model.batch(self.microbatches)

    @property
    def modules(self) -> dict[int, nn.Module]:
        """Build the stages of this rank."""
        rank_of = self.compute.placement.rank_of
        return self.model.modules(len(rank_of), [stage for stage, rank in enumerate(rank_of) if rank == self.rank])

    @property
    def order(self) -> list[tuple[str, int, int]]:
        """The actions of this rank: type, stage, microbatch; overlaps in the order of their parts."""
        order = []
        for action in self.lowered.actions[self.rank]:
            order += [
                (part.computation_type.value, part.stage_index, part.microbatch_index)
                for part in action.sub_actions or (action,)
            ]
        return order


class Contestant:
    """Runs a step, after which gradients are in its modules and the losses of the microbatches in ``losses``."""

    modules: dict[int, nn.Module]
    losses: list[torch.Tensor]

    def step(self) -> None:
        """Run forward and backward of all microbatches."""
        raise NotImplementedError

    def release(self) -> None:
        """Release the outputs of a step, like a program that no longer needs them."""

    def close(self) -> None:
        """Close connections and threads."""


#: Creates a contestant.
Kind = Callable[[Case], Contestant]


class Torch(Contestant):
    """torch.distributed.pipelining."""

    stage = PipelineStage
    schedules = schedules

    def __init__(self, case: Case) -> None:
        rank_of = case.compute.placement.rank_of
        self.modules = case.modules
        self.losses: list[torch.Tensor] = []
        self.stages = [
            self.stage(module, index, len(rank_of), torch.device("cpu")) for index, module in self.modules.items()
        ]
        kind = self.schedules.get_schedule_class(case.schedule)
        single = issubclass(kind, self.schedules.PipelineScheduleSingle)
        self.schedule = kind(self.stages[0] if single else self.stages, case.microbatches, loss_fn=loss_function)
        x, target = case.batch
        self.arguments = (x,) if 0 in self.modules else ()
        self.target = target if len(rank_of) - 1 in self.modules else None

    def step(self) -> None:
        """Run a step as users call it."""
        self.losses = []
        self.schedule.step(*self.arguments, target=self.target, losses=self.losses)

    def release(self) -> None:
        """Clear the outputs that stages keep for the program."""
        for stage in self.stages:
            stage.output_chunks.clear()


class DropIn(Torch):
    """penstock.pipelining: the same program with the imports changed."""

    stage = OurStage
    schedules = our_schedules


class Penstock(Contestant):
    """Ours."""

    def __init__(self, case: Case) -> None:
        rank_of = case.compute.placement.rank_of
        self.modules = case.modules
        self.losses: list[torch.Tensor] = []
        self.pipeline = Pipeline(self.modules, case.compute, loss_fn=loss_function, group=None)
        x, target = case.batch
        self.arguments = (x,) if 0 in self.modules else ()
        self.target = target if len(rank_of) - 1 in self.modules else None

    def step(self) -> None:
        """Run a step as users call it."""
        self.losses = []
        self.pipeline.step(*self.arguments, target=self.target, losses=self.losses)

    def close(self) -> None:
        """Close the pipeline with its groups and its watchdog."""
        self.pipeline.close()


class Loop(Contestant):
    """What one would write by hand for one model whose stages exchange a single tensor of a known shape.

    No checks, no error handling, no other model. The halves of a backward are computed in the simplest way: the
    gradient of the input with the graph retained, then a backward for the weights only.
    """

    def __init__(self, case: Case) -> None:
        self.rank_of = case.compute.placement.rank_of
        self.last = len(self.rank_of) - 1
        self.shape = case.model.microbatch
        self.microbatches = case.microbatches
        self.modules = case.modules
        self.weights = {stage: tuple(module.parameters()) for stage, module in self.modules.items()}
        self.x, self.target = case.batch
        self.seed = torch.tensor(1 / case.microbatches)
        does = {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward_input,
            "W": self.backward_weight,
            "SEND_F": self.send_activation,
            "RECV_F": self.receive_activation,
            "SEND_B": self.send_gradient,
            "RECV_B": self.receive_gradient,
        }
        self.order = [(does[kind], stage, microbatch) for kind, stage, microbatch in case.order]
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Run the order; wait for the sends at the end."""
        self.losses = []
        self.inputs = self.x.chunk(self.microbatches)
        self.targets = self.target.chunk(self.microbatches)
        self.receiving: dict[tuple[int, int, str], tuple[dist.Work, torch.Tensor]] = {}
        self.ready: dict[tuple[int, int, str], torch.Tensor] = {}
        self.saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.kept: dict[tuple[int, int], torch.Tensor] = {}
        self.sent: list[dist.Work] = []
        for act, stage, microbatch in self.order:
            act(stage, microbatch)
        for work in self.sent:
            work.wait()
        self.sent.clear()

    def forward(self, stage: int, microbatch: int) -> None:
        """Run F, with the loss after the last stage."""
        x = self.take(stage, microbatch, "F").requires_grad_() if stage else self.inputs[microbatch]
        y = self.modules[stage](x)
        if stage == self.last:
            y = loss_function(y, self.targets[microbatch])
            self.losses.append(y.detach())
        else:
            self.ready[stage + 1, microbatch, "F"] = y.detach()
        self.saved[stage, microbatch] = x, y

    def backward(self, stage: int, microbatch: int) -> None:
        """B."""
        x, y = self.saved.pop((stage, microbatch))
        torch.autograd.backward(y, self.gradient(stage, microbatch))
        if stage > 0:
            self.ready[stage - 1, microbatch, "B"] = x.grad

    def backward_input(self, stage: int, microbatch: int) -> None:
        """I."""
        x, y = self.saved[stage, microbatch]
        gradient = self.kept[stage, microbatch] = self.gradient(stage, microbatch)
        if stage > 0:
            (self.ready[stage - 1, microbatch, "B"],) = torch.autograd.grad(y, x, gradient, retain_graph=True)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """Run W."""
        _, y = self.saved.pop((stage, microbatch))
        torch.autograd.backward(y, self.kept.pop((stage, microbatch)), inputs=self.weights[stage])

    def gradient(self, stage: int, microbatch: int) -> torch.Tensor:
        """That of the output."""
        return self.seed if stage == self.last else self.take(stage, microbatch, "B")

    def take(self, stage: int, microbatch: int, direction: str) -> torch.Tensor:
        """Return what a stage of this rank has passed on, or what has arrived."""
        if (tensor := self.ready.pop((stage, microbatch, direction), None)) is not None:
            return tensor
        work, tensor = self.receiving.pop((stage, microbatch, direction))
        work.wait()
        return tensor

    def send_activation(self, stage: int, microbatch: int) -> None:
        """SEND_F."""
        self.sent.append(dist.isend(self.ready.pop((stage + 1, microbatch, "F")), self.rank_of[stage + 1]))

    def send_gradient(self, stage: int, microbatch: int) -> None:
        """SEND_B."""
        self.sent.append(dist.isend(self.ready.pop((stage - 1, microbatch, "B")), self.rank_of[stage - 1]))

    def receive_activation(self, stage: int, microbatch: int) -> None:
        """RECV_F."""
        buffer = torch.empty(self.shape)
        self.receiving[stage, microbatch, "F"] = dist.irecv(buffer, self.rank_of[stage - 1]), buffer

    def receive_gradient(self, stage: int, microbatch: int) -> None:
        """RECV_B."""
        buffer = torch.empty(self.shape)
        self.receiving[stage, microbatch, "B"] = dist.irecv(buffer, self.rank_of[stage + 1]), buffer


class Alone(Loop):
    """The same forwards and backwards of a rank, in the same order, without any transfers.

    All inputs are available from the start. Backwards are full ones, at the place of I if the schedule splits them:
    what the rank has to compute, without the cost of splitting.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.arrived = torch.randn(self.shape)
        idle = {self.send_activation, self.receive_activation, self.send_gradient, self.receive_gradient}
        whole = {self.backward_input: self.backward, self.backward_weight: None}
        order = [(whole.get(act, act), *place) for act, *place in self.order if act not in idle]
        self.order = [entry for entry in order if entry[0] is not None]

    def take(self, stage: int, microbatch: int, direction: str) -> torch.Tensor:
        """Return what this rank computed, or what is available from the start."""
        tensor = self.ready.pop((stage, microbatch, direction), None)
        return self.arrived.detach() if tensor is None else tensor


class AloneInHalves(Alone):
    """The same with the halves of the schedule, computed in our way: includes the cost of splitting."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        does = {"F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weight}
        self.order = [(does[kind], stage, microbatch) for kind, stage, microbatch in case.order if kind in does]
        self.splits = {stage: SplitBackward(adds_in_place=True) for stage in self.modules}
        self.left: dict[tuple[int, int], Callable[[], None]] = {}

    def backward_input(self, stage: int, microbatch: int) -> None:
        """Run I; no other stage needs that of the first stage."""
        x, y = self.saved.pop((stage, microbatch))
        gradient = self.gradient(stage, microbatch)
        if stage == 0:
            self.left[stage, microbatch] = partial(torch.autograd.backward, y, gradient)
            return
        found, self.left[stage, microbatch] = self.halves(stage, x, y, gradient)
        self.ready[stage - 1, microbatch, "B"] = found

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """Run W."""
        self.left.pop((stage, microbatch))()

    def halves(
        self, stage: int, x: torch.Tensor, y: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return the gradient of an input, and what computes those of the weights."""
        (found,), left = self.splits[stage].input_backward([get_gradient_edge(y)], [gradient], [x])
        return found, left


class AloneInTorchHalves(AloneInHalves):
    """The same in torch's way: what torch has to compute."""

    def halves(
        self, stage: int, x: torch.Tensor, y: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return the gradient of an input, and what computes those of the weights."""
        weights = self.weights[stage]
        (found,), groups = stage_backward_input([y], [gradient], [x], iter(weights))
        return found, partial(stage_backward_weight, iter(weights), groups)


def clear(contestant: Contestant) -> None:
    """Reset the gradients."""
    for module in contestant.modules.values():
        module.zero_grad(set_to_none=True)


def same_gradients(one: Contestant, other: Contestant) -> None:
    """Raise if a step of one gives different gradients or losses from a step of the other."""
    for contestant in (one, other):
        clear(contestant)
        contestant.step()
    torch.testing.assert_close(one.losses, other.losses, rtol=1e-4, atol=1e-5)
    for stage, module in one.modules.items():
        for (name, mine), theirs in zip(module.named_parameters(), other.modules[stage].parameters(), strict=True):
            torch.testing.assert_close(
                mine.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda text, at=(stage, name): f"{at}: {text}"
            )
