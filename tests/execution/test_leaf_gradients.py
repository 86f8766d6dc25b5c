"""Gradients of weights that are added without the engine, where it makes no difference to anybody."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

import penstock as ps
from penstock.execution.split_backward import split as split_backward
from penstock.execution.split_backward.split import SplitBackward, WeightBackward
from penstock.execution.stage import Stage
from penstock.execution.step import InFlight
from penstock.runtime import Pipeline, run_in_threads
from penstock.runtime.transport.threads import thread_transports


def x_of(rows: int = 5, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(rows, 4, dtype=dtype, generator=torch.Generator().manual_seed(rows)).requires_grad_()


def input_half(split: SplitBackward, module: nn.Module, x: torch.Tensor) -> WeightBackward:
    y = module(x)
    return split.input_backward([get_gradient_edge(y)], [torch.ones_like(y)], [x])[1]


def node_of(parameter: torch.Tensor) -> Any:
    return get_gradient_edge(parameter).node


@pytest.fixture
def by_engine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many roots the engine was given in each call that adds gradients."""
    calls: list[int] = []
    original = split_backward.run_backward

    def accumulate(roots: Any, gradients: Any) -> None:
        calls.append(len(roots))
        original(roots, gradients)

    monkeypatch.setattr(split_backward, "run_backward", accumulate)
    return calls


def same_gradients(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def check(module: nn.Module, x: torch.Tensor | None = None, times: int = 3) -> None:
    """Some microbatches in halves and whole give the same gradients."""
    x = x_of() if x is None else x
    other, split = copy.deepcopy(module), SplitBackward(adds_in_place=True)
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        theirs.grad = None if mine.grad is None else mine.grad.clone()
    for _ in range(times):
        input_half(split, module, x)()
        y = other(x.detach().requires_grad_())
        y.backward(torch.ones_like(y))
        same_gradients(module, other)


def linear(**settings: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3, **{"dtype": torch.float64} | settings)


def normed() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4, dtype=torch.float64), linear())


@pytest.mark.parametrize("make", [linear, lambda: linear(bias=False)])
def test_linear_layers_do_without_the_engine(make: Callable[[], nn.Module], by_engine: list[int]) -> None:
    check(make())
    assert by_engine == []


def test_what_other_layers_get_from_the_input_half_is_added_without_the_engine_once_there_is_something(
    by_engine: list[int],
) -> None:
    check(normed())
    assert by_engine == [2], "the first gradients of scale and shift of the norm: others may have their memory"


def test_a_first_gradient_has_memory_of_its_own() -> None:
    module = nn.Sequential(*(linear() if not number else nn.Linear(3, 3, dtype=torch.float64) for number in range(2)))
    check(module)
    pointers = [parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()]
    assert len(set(pointers)) == len(pointers)


def test_nothing_is_added_here_where_it_is_not_said_that_the_weights_are_alone(by_engine: list[int]) -> None:
    input_half(SplitBackward(), linear(), x_of())()
    assert by_engine == [2]


HOOKS: dict[str, Callable[[torch.Tensor, Callable[..., None]], Any]] = {
    "of the tensor": lambda parameter, seen: parameter.register_hook(seen),
    "after it": lambda parameter, seen: parameter.register_post_accumulate_grad_hook(seen),
    "before the node": lambda parameter, seen: node_of(parameter).register_prehook(seen),
    "after the node": lambda parameter, seen: node_of(parameter).register_hook(seen),
}


