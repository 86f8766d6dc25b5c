"""``pipe.check_parity``: right pipelines pass, wrong modules are named, and nothing is left behind."""

import re
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss

import penstock as ps
from penstock.errors import PenstockError, StageError
from penstock.execution.microbatches.specs import Microbatches
from penstock.ir.actions import ComputationType
from penstock.runtime import Pipeline, Stage, run_in_threads
from penstock.runtime.parity import Parity

WIDTH = 4


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(self.widen(self.norm(x)).relu()))


class Forgetful(torch.autograd.Function):
    """A product whose backward is right the first time that it is asked for both gradients, and never for one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        in_halves = not torch.autograd._is_checkpoint_valid()  # the engine has been asked for certain gradients
        return gradient @ w.t(), x.t() @ gradient * (1.5 if in_halves else 1)


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Forgetful.apply(x, self.weight)


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.rand(WIDTH, generator=self.generator, dtype=x.dtype)


class Several(nn.Module):
    """More than a tensor between stages."""

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        previous = 0 if other is None else other["previous"][0]
        return x * 1.5 + previous, {"previous": [x.t().contiguous().t() * 0.5, torch.arange(3), None]}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(7, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def probe(
    make: Callable[[int], nn.Module],
    name: str,
    ranks: int = 1,
    prepare: Callable[[Pipeline], None] | None = None,
    **options: Any,
) -> list[Parity | StageError]:
    """What each rank gets from the probe, in threads."""
    schedule = ps.build(name, ranks=ranks, microbatches=3, **options)
    torch.manual_seed(0)
    modules = [make(index).double() for index in range(schedule.stages)]

    def run(transport: Any) -> Parity | StageError:
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        pipe = Pipeline(mine, schedule, loss_fn=mse_loss, transport=transport)
        if prepare is not None:
            prepare(pipe)
        x, y = batch()
        args = (x,) if pipe.has_first else ()
        try:
            return pipe.check_parity(*args, target=y if pipe.has_last else None)
        except StageError as error:
            return error

    return run_in_threads(run, ranks, timeout=60)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("GPipe", 1), ("1F1B", 2), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 1), ("ZBVZeroBubble", 2), ("DualPipeV", 2)],
)
def test_right_modules_pass(name: str, ranks: int) -> None:
    found = probe(lambda _: Block(), name, ranks)
    assert all(isinstance(one, Parity) for one in found)
    assert all(one.differences == found[0].differences for one in found), "the same on every rank"
    assert not found[0].wrong
    assert found[0].largest < 1e-9
    stages = {one.stage for one in found[0].differences}
    assert stages == set(range(max(stages) + 1))
    ways = {one.way for one in found[0].differences if one.name == "norm.weight"}
    assert ways == {"in halves", "scheduled"}
    assert sum(one.name == "loss" for one in found[0].differences) == 3
    assert "match those of the stages run one after the other" in str(found[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_random_numbers_are_replayed(ranks: int) -> None:
    for one in probe(lambda _: Block(dropout=0.5), "ZBVZeroBubble", ranks):
        assert isinstance(one, Parity), one


def test_buffers_that_a_forward_changes() -> None:
    def make(_: int) -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.BatchNorm1d(WIDTH, momentum=0.5)
        )

    for one in probe(make, "ZBVZeroBubble", 2):
        assert isinstance(one, Parity), one


def test_containers_between_stages() -> None:
    def make(index: int) -> nn.Module:
        if index < 3:
            return nn.Sequential(Several()) if index == 0 else Several()

        class Last(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: torch.Tensor, other: Any) -> torch.Tensor:
                return self.layer(x + other["previous"][0])

        return Last()

    for one in probe(make, "Interleaved1F1B", 2):
        assert isinstance(one, Parity), one


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_that_is_wrong_in_halves_is_named_on_every_rank(ranks: int) -> None:
    """The others are not: what they get from it is right."""

    def make(index: int) -> nn.Module:
        return nn.Sequential(Block(), Bad()) if index == 1 else Block()

    found = probe(make, "ZBVZeroBubble", ranks)
    for error in found:
        assert isinstance(error, StageError)
        assert error.stage == 1
        assert "stage 1, 1.weight of Bad: when its backward runs in two halves the largest difference is" in str(error)
        assert "stage 1, 1.weight of Bad: with the schedule" in str(error)
        assert str(error).startswith("2 of ")
        assert "itself" not in str(error)
    assert len({str(error) for error in found}) == 1


def test_a_module_that_is_wrong_in_halves_passes_where_nothing_is_split() -> None:
    """The schedule is right then; the halves are reported all the same."""
    (error,) = probe(lambda _: nn.Sequential(Bad()), "GPipe")
    assert isinstance(error, Parity), "the first stage has no input, and so its backward is not cut"
    found = probe(lambda _: nn.Sequential(Block(), Bad()), "1F1B", 2)
    assert isinstance(found[0], StageError)
    assert "two halves" in str(found[0])
    assert "with the schedule" not in str(found[0])


def test_a_weight_gradient_of_ones_own_that_is_mixed_up() -> None:
    """It keeps what the last backward has left, which is wrong when another backward comes before W."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.last: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.weight.detach() if x.requires_grad else (x.requires_grad_() @ self.weight.detach())
            y.register_hook(lambda gradient: setattr(self, "last", (x.detach(), gradient)))
            return y

        def weight_backward(self) -> Callable[[], None]:
            def run() -> None:
                x, gradient = self.last
                made = x.t() @ gradient
                self.weight.grad = made if self.weight.grad is None else self.weight.grad + made

            return run

    schedule = ps.build("ZBVZeroBubble", ranks=1, microbatches=3)
    torch.manual_seed(0)
    own = Own().double()
    stages = [Stage(0, Block().double()), Stage(1, own, dw_builder=own.weight_backward)]
    rows = [part for action in schedule.actions[0] for part in action.parts]
    late = [part for part in rows if part.computation_type is ComputationType.BACKWARD_WEIGHT]
    rest = [part for part in rows if part.computation_type is not ComputationType.BACKWARD_WEIGHT]
    schedule = ps.Schedule([[*rest, *late]], placement=schedule.placement, microbatches=3)
    with Pipeline(stages, schedule, loss_fn=mse_loss) as pipe:
        x, y = batch()
        with pytest.raises(StageError, match=r"stage 1, weight of Own: with the schedule") as caught:
            pipe.check_parity(x, target=y)
    assert "stage 0" not in str(caught.value)


