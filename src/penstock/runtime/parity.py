"""Whether a pipeline computes what the unsplit model does: a probe for one batch.

Three ways lead to the gradients of a batch: the unsplit model, which is every stage after the other with a whole
backward; the same with each backward in two halves; and the schedule. All three must give the same. Where they do not,
the report names the parameters, with those first that a backward comes upon first: what is wrong there spoils the rest.

All three count the loss of a microbatch as ``loss_reduction`` says. Whether that makes the loss of the batch is a
question of its own: the loss function is called once more, with the outputs and targets of all microbatches as one.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
from torch.utils import _pytree as pytree

from penstock.errors import MetadataError, MicrobatchError, StageError
from penstock.runtime.merging import merge
from penstock.runtime.microbatches import is_split_already
from penstock.runtime.plain import PlainRun
from penstock.runtime.program import only_forwards
from penstock.runtime.untouched import Buffers, copied, drawing, random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.runtime.batches import Batch
    from penstock.runtime.pipeline import Pipeline
    from penstock.runtime.plain import Visit
    from penstock.runtime.stage import Stage

    #: The gradient of each parameter of this rank.
    Gradients = dict[torch.nn.Parameter, torch.Tensor | None]
    #: What parameters are, in memory of its own.
    Values = dict[torch.nn.Parameter, torch.Tensor]

#: Ways to the gradients that are compared with the unsplit model.
HALVES: Final = "in halves"
SCHEDULED: Final = "scheduled"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a gradient, or a loss, is from that of the unsplit model.

    Attributes:
        stage: the stage.
        name: the parameter within the stage, e.g. ``layers.1.weight``; or ``input`` or ``loss``.
        module: the type of the module that the parameter is in.
        way: how the gradient was computed: ``"in halves"`` or ``"scheduled"``.
        largest: the largest absolute difference of two elements; infinite if one of the gradients is missing.
        size: the largest absolute element that it should have.
        tolerance: what `largest` may be.
        order: where in the order of a backward it comes.
    """

    stage: int
    name: str
    module: str
    way: str
    largest: float
    size: float
    tolerance: float
    order: int

    @property
    def relative(self) -> float:
        """The difference as a share of the size."""
        return self.largest / self.size if self.size else (0.0 if self.largest == 0 else float("inf"))

    @property
    def fits(self) -> bool:
        """Whether it is small enough for an error of rounding."""
        return self.largest <= self.tolerance

    def __str__(self) -> str:
        what = "the loss" if self.name == "loss" else f"{self.name} of {self.module}"
        told = "with the schedule" if self.way == SCHEDULED else "when its backward runs in two halves"
        if self.largest == float("inf"):
            return f"stage {self.stage}, {what}: {told} there is a gradient missing, one too many, or not a number"
        return (
            f"stage {self.stage}, {what}: {told} the largest difference is {self.largest:.2g}, in a "
            f"{'loss' if self.name == 'loss' else 'gradient'} of size {self.size:.2g}"
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """Whether the losses of the microbatches, each by its share, make the loss of the batch.

    Attributes:
        whole: what the loss function gives for the outputs and targets of all microbatches as one.
        together: the sum of the microbatches' losses, each multiplied by its share.
        tolerance: by how much the two may differ.
        unchecked: why they could not be compared; empty if they were.
    """

    whole: float = 0.0
    together: float = 0.0
    tolerance: float = 0.0
    unchecked: str = ""

    @property
    def fits(self) -> bool:
        """Whether they differ by rounding at most, or were not compared."""
        alike = self.whole == self.together or (math.isnan(self.whole) and math.isnan(self.together))
        return alike or abs(self.whole - self.together) <= self.tolerance

    def __str__(self) -> str:
        if self.unchecked:
            return (
                f"whether the losses of the microbatches make that of the whole batch was not checked: {self.unchecked}"
            )
        told = f"the loss of the whole batch is {self.whole:.6g}, that of the microbatches together {self.together:.6g}"
        return told if self.fits else f"{told}: is loss_fn a mean over samples? {_OTHERWISE}"


@dataclass(frozen=True, slots=True)
class Parity:
    """What a probe has found, the same on every rank.

    Attributes:
        differences: all that was compared, in the order of a backward.
        random: whether the unsplit model itself gives other gradients when it is run again.
        losses: the losses of the unsplit model, on the rank of the last stage.
        reduction: whether they make the loss of the batch.
    """

    differences: tuple[Difference, ...]
    random: bool
    losses: tuple[float, ...]
    reduction: Reduction

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences that rounding does not explain."""
        return tuple(one for one in self.differences if not one.fits)

    @property
    def largest(self) -> float:
        """The largest relative difference."""
        return max((one.relative for one in self.differences), default=0.0)

    def __str__(self) -> str:
        told, reduction = self._told(), str(self.reduction)
        return "\n".join([*told, reduction] if self.wrong or self.reduction.fits else [reduction, *told])

    def _told(self) -> list[str]:
        wrong = self.wrong
        if not wrong:
            told = f"{len(self.differences)} gradients and losses are those of the unsplit model"
            return [f"{told}, run microbatch by microbatch"]
        lines = [f"{len(wrong)} of {len(self.differences)} gradients and losses are not those of the unsplit model:"]
        lines += [f"- {one}" for one in wrong[:_SHOWN]]
        if len(wrong) > _SHOWN:
            lines.append(f"- and {len(wrong) - _SHOWN} more")
        if self.random:
            lines.append(
                "The unsplit model itself gives other gradients when it is run again from the same random state: it "
                "draws random numbers of its own, or computes in an order that varies. This probe cannot judge it."
            )
        return lines


_SHOWN: Final = 10
_OTHERWISE: Final = "write loss_reduction='sum' for a sum, 'weighted' for a mean over tokens"


def check_parity(pipe: Pipeline, args: Any, kwargs: dict[str, Any], target: Any) -> Parity:
    """See ``Pipeline.check_parity``."""
    pipe._check_usable()
    if pipe._forward_only:
        raise StageError("check_parity compares gradients, and this schedule has no backward")
    parameters = _parameters(pipe.stages)
    values: Values = {}
    with pipe._telling, torch.enable_grad(), _untouched(pipe, parameters, values) as begin:
        batch = pipe._batches.of_step(copied(args), copied(kwargs), target, varying=True)
        # So that shapes are known, and no stage is run for them below.
        pipe._programs.training(batch, pipe._customized)
        values |= {one: one.detach().clone() for one in parameters}  # now that lazy ones have theirs
        plain = _Plain(pipe, batch, parameters)
        begin()
        expected, halves, losses = plain.run(split=True)
        reduction = _reduction(pipe, plain, losses, target)
        begin()
        found: list[torch.Tensor] = []
        with _Replay(pipe.stages, _order(pipe)):
            pipe.step(*copied(args), target=target, losses=found, return_outputs=False, **copied(kwargs))
        scheduled = _taken(parameters)
        differences = [
            *_compared(_alone(parameters, pipe.stages), halves, expected, HALVES),
            *_compared(parameters, scheduled, expected, SCHEDULED),
            *_compared_losses(pipe, found, losses),
            *plain.inputs,
        ]
        everything = _exchanged(pipe, differences)
        random = False
        if not all(one.fits for one in everything):
            begin()
            again, _, _ = plain.run(split=False)
            mine = any(not one.fits for one in _compared(parameters, again, expected, SCHEDULED))
            random = any(data == b"1" for data in pipe.transport.exchange(b"1" if mine else b"0"))
        trained = [data.decode() for data in pipe.transport.exchange(_put_back(parameters, values).encode()) if data]
    if trained:
        raise StageError(
            f"{trained[0]} was changed while gradients were compared, and is as before now: does a hook step an "
            "optimizer? Remove such hooks for the time of check_parity"
        )
    parity = Parity(tuple(everything), random, tuple(float(loss) for loss in losses), reduction)
    if parity.wrong:
        raise StageError(str(parity), stage=parity.wrong[0].stage)
    if not reduction.fits:
        raise StageError(str(parity), stage=pipe.schedule.stages - 1)
    return parity


class _Owned(NamedTuple):
    """Where a parameter is."""

    stage: int
    name: str
    module: str
    order: int


def _parameters(stages: Mapping[int, Stage]) -> dict[torch.nn.Parameter, _Owned]:
    """The parameters of this rank, each with the first place where it is, in the order of the model."""
    found: dict[torch.nn.Parameter, _Owned] = {}
    for index in sorted(stages):
        for path, module in stages[index].module.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter not in found:
                    full = f"{path}.{name}" if path else name
                    found[parameter] = _Owned(index, full, type(module).__name__, len(found))
    return found


def _alone(
    parameters: Mapping[torch.nn.Parameter, _Owned], stages: Mapping[int, Stage]
) -> dict[torch.nn.Parameter, _Owned]:
    """Those that no other replica has; the others' gradients come together only when a step ends."""
    return {one: owned for one, owned in parameters.items() if stages[owned.stage].parallel is None}


class _Plain:
    """The unsplit model, run once or again; each stage's backward in halves beside it."""

    def __init__(self, pipe: Pipeline, batch: Batch, parameters: Mapping[torch.nn.Parameter, _Owned]) -> None:
        self._pipe = pipe
        self._batch = batch
        self._parameters = parameters
        self._halves: Gradients = dict.fromkeys(parameters)
        self.inputs: list[Difference] = []
        self.outputs: Sequence[Any] = ()
        self.shares: Sequence[float] = ()

    @property
    def targets(self) -> Sequence[Any]:
        """The target of each microbatch."""
        return self._batch.targets

    def run(self, *, split: bool) -> tuple[Gradients, Gradients, list[torch.Tensor]]:
        """The gradients, those in halves, and the losses."""
        pipe = self._pipe
        plain = PlainRun(pipe.stages, pipe.schedule.placement.rank_of, pipe.transport, pipe._loss_fn)
        microbatches = range(pipe.schedule.microbatches)
        orders = {index: list(microbatches) for index in pipe.stages}
        args, kwargs, targets = self._batch[:3]
        with pipe._around(training=True), _Replay(pipe.stages, orders) as self._replay:
            self.shares = pipe._shares(self._batch)
            plain.run(copied(args), copied(kwargs), targets, self.shares, self._in_halves if split else None)
        self.outputs = plain.outputs
        return _taken(self._parameters), self._halves, plain.losses

    def _in_halves(
        self, visit: Visit, gradients: Sequence[torch.Tensor], expected: Sequence[torch.Tensor | None]
    ) -> None:
        """Run a microbatch of a stage once more, with I and W, into gradients of their own."""
        if visit.stage.parallel is not None:
            return
        before = {one: one.grad for one in self._parameters}
        for one in self._parameters:
            one.grad = self._halves[one]
        visit.stage.begin()  # with other gradients
        with self._replay.once_more(visit):
            found, weight_backward = visit.stage.input_backward(visit.run(), gradients)
            weight_backward()
        for one in self._parameters:
            self._halves[one], one.grad = one.grad, before[one]
        for number, (given, wanted) in enumerate(zip(found, expected, strict=True)):
            owned = _Owned(visit.stage.index, f"input {number}", type(visit.stage.module).__name__, -1)
            self.inputs.append(_difference(owned, HALVES, given, wanted, 0.0))


def _compared(
    parameters: Mapping[torch.nn.Parameter, _Owned], found: Gradients, expected: Gradients, way: str
) -> Iterator[Difference]:
    """What differs in the gradients. Those of one stage are of one scale: a tiny one may be nothing but rounding."""
    scales: dict[int, float] = {}
    for parameter, owned in parameters.items():
        scales[owned.stage] = max(scales.get(owned.stage, 0.0), _size(expected[parameter]))
    for parameter, owned in parameters.items():
        yield _difference(owned, way, found[parameter], expected[parameter], scales[owned.stage])


def _compared_losses(
    pipe: Pipeline, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> list[Difference]:
    if not pipe.has_last:
        return []
    owned = _Owned(pipe.schedule.stages - 1, "loss", "", 0)
    return [_difference(owned, SCHEDULED, one, other, 0.0) for one, other in zip(found, expected, strict=True)]


def _reduction(pipe: Pipeline, plain: _Plain, losses: Sequence[torch.Tensor], target: Any) -> Reduction:
    """What the rank of the last stage finds, told to all."""
    mine = asdict(_reduced(pipe, plain, losses, target)) if pipe.has_last else {}
    told = pipe.transport.exchange(json.dumps(mine).encode())[pipe.schedule.placement.rank_of[-1]]
    try:
        return Reduction(**json.loads(told))
    except (TypeError, ValueError) as error:
        raise MetadataError("the rank of the last stage told its losses in a way that cannot be read") from error


def _reduced(pipe: Pipeline, plain: _Plain, losses: Sequence[torch.Tensor], target: Any) -> Reduction:
    outputs, targets = plain.outputs, plain.targets
    loss_fn: Any = pipe._loss_fn
    try:
        whole_output, whole_target = _whole(pipe, outputs, targets, target)
    except Exception as error:  # a splitter's own merge may raise whatever it likes
        return Reduction(unchecked=str(error))
    try:
        again = [loss_fn(copied(output), one).detach() for output, one in zip(outputs, targets, strict=True)]
        loss = loss_fn(whole_output, whole_target)
    except Exception as error:
        return Reduction(unchecked=f"loss_fn fails for the whole batch, with {type(error).__name__}: {error}")
    if not all(_alike(one, other) for one, other in zip(again, losses, strict=True)):
        return Reduction(unchecked="loss_fn gives another loss when it is called again with the same values")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return Reduction(unchecked="loss_fn does not give one number for the whole batch")
    scale = 1.0 if pipe._scaling is None else pipe._scaling.scale
    counted = [share / scale * float(one) for share, one in zip(plain.shares, losses, strict=True)]
    whole, size = float(loss.detach()), math.fsum(abs(one) for one in counted)
    return Reduction(whole, sum(counted), _precision(loss) * max(size, abs(whole)))


def _whole(pipe: Pipeline, outputs: Sequence[Any], targets: Sequence[Any], target: Any) -> tuple[Any, Any]:
    """The outputs and the targets of all microbatches, each as one."""
    if any(isinstance(leaf, torch.Tensor) and leaf.ndim == 0 for leaf in pytree.tree_leaves(outputs)):
        raise MicrobatchError("the last stage gives a number for each microbatch, and none for the whole batch")
    output = merge(copied(outputs), pipe._output_spec)
    if is_split_already(output):
        raise MicrobatchError("output_spec keeps the outputs of the microbatches apart")
    if is_split_already(target):
        target = merge(targets, pipe._batches.specs["target_spec"], name="target")
    return output, target


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    precision = _precision(other)
    return torch.allclose(one, other, rtol=precision, atol=0.0, equal_nan=True)


def _precision(tensor: torch.Tensor) -> float:
    """Half of the digits."""
    return float(torch.finfo(tensor.dtype).eps ** 0.5)


def _difference(
    owned: _Owned, way: str, found: torch.Tensor | None, expected: torch.Tensor | None, scale: float
) -> Difference:
    if found is None or expected is None:
        missing = 0.0 if found is expected else float("inf")
        return Difference(owned.stage, owned.name, owned.module, way, missing, _size(expected), 0.0, owned.order)
    found, expected = _plain(found), _plain(expected)
    finite = found.isfinite() & expected.isfinite()
    odd = (found != expected) & ~(found.isnan() & expected.isnan()) & ~finite
    found, expected = found.where(finite, 0), expected.where(finite, 0)
    size = _size(expected)
    largest = float("inf") if odd.any() else _size(found - expected)
    # What cancels out leaves the rounding of what it is made of.
    precision = _precision(expected)
    tolerance = precision * (size + 16 * precision * scale)
    return Difference(owned.stage, owned.name, owned.module, way, largest, size, tolerance, owned.order)


def _size(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else float(_plain(tensor).abs().nan_to_num(0, 0).max())


def _plain(tensor: Any) -> Any:
    """The elements that are here, as an ordinary tensor."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.to_dense() if tensor.is_sparse else tensor


def _exchanged(pipe: Pipeline, mine: Sequence[Difference]) -> list[Difference]:
    """The differences of all ranks: later stages first, and in a stage what comes later in the model."""
    found = []
    for data in pipe.transport.exchange(json.dumps([asdict(one) for one in mine]).encode()):
        try:
            found += [Difference(**fields) for fields in json.loads(data)]
        except (TypeError, ValueError) as error:
            raise MetadataError("a rank told its differences in a way that cannot be read") from error
    return sorted(found, key=lambda one: (-one.stage, one.name != "loss", -one.order, one.way))


def _taken(parameters: Mapping[torch.nn.Parameter, _Owned]) -> Gradients:
    """The gradients, taken away from the parameters."""
    found = {one: one.grad for one in parameters}
    for one in parameters:
        one.grad = None
    return found


def _order(pipe: Pipeline) -> dict[int, list[int]]:
    """For every stage of this rank, in which order the schedule runs the microbatches forward."""
    row = only_forwards(pipe.schedule.actions)[pipe.rank]
    return {
        index: [action.microbatch_index or 0 for action in row if action.stage_index == index] for index in pipe.stages
    }


class _Replay:
    """Forwards that begin with the same random state whenever they run, given their stage and microbatch."""

    def __init__(self, stages: Mapping[int, Stage], orders: Mapping[int, Sequence[int]]) -> None:
        self._stages = stages
        self._left = {index: iter(order) for index, order in orders.items()}
        self._handles: list[Any] = []
        self._buffers: dict[int, Buffers] = {}
        self._again: int | None = None

    def __enter__(self) -> Self:
        for index, stage in self._stages.items():
            self._handles += [
                stage.module.register_forward_pre_hook(partial(self._before, index)),
                stage.module.register_forward_hook(_after, always_call=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def once_more(self, visit: Visit) -> Iterator[None]:
        """Where the stage is run again for its last microbatch, with the buffers that it had."""
        stage = visit.stage
        current = Buffers([stage.module])
        self._buffers[stage.index].put_back()
        self._again = visit.microbatch
        try:
            yield
        finally:
            self._again = None
            current.put_back()

    def _before(self, index: int, *_: object) -> None:
        microbatch = next(self._left[index]) if self._again is None else self._again
        drawing.acquire()
        if self._again is None:
            self._buffers[index] = Buffers([self._stages[index].module])
        torch.manual_seed((index << 20) + microbatch)


def _after(*_: object) -> None:
    drawing.release()


def _put_back(parameters: Mapping[torch.nn.Parameter, _Owned], values: Values) -> str:
    """Give parameters the values that they had; returns which of them had another, if one had."""
    changed = ""
    for parameter, owned in parameters.items():
        value = values.get(parameter)
        if value is not None and not _is_same(parameter, value):
            changed = changed or f"the parameter {owned.name} of stage {owned.stage}"
            with torch.no_grad():
                parameter.copy_(value)
    return changed


def _is_same(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors are the same, number by number; NaN is NaN. A change of ``.data`` has no version.

    Of what is sharded, the part of this rank is compared. Sparse ones cannot be.
    """
    if parameter.layout is not torch.strided:
        return True
    with torch.no_grad():
        one, other = (each.to_local() if hasattr(each, "to_local") else each for each in (parameter, value))
        same: torch.Tensor = (one == other) | (one.isnan() & other.isnan())
        return bool(same.all())


@contextmanager
def _untouched(
    pipe: Pipeline,
    parameters: Mapping[torch.nn.Parameter, _Owned],
    values: Values,
) -> Iterator[Callable[[], None]]:
    """Leave all as it is: parameters, gradients, buffers, random numbers. Gives what brings back the beginning.

    In the beginning there are no gradients.

    Ranks may be threads, with random numbers in common: none begins before all have kept them, nor puts them back
    before all are done.
    """
    modules = [stage.module for stage in pipe.stages.values()]
    if isinstance(pipe._loss_fn, torch.nn.Module):
        modules.append(pipe._loss_fn)
    buffers, gradients = Buffers(modules), {one: one.grad for one in parameters}

    def begin() -> None:
        buffers.put_back()
        for one in parameters:
            one.grad = None

    with random_state(stage.device for stage in pipe.stages.values()):
        pipe.transport.exchange(b"kept")
        try:
            yield begin
            pipe.transport.exchange(b"done")
        finally:
            buffers.put_back()
            _put_back(parameters, values)
            for one, gradient in gradients.items():
                one.grad = gradient