@pytest.mark.parametrize("when", ["before the first", "before I", "between I and W"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", ["1.weight", "1.bias", "0.weight"])
def test_hooks_are_called_whenever_they_were_set(name: str, hook: str, when: str) -> None:
    module, split = normed(), SplitBackward(adds_in_place=True)
    parameter = module.get_parameter(name)
    holding = node_of(parameter)  # or its hooks go with the graph
    calls: list[Any] = []

    def microbatch(moment: str) -> None:
        if when == moment:
            HOOKS[hook](parameter, lambda *values: calls.append(values))
        weight_backward = input_half(split, module, x_of())
        assert calls == []
        if when == "between I and W" and moment != "before the first":
            HOOKS[hook](parameter, lambda *values: calls.append(values))
        weight_backward()

    microbatch("before the first")
    calls.clear()
    microbatch("before I")
    assert len(calls) == 1
    other = copy.deepcopy(module)
    other.zero_grad()
    y = other(x_of())
    y.backward(torch.ones_like(y))
    expected = other.get_parameter(name).grad
    seen = [one for value in calls[0] for one in (value if isinstance(value, tuple) else (value,))]
    assert len(seen) == 1
    torch.testing.assert_close(seen[0].grad if hook == "after it" else seen[0], expected * (1 + (hook == "after it")))
    del holding


def test_a_hook_that_a_forward_sets_goes_with_its_graph_also_when_backwards_are_whole_in_between() -> None:
    calls: list[int] = []

    class Hooking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()
            self.number: int | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            if self.number is not None:
                number = self.number
                node_of(self.layer.weight).register_hook(lambda *_: calls.append(number))
            return torch.tanh(y) if self.bent else y

        bent = False

    module = Hooking()
    stage = Stage(0, module)

    def flight() -> tuple[InFlight, list[torch.Tensor]]:
        y = module(x := x_of())
        return InFlight((get_gradient_edge(y),), [x]), [torch.ones_like(y)]

    def halves() -> None:
        _, weight_backward = stage.input_backward(*flight())
        weight_backward()

    halves()  # the leaves are known
    for module.number in range(3):
        stage.backward(*flight())
    for module.number in range(3, 6):
        halves()
    assert calls == [0, 1, 2, 3, 4, 5]

    module.number = None
    for module.bent in (True, False):  # graphs of two forms: each knows the leaves
        halves()
    module.bent = True
    for module.number in range(6, 9):
        halves()
    assert calls == list(range(9))


def test_a_weight_that_is_frozen_between_the_halves_gets_nothing() -> None:
    module, split = linear(), SplitBackward(adds_in_place=True)
    for _ in range(2):
        module.requires_grad_()
        weight_backward = input_half(split, module, x_of())
        before = [None if one.grad is None else one.grad.clone() for one in module.parameters()]
        module.weight.requires_grad_(False)
        weight_backward()
        assert module.bias.grad is not None
        torch.testing.assert_close(module.weight.grad, before[0])
        module.weight.grad = torch.ones_like(module.weight)


class Marked(nn.Parameter):
    """A parameter of a type of its own."""


def with_weight(change: Callable[[nn.Linear], Any]) -> nn.Linear:
    module = linear()
    change(module)
    return module


def turned(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())


def in_columns(module: nn.Linear) -> None:
    module.weight.grad = torch.ones(4, 3, dtype=torch.float64).t()


def with_history(module: nn.Linear) -> None:
    module.weight.grad = torch.ones(3, 4, dtype=torch.float64).requires_grad_() * 2


def of_a_type(module: nn.Linear) -> None:
    module.weight = Marked(module.weight.detach())


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("change", [turned, in_columns, with_history, of_a_type], ids=lambda one: one.__name__)
def test_what_is_not_plain_is_left_to_the_engine(change: Callable[[nn.Linear], Any], by_engine: list[int]) -> None:
    check(with_weight(change), times=1)
    assert by_engine


def test_a_sparse_gradient_beside_a_dense_one(by_engine: list[int]) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(linear().weight.detach().clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = nn.functional.embedding(torch.tensor([0, 2, 2, 1, 0]), self.table, sparse=True)
            return x * rows

    module = Looking()
    module.table.grad = torch.ones_like(module.table)
    check(module)
    assert not module.table.grad.is_sparse
    assert by_engine == [2, 2, 2]  # with one of no use, as for any single root


def test_gradients_are_kept_in_the_type_that_was_asked_for() -> None:
    module = linear(dtype=torch.bfloat16)
    module.weight.grad_dtype = module.bias.grad_dtype = torch.float32
    split = SplitBackward(adds_in_place=True)
    for _ in range(2):
        input_half(split, module, x_of(dtype=torch.bfloat16))()
        assert module.weight.grad.dtype == module.bias.grad.dtype == torch.float32


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_ranks_are_threads_the_engine_adds(ranks: int, by_engine: list[int]) -> None:
    schedule = ps.build("InterleavedZeroBubble", ranks=ranks, microbatches=2)
    modules = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(schedule.stages)]

    def worker(transport: Any) -> None:
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        pipe = Pipeline(mine, schedule, loss_fn=nn.functional.mse_loss, transport=transport)
        begin = [x_of(4).detach()] if pipe.has_first else []
        pipe.step(*begin, target=torch.zeros(4, 4, dtype=torch.float64) if pipe.has_last else None)

    run_in_threads(worker, ranks, timeout=60)
    # In the first stage, which has no input that needs a gradient, all of the backward is in W, and the engine's.
    assert len(by_engine) == (2 if ranks == 1 else 2 * schedule.stages)


def test_a_bias_of_one_number(by_engine: list[int]) -> None:
    class Raised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = linear().weight, nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    check(Raised())
    assert by_engine == []


def test_operations_are_counted(by_engine: list[int]) -> None:
    module, split = linear(dtype=torch.float32), SplitBackward(adds_in_place=True)
    for _ in range(2):
        weight_backward = input_half(split, module, x_of(dtype=torch.float32))
        with FlopCounterMode(display=False) as counter:
            weight_backward()
        assert counter.get_total_flops() == 2 * 5 * 4 * 3
    assert by_engine == []


class Twofold(nn.Module):
    """Autograd makes the gradients of its parameters as views of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(16, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.one.view(4, 4) + self.other.view(4, 4))


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "1F1B"])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_autograd_makes_in_the_same_memory(name: str, to_none: bool) -> None:
    """Each gets memory of its own, or the next microbatch would be added to both."""
    torch.manual_seed(0)
    schedule = ps.build(name, ranks=1, microbatches=4)
    modules = [Twofold() for _ in range(schedule.stages)]
    whole = copy.deepcopy(nn.Sequential(*modules))
    x, y = x_of(8).detach(), torch.zeros(8, 4, dtype=torch.float64)
    (transport,) = thread_transports(1)
    with Pipeline(dict(enumerate(modules)), schedule, loss_fn=nn.functional.mse_loss, transport=transport) as pipe:
        for _ in range(2):
            for module in (*modules, whole):
                module.zero_grad(set_to_none=to_none)
            pipe.step(x, target=y)
            nn.functional.mse_loss(whole(x), y).backward()
            for parameter in whole.parameters():
                parameter.grad = parameter.grad.clone()
            for one, other in zip(modules, whole, strict=True):
                same_gradients(one, other)
        pipe.check_parity(x, target=y)


def test_a_first_gradient_that_is_sparse(by_engine: list[int]) -> None:
    """An embedding is not asked for memory that it does not have."""
    for name in ("1F1B", "ZBVZeroBubble"):
        schedule = ps.build(name, ranks=1, microbatches=2)
        table = nn.Embedding(7, 4, sparse=True, dtype=torch.float64)
        modules = [table, *[nn.Linear(4, 4, dtype=torch.float64) for _ in range(schedule.stages - 1)]]
        whole = copy.deepcopy(nn.Sequential(*modules))
        x, y = torch.arange(8) % 7, torch.zeros(8, 4, dtype=torch.float64)
        (transport,) = thread_transports(1)
        with Pipeline(dict(enumerate(modules)), schedule, loss_fn=nn.functional.mse_loss, transport=transport) as pipe:
            pipe.step(x, target=y)
        nn.functional.mse_loss(whole(x), y).backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        torch.testing.assert_close(table.weight.grad.to_dense(), whole[0].weight.grad.to_dense())


class Kind(torch.Tensor):
    """A class of its own."""


def test_an_operand_of_a_type_makes_no_gradient_of_that_type() -> None:
    module, split = linear(bias=False), SplitBackward(adds_in_place=True)
    for _ in range(2):
        x = x_of()
        y = nn.functional.linear(x.as_subclass(Kind), module.weight).as_subclass(torch.Tensor)
        split.input_backward([get_gradient_edge(y)], [torch.ones_like(y)], [x])[1]()
        assert type(module.weight.grad) is torch.Tensor


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("alone", [True, False])
def test_anomalies_in_gradients_of_weights_are_found(alone: bool) -> None:
    module, x = linear(bias=False), torch.full((5, 4), torch.inf, dtype=torch.float64).requires_grad_()
    nowhere = torch.zeros(5, 3, dtype=torch.bool)
    with torch.autograd.detect_anomaly():
        y = torch.where(nowhere, module(x), 0.0)  # gradients of zero, times infinity
        _, weight_backward = SplitBackward(adds_in_place=alone).input_backward(
            [get_gradient_edge(y)], [torch.ones_like(y)], [x]
        )
        with pytest.raises(RuntimeError, match="returned nan values"):
            weight_backward()


def test_weights_that_are_replaced_are_free() -> None:
    module, split = linear(), SplitBackward(adds_in_place=True)
    input_half(split, module, x_of())()
    old = weakref.ref(module.weight)
    module.weight = nn.Parameter(module.weight.detach().clone())
    input_half(split, module, x_of())()
    gc.collect()
    assert old() is None


def test_weights_of_a_graph_that_is_cut_no_more_are_free() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()
            self.turn = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x)) if self.turn else self.layer(x)

    module, split = Either(), SplitBackward(adds_in_place=True)
    input_half(split, module, x_of())()
    old = weakref.ref(module.layer.weight)
    module.layer, module.turn = linear(), True
    input_half(split, module, x_of())()
    gc.collect()
    assert old() is None


def test_a_weight_that_becomes_another() -> None:
    """The cut is known, and what it was found for was contiguous."""
    module, split = linear(), SplitBackward(adds_in_place=True)
    for change in (None, turned, of_a_type):
        if change is not None:
            change(module)
        module.zero_grad()
        input_half(split, module, x_of())()
        other = copy.deepcopy(module)
        other.zero_grad()
        y = other(x_of())
        y.backward(torch.ones_like(y))
        same_gradients(module, other)
        assert module.weight.grad.stride() == other.weight.grad.stride()


def test_a_change_of_type_in_place() -> None:
    module, split = linear(), SplitBackward(adds_in_place=True)
    input_half(split, module, x_of())()
    module.zero_grad()
    module.float()
    input_half(split, module, x_of(dtype=torch.float32))()
    assert module.weight.grad.dtype == torch.float32
    other = copy.deepcopy(module)
    other.zero_grad()
    y = other(x_of(dtype=torch.float32))
    y.backward(torch.ones_like(y))
    same_gradients(module, other)


def test_nodes_do_not_live_from_one_step_to_the_next() -> None:
    """A hook that is set between them goes with the node, which nobody holds."""
    schedule = ps.build("ZBVZeroBubble", ranks=1, microbatches=2)
    modules = {0: normed(), 1: nn.Linear(3, 3, dtype=torch.float64)}
    calls: list[Any] = []
    (transport,) = thread_transports(1)
    with Pipeline(modules, schedule, loss_fn=nn.functional.mse_loss, transport=transport) as pipe:
        for _ in range(3):
            pipe.step(x_of(4).detach(), target=torch.zeros(4, 3, dtype=torch.float64))
            for module in modules.values():
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    node_of(parameter).register_hook(lambda *values: calls.append(values))
    assert calls == []


def test_a_copy_of_a_stage_that_has_run() -> None:
    stage = Stage(0, linear())
    y = stage.module(x := x_of())
    stage.input_backward(InFlight((get_gradient_edge(y),), [x]), [torch.ones_like(y)])[1]()
    copied = copy.deepcopy(stage)
    assert copied.module.weight is not stage.module.weight
    y = copied.module(x)
    copied.input_backward(InFlight((get_gradient_edge(y),), [x]), [torch.ones_like(y)])[1]()
    same_gradients(copied.module, stage.module)