def test_a_custom_action_that_forgets_something() -> None:
    def forgetting(action: Any, context: Any) -> None:
        if action.microbatch_index != 1 or action.stage_index != 0:
            context.run(action)

    def prepare(pipe: Pipeline) -> None:
        pipe.register_custom_function(ComputationType.BACKWARD_WEIGHT, forgetting)

    (error,) = probe(lambda _: Block(), "ZBVZeroBubble", prepare=prepare)
    assert isinstance(error, StageError)
    assert "stage 0, narrow.bias of Linear: with the schedule" in str(error)
    assert "two halves" not in str(error)


def test_a_model_that_is_random_is_reported() -> None:
    for error in probe(lambda index: Noisy() if index else Block(), "ZBVZeroBubble", 2):
        assert isinstance(error, StageError)
        assert "a generator that is not restored" in str(error)


def test_everything_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = [nn.Sequential(Block(0.5), nn.BatchNorm1d(WIDTH)).double() for _ in range(2)]
    schedule = ps.build("ZBVZeroBubble", ranks=1, microbatches=3)
    x, y = batch()
    x.requires_grad_()
    with Pipeline(dict(enumerate(model)), schedule, loss_fn=mse_loss) as pipe:
        pipe.step(x, target=y)
        kept = [one.grad for one in (*model[0].parameters(), *model[1].parameters(), x)]
        values = [one.clone() for one in kept]
        buffers = [one.clone() for module in model for one in module.buffers()]
        state = torch.get_rng_state()
        pipe.check_parity(x, target=y)
        for one, before, value in zip((*model[0].parameters(), *model[1].parameters(), x), kept, values, strict=True):
            assert one.grad is before
            assert torch.equal(before, value)
        for one, value in zip((one for module in model for one in module.buffers()), buffers, strict=True):
            assert torch.equal(one, value)
        assert torch.equal(torch.get_rng_state(), state)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)
        pipe.step(x, target=y)


def test_float32() -> None:
    torch.manual_seed(0)
    model = [Block() for _ in range(2)]
    schedule = ps.build("ZBVZeroBubble", ranks=1, microbatches=3)
    x, y = (one.float() for one in batch())
    with Pipeline(dict(enumerate(model)), schedule, loss_fn=mse_loss) as pipe:
        assert pipe.check_parity(x, target=y).largest < 1e-3


def test_gradients_that_are_not_numbers_are_the_same_ones() -> None:
    class Broken(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.tensor([1.0, float("nan"), 1.0, 1.0])

    (found,) = probe(lambda _: Broken(), "ZBVZeroBubble")
    assert isinstance(found, Parity), found


def test_one_parameter_in_two_stages() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    (found,) = probe(lambda _: nn.Sequential(Block(), shared), "ZBVZeroBubble")
    assert isinstance(found, Parity), found


def test_a_schedule_without_backwards() -> None:
    schedule = ps.build("GPipe", ranks=1, microbatches=2)
    rows = [[one for one in row if one.computation_type is ComputationType.FORWARD] for row in schedule.actions]
    schedule = ps.Schedule(rows, placement=schedule.placement, microbatches=2)
    with (
        Pipeline({0: Block().double()}, schedule) as pipe,
        pytest.raises(StageError, match="this schedule has no backward"),
    ):
        pipe.check_parity(batch()[0])


def reduced(loss_fn: Any, target: torch.Tensor, ranks: int = 2, **settings: Any) -> list[Parity | StageError]:
    """What each rank gets from the probe of a classifier of tokens."""
    schedule = ps.build("1F1B", ranks=ranks, microbatches=3)
    torch.manual_seed(0)
    modules = [Block().double() for _ in range(ranks)]
    x = torch.randn(len(target), 5, WIDTH, dtype=torch.float64)

    def run(transport: Any) -> Parity | StageError:
        mine = {transport.rank: modules[transport.rank]}
        pipe = Pipeline(mine, schedule, loss_fn=loss_fn, transport=transport, **settings)
        try:
            return pipe.check_parity(*([x] if pipe.has_first else []), target=target if pipe.has_last else None)
        except StageError as error:
            return error

    return run_in_threads(run, ranks, timeout=60)


def tokens() -> torch.Tensor:
    """Classes of tokens, with more padding in the first samples."""
    classes = torch.arange(35).reshape(7, 5) % WIDTH
    return classes.where(torch.arange(5) >= torch.tensor([4, 3, 3, 1, 0, 0, 0])[:, None], -100)


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def test_a_mean_over_tokens_is_no_mean_over_samples() -> None:
    """Padding is left out by the loss function: microbatches have to count by their tokens."""
    found = reduced(token_loss, tokens())
    for error in found:
        assert isinstance(error, StageError)
        assert error.stage == 1
        assert "the loss of the whole batch is " in str(error)
        assert "is loss_fn a mean over samples? write loss_reduction='sum' for a sum" in str(error)
        assert "gradients and losses match those of the stages" in str(error)
    assert len({str(error) for error in found}) == 1
    settings = {"loss_reduction": "weighted", "loss_weight": lambda target: (target != -100).sum()}
    for one in reduced(token_loss, tokens(), **settings):
        assert isinstance(one, Parity), one
        assert one.reduction.whole == pytest.approx(one.reduction.together, rel=1e-12)
        assert not one.reduction.unchecked


def test_reductions_that_are_right() -> None:
    y = torch.randn(7, 5, WIDTH, dtype=torch.float64)
    right: list[tuple[Any, dict[str, Any]]] = [
        (mse_loss, {}),
        (partial(mse_loss, reduction="sum"), {"loss_reduction": "sum"}),
        (mse_loss, {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}),
    ]
    for loss_fn, settings in right:
        (one,) = reduced(loss_fn, y, 1, **settings)
        assert isinstance(one, Parity), one
        assert one.reduction.whole == pytest.approx(one.reduction.together, rel=1e-12)
        assert "the loss of the whole batch is " in str(one)


def test_reductions_that_are_wrong() -> None:
    y = torch.randn(7, 5, WIDTH, dtype=torch.float64)
    wrong: list[tuple[Any, str]] = [(mse_loss, "sum"), (partial(mse_loss, reduction="sum"), "mean")]
    for loss_fn, reduction in wrong:
        for error in reduced(loss_fn, y, loss_reduction=reduction):
            assert isinstance(error, StageError)
            assert "write loss_reduction=" in str(error)


def test_a_loss_that_is_not_a_number_in_one_microbatch() -> None:
    """As that of a microbatch that is all padding."""
    target = tokens()
    target[:3] = -100
    for error in reduced(token_loss, target):
        assert isinstance(error, StageError)
        assert "that of the microbatches together nan" in str(error)


def test_reductions_that_cannot_be_checked() -> None:
    y = torch.randn(7, 5, WIDTH, dtype=torch.float64)
    calls = iter(range(1000))

    def few(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(output) > 3:
            raise ValueError("too many samples")
        return mse_loss(output, target)

    def another(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target) * (2 if next(calls) > 5 else 1)

    unchecked: list[tuple[Any, dict[str, Any], str]] = [
        (few, {}, "loss_fn fails for the whole batch, with ValueError: too many samples"),
        (another, {}, "loss_fn returns a different loss when called again"),
        (mse_loss, {"output_spec": Microbatches}, "output_spec keeps the outputs of the microbatches separate"),
    ]
    for loss_fn, settings, why in unchecked:
        found = [str(one) for one in reduced(loss_fn, y, **settings)]
        assert all(f"was not checked: {why}" in one for one in found), found
        assert len(set(found)) == 1


def test_a_number_for_each_microbatch() -> None:
    """The last stage computes the loss: there is no output to merge."""

    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square().mean()

    schedule = ps.build("GPipe", ranks=1, microbatches=3)
    model = nn.Sequential(Block(), Loss()).double()
    with Pipeline({0: model}, schedule, loss_fn=lambda output, _: output.mean()) as pipe:
        x, y = batch()
        found = pipe.check_parity(x, target=y)
    assert "returns one number per microbatch" in found.reduction.unchecked


def test_targets_that_are_split_already() -> None:
    schedule = ps.build("GPipe", ranks=1, microbatches=3)
    with Pipeline({0: Block().double()}, schedule, loss_fn=mse_loss) as pipe:
        x, y = batch()
        found = pipe.check_parity(x, target=Microbatches(list(y.split([3, 2, 2]))))
    assert found.reduction.fits
    assert not found.reduction.unchecked


class Lazy(nn.Module):
    """Fills a buffer in its first forward, and adds another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = x.detach().mean(0)
            self.register_buffer("more", torch.ones(WIDTH, dtype=x.dtype), persistent=False)
        return self.layer(x) * self.cache * self.more


def test_a_buffer_that_was_none_is_none_again() -> None:
    module = Lazy().double()
    schedule = ps.build("ZBVZeroBubble", ranks=1, microbatches=3)
    x, y = batch()
    with Pipeline({0: module, 1: Block().double()}, schedule, loss_fn=mse_loss) as pipe:
        pipe.check_parity(x, target=y)
    assert module._buffers == {"cache": None}
    assert not module._non_persistent_buffers_set


def in_processes(rank: int, ranks: int, bad: bool, *, group: Any) -> str:
    schedule = ps.build("ZBVZeroBubble", ranks=ranks, microbatches=3)
    modules = {}
    for index in schedule.placement.stages_of(rank):
        torch.manual_seed(index)
        modules[index] = (nn.Sequential(Block(0.5), Bad()) if bad and index == 2 else Block(0.5)).double()
    with Pipeline(modules, schedule, loss_fn=mse_loss, group=group) as pipe:
        x, y = batch()
        args = (x,) if pipe.has_first else ()
        try:
            return str(pipe.check_parity(*args, target=y if pipe.has_last else None))
        except StageError as error:
            return str(error)


def test_processes(workers: Any) -> None:
    found = workers.run(in_processes, False, ranks=2)
    assert "match those of the stages run one after the other" in found[0]
    assert found[0] == found[1]
    found = workers.run(in_processes, True, ranks=2)
    assert "stage 2, 1.weight of Bad" in found[0]
    assert found[0] == found[1]


def sharded(rank: int, ranks: int) -> str:
    """Two replicas of a pipeline of two ranks, each with data of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    group = mesh["pipeline"].get_group()
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=3)
    modules = {}
    for index in schedule.placement.stages_of(dist.get_rank(group)):
        torch.manual_seed(index)
        modules[index] = fully_shard(Block(0.5).double(), mesh=mesh["replica"])
    with Pipeline(modules, schedule, loss_fn=mse_loss, group=group) as pipe:
        x, y = (one * (1 + rank // 2) for one in batch())
        args = (x,) if pipe.has_first else ()
        return str(pipe.check_parity(*args, target=y if pipe.has_last else None))


def test_sharded_stages(workers: Any) -> None:
    assert all("match those of the stages run one after the other" in one for one in workers.run(sharded))


def test_weights_that_are_not_there_yet() -> None:
    (parity,) = probe(lambda index: nn.Linear(WIDTH, WIDTH) if index else nn.LazyLinear(WIDTH), "ZBVZeroBubble")
    assert isinstance(parity, Parity)


def test_a_hook_that_changes_data() -> None:
    """Of that no version tells."""
    parameters: list[nn.Parameter] = []

    def step(parameter: torch.Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)

    def prepare(pipe: Pipeline) -> None:
        for parameter in pipe.stages[0].module.parameters():
            parameters.append(parameter)
            parameter.register_post_accumulate_grad_hook(step)

    torch.manual_seed(0)
    before = list(nn.Linear(WIDTH, WIDTH).double().parameters())
    (message,) = probe(lambda _: nn.Linear(WIDTH, WIDTH), "ZBVZeroBubble", prepare=prepare)
    assert re.match(
        r"the parameter \w+ of stage 0 changed during check_parity .* does a hook step an optimizer\?", str(message)
    )
    assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))


@pytest.mark.parametrize("every", [1, 2])
def test_a_hook_that_steps_an_optimizer(every: int) -> None:
    """It must not train the model; and what it does to the comparison is reported."""
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=2)
    modules = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.stages)]
    before = [parameter.detach().clone() for module in modules for parameter in module.parameters()]

    def stepping(parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
        optimizer, calls = torch.optim.SGD([parameter], lr=0.1), count(1)
        return lambda _: optimizer.step() if next(calls) % every == 0 else None

    def worker(transport: Any) -> Any:
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        if transport.rank == 1:
            for parameter in mine[1].parameters():
                parameter.register_post_accumulate_grad_hook(stepping(parameter))
        pipe = Pipeline(mine, schedule, loss_fn=mse_loss, transport=transport)
        x, y = torch.ones(4, WIDTH), torch.zeros(4, WIDTH)
        with pytest.raises(PenstockError) as caught:
            pipe.check_parity(*([x] if pipe.has_first else []), target=y if pipe.has_last else None)
        return str(caught.value)

    expected = {
        1: "rank 1 failed in 1I1 .* modified by an inplace operation",  # by autograd
        2: r"the parameter \w+ of stage 1 changed during check_parity .* does a hook step an optimizer\?",
    }
    for message in run_in_threads(worker, 2, timeout=60):
        assert re.match(expected[every], message), message
    after = [parameter for module in modules for parameter in module.parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
