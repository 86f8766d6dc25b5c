"""Two replicas of a pipeline of two ranks: gradients are those of the unsplit model on the whole batch."""

import copy
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_around_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import penstock as ps
from penstock.errors import StageError, StepError
from penstock.execution.data_parallel import adapter_for, reduction_scope
from penstock.ir.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, REDUCE_GRAD, Action
from penstock.runtime import Pipeline, Stage

WIDTH = 6
MICROBATCHES = 4
LAYERS = 8
FLOAT = torch.float32
SCHEDULES = [
    ("1F1B", {}),
    ("Interleaved1F1B", {"stages_per_rank": 2}),
    ("ZBVZeroBubble", {}),
    ("DualPipeV", {}),
    ("InterleavedZeroBubble", {"stages_per_rank": 2}),
]


class Layer(nn.Module):
    """A residual block with a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH * WIDTH) / 8) for _ in range(2))
        self.register_buffer("offset", torch.full((WIDTH,), 0.1))

    def forward(self, x):
        """Autograd makes the gradients of the last two parameters as views of the same memory."""
        mixed = x @ (self.one.view(WIDTH, WIDTH) + self.other.view(WIDTH, WIDTH))
        return x + self.second(torch.tanh(self.first(self.norm(x)))) + self.offset.to(x.dtype) + mixed / 4


def own_gradients(model):
    """Where two are the same memory, whatever is done in place is done to both."""
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()


@cache
def mesh():
    """Replicas by ranks of the pipeline; made once in a process."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))


def whole_model(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(*[Layer() for _ in range(LAYERS)]).to(dtype)


def batches(steps, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    size = 2 * 2 * MICROBATCHES
    return [tuple(torch.randn(size, WIDTH, dtype=dtype, generator=generator) for _ in range(2)) for _ in range(steps)]


def with_ddp(module, replicas):
    return DistributedDataParallel(module, process_group=replicas.get_group())


def with_ddp_inside(module, replicas):
    return nn.Sequential(*[with_ddp(layer, replicas) for layer in module])


def with_replicate_around_ddp(module, replicas):
    return replicate_around_ddp(module, process_group=replicas.get_group())


def with_replicate(module, replicas):
    return replicate(module, mesh=replicas)


def with_root_sharded(module, replicas):
    return fully_shard(module, mesh=replicas)


def with_all_sharded(module, replicas):
    for layer in module:
        fully_shard(layer, mesh=replicas)
    return fully_shard(module, mesh=replicas)


def with_parts_sharded(module, replicas):
    for layer in module:
        fully_shard(layer, mesh=replicas)
    return module


WRAPPERS = {
    "ddp": with_ddp,
    "ddp inside": with_ddp_inside,
    "replicate around ddp": with_replicate_around_ddp,
    "replicate": with_replicate,
    "root sharded": with_root_sharded,
    "all sharded": with_all_sharded,
    "parts sharded": with_parts_sharded,
}
SHARDED = ["replicate", "root sharded", "all sharded", "parts sharded"]


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Case:
    """One replica's rank of the pipeline, and the unsplit model beside it."""

    def __init__(self, schedule, wrap, *, dtype=torch.float64, **settings):
        self.replica, self.rank = mesh().get_coordinate()
        self.model = whole_model(dtype)
        per_stage = LAYERS // schedule.stages
        self.layers = {
            stage: range(stage * per_stage, (stage + 1) * per_stage)
            for stage in schedule.placement.stages_of(self.rank)
        }
        self.modules = {
            stage: wrap(copy.deepcopy(nn.Sequential(*[self.model[layer] for layer in layers])), mesh()["replica"])
            for stage, layers in self.layers.items()
        }
        self.pipe = Pipeline(
            self.modules,
            schedule,
            loss_fn=nn.functional.mse_loss,
            group=mesh().get_group("pipeline"),
            **settings,
        )

    def mine(self, value):
        return value.chunk(2)[self.replica]

    def step(self, x, y, **settings):
        return self.pipe.step(
            *([self.mine(x)] if self.pipe.has_first else []),
            target=self.mine(y) if self.pipe.has_last else None,
            **settings,
        )

    def eval(self, x, y=None):
        return self.pipe.eval(
            *([self.mine(x)] if self.pipe.has_first else []),
            target=self.mine(y) if self.pipe.has_last and y is not None else None,
        )

    def pairs(self):
        """Parameters of the pipeline beside those of the unsplit model."""
        for stage, module in self.modules.items():
            ours = list(module.parameters())
            theirs = [parameter for layer in self.layers[stage] for parameter in self.model[layer].parameters()]
            assert len(ours) == len(theirs)
            yield from zip(ours, theirs, strict=True)

    def assert_equal_gradients(self, **tolerance):
        for ours, theirs in self.pairs():
            torch.testing.assert_close(full(ours.grad), theirs.grad, **(tolerance or {"rtol": 0, "atol": 1e-12}))


def train(rank, ranks, name, options, wrapper, lowering=None):
    schedule = ps.build(name, ranks=2, microbatches=MICROBATCHES, **options)
    if lowering is not None:
        schedule = ps.lower(schedule, **lowering)
    case = Case(schedule, WRAPPERS[wrapper])
    ours = torch.optim.SGD([parameter for parameter, _ in case.pairs()], lr=0.1)
    theirs = torch.optim.SGD(case.model.parameters(), lr=0.1)
    for x, y in batches(2):
        outputs = case.eval(x)
        ours.zero_grad()
        theirs.zero_grad()
        expected = case.model(x)
        nn.functional.mse_loss(expected, y).backward()
        trained = case.step(x, y)
        for found in (outputs, trained):
            if case.pipe.has_last:
                torch.testing.assert_close(found, case.mine(expected), rtol=0, atol=1e-12)
        case.assert_equal_gradients()
        ours.step()
        theirs.step()
    for mine, reference in case.pairs():
        torch.testing.assert_close(full(mine.detach()), reference.detach(), rtol=0, atol=1e-12)
    case.pipe.close()


def train_all(rank, ranks, name, options, wrappers):
    for wrapper in wrappers:
        train(rank, ranks, name, options, wrapper)


@pytest.mark.parametrize(("name", "options"), SCHEDULES, ids=[name for name, _ in SCHEDULES])
def test_gradients_of_the_whole_batch(workers, name, options):
    workers.run(train_all, name, options, list(WRAPPERS))


@pytest.mark.parametrize(
    "lowering", [{"unshard": False}, {"reduce": False}, {"unshard": False, "reduce": False}], ids=str
)
def test_a_schedule_that_does_not_say_when(workers, lowering):
    for wrapper in ("ddp", "all sharded"):
        workers.run(train, "ZBVZeroBubble", {}, wrapper, lowering)


class Collectives(TorchDispatchMode):
    """Notes which collectives run, those of torch's own C++ as well."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.events.append(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


SHARING = ("allreduce_", "_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")


def shared_when(rank, ranks, name, options, wrapper, lowering):
    """What a step does, in order: its compute actions and reductions, and the collectives that share gradients."""
    schedule = ps.lower(ps.build(name, ranks=2, microbatches=MICROBATCHES, **options), **lowering)
    case = Case(schedule, WRAPPERS[wrapper])
    x, y = batches(1)[0]
    case.step(x, y)
    events = []

    def noted(action, context):
        events.append(str(action))
        context.run(action)

    kinds = (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    for kind in (*kinds, REDUCE_GRAD) if lowering.get("reduce", True) else kinds:
        case.pipe.register_custom_function(kind, noted)
    with Collectives(events):
        case.step(x, y)
    case.pipe.close()
    return [event for event in events if event[0].isdigit() or event in SHARING]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_is_shared_before_the_last_backward(workers, wrapper):
    for events in workers.run(shared_when, "InterleavedZeroBubble", {"stages_per_rank": 2}, wrapper, {}):
        sharing = [place for place, event in enumerate(events) if event in SHARING]
        assert sharing
        for place in sharing:
            before = next(event for event in reversed(events[:place]) if event not in SHARING)
            assert before.endswith("REDUCE_GRAD"), events
            stage = before.removesuffix("REDUCE_GRAD")
            assert not any(event.startswith((f"{stage}B", f"{stage}I", f"{stage}W")) for event in events[place:])


def test_without_a_reduction_gradients_are_shared_when_the_step_ends(workers):
    for wrapper in ("ddp", "all sharded"):
        for events in workers.run(shared_when, "ZBVZeroBubble", {}, wrapper, {"reduce": False}):
            first = next(place for place, event in enumerate(events) if event in SHARING)
            assert set(events[first:]) <= set(SHARING)


def shared_by_torch(rank, ranks):
    events = []
    module = with_ddp(nn.Linear(2, 2), mesh()["replica"])
    with Collectives(events):
        module(torch.ones(1, 2)).sum().backward()
    return events


def test_collectives_of_torch_itself_would_be_noted(workers):
    assert all("allreduce_" in events for events in workers.run(shared_by_torch))


def most_active(rank, ranks, wrapper, limit):
    """The largest number of stages with their parameters together, seen around every action of two steps."""
    schedule = ps.build("Interleaved1F1B", ranks=2, microbatches=MICROBATCHES, stages_per_rank=4)
    case = Case(ps.lower(schedule, max_active_stages=limit), WRAPPERS[wrapper])
    seen = []

    def look(*_):
        seen.append(sum(any(not isinstance(one, DTensor) for one in m.parameters()) for m in case.modules.values()))

    def looked(action, context):
        look()
        context.run(action)
        look()

    for module in case.modules.values():  # which the dry run calls as well
        module.register_forward_hook(look)
    for kind in (FORWARD, FULL_BACKWARD, REDUCE_GRAD):
        case.pipe.register_custom_function(kind, looked)
    for x, y in batches(2):
        case.step(x, y)
    look()
    case.eval(x)
    look()
    case.pipe.close()
    return max(seen), seen[-1]


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_stages_are_together_than_allowed(workers, limit):
    for wrapper in ("root sharded", "all sharded", "parts sharded"):
        assert set(workers.run(most_active, wrapper, limit)) == {(limit, 0)}


def with_whole_backwards(schedule):
    """The same order, with a B in the place of every I and no W."""
    rows = [
        [
            Action(part.stage_index, FULL_BACKWARD, part.microbatch_index)
            if part.computation_type is BACKWARD_INPUT
            else part
            for part in row
            if part is not None and part.computation_type is not BACKWARD_WEIGHT
        ]
        for row in schedule.actions
    ]
    return ps.Schedule(rows, placement=schedule.placement, microbatches=schedule.microbatches)


def train_in_mixed_precision(rank, ranks, whole, output):
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=MICROBATCHES)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=FLOAT, output_dtype=output)
    case = Case(
        with_whole_backwards(schedule) if whole else schedule,
        lambda module, replicas: fully_shard(module, mesh=replicas, mp_policy=policy),
        dtype=FLOAT,
    )
    x, y = batches(1, FLOAT)[0]
    nn.functional.mse_loss(case.model(x), y).backward()
    # The loss function gets what the last stage gives.
    case.step(x, y.to(torch.bfloat16 if output is None else output))
    case.assert_equal_gradients(rtol=0.1, atol=1e-2)
    case.pipe.close()
    return [full(parameter.grad) for parameter, _ in case.pairs()]


@pytest.mark.parametrize("output", [None, FLOAT], ids=str)
def test_mixed_precision(workers, output):
    """Gradients of several W are added up in the type in which they are reduced, as those of several B are."""
    split = workers.run(train_in_mixed_precision, False, output)
    whole = workers.run(train_in_mixed_precision, True, output)
    for ours, theirs in zip(split, whole, strict=True):
        for mine, reference in zip(ours, theirs, strict=True):
            assert mine.dtype is FLOAT
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-7)


def train_after_a_failure(rank, ranks, reduced_in):
    """A loss that fails in the last microbatch, then another pipeline of the same modules."""
    schedule = ps.build("1F1B", ranks=2, microbatches=MICROBATCHES)
    policy = MixedPrecisionPolicy(reduce_dtype=reduced_in)
    case = Case(schedule, lambda module, replicas: fully_shard(module, mesh=replicas, mp_policy=policy), dtype=FLOAT)
    losses = iter(range(MICROBATCHES))

    def loss_fn(output, target):
        if next(losses) == MICROBATCHES - 1:
            raise ValueError("no loss")
        return nn.functional.mse_loss(output, target)

    x, y = batches(1, FLOAT)[0]
    optimizer = torch.optim.SGD([parameter for parameter, _ in case.pairs()])
    case.pipe.close()
    group = mesh().get_group("pipeline")
    case.pipe = Pipeline(case.modules, schedule, loss_fn=loss_fn, group=group)
    with pytest.raises(StepError, match="no loss"):
        case.step(x, y)
    case.pipe = Pipeline(case.modules, schedule, loss_fn=nn.functional.mse_loss, group=group)
    optimizer.zero_grad()
    nn.functional.mse_loss(case.model(x), y).backward()
    case.step(x, y)
    case.assert_equal_gradients(rtol=1e-4, atol=1e-5)
    case.pipe.close()


@pytest.mark.parametrize("reduced_in", [None, torch.float64], ids=str)
def test_gradients_of_a_failed_step_are_dropped(workers, reduced_in):
    """Also those that have been added up in the type in which they are reduced, which ``zero_grad`` does not reach."""
    workers.run(train_after_a_failure, reduced_in)


class Choosing(nn.Module):
    """Uses one of two layers, and never a third."""

    def __init__(self, chosen):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.chosen = chosen

    def forward(self, x):
        return x + self.layers[self.chosen](x)


def some_without_gradient(rank, ranks):
    schedule = ps.build("GPipe", ranks=2, microbatches=2)
    replica, here = mesh().get_coordinate()
    torch.manual_seed(3)
    module = with_ddp(Choosing(replica).double(), mesh()["replica"])
    pipe = Pipeline(
        {here: module}, schedule, loss_fn=nn.functional.mse_loss, group=mesh().get_group("pipeline"), share_losses=True
    )
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    pipe.step(*([x] if here == 0 else []), target=x if here else None)
    pipe.close()
    return [[parameter.grad for parameter in layer.parameters()] for layer in module.module.layers]


def test_parameters_without_gradient(workers):
    """A gradient of one replica counts half; what has none anywhere gets none."""
    results = workers.run(some_without_gradient)
    for one, other in ((results[0], results[2]), (results[1], results[3])):
        for layer in (0, 1):
            for mine, theirs in zip(one[layer], other[layer], strict=True):
                assert mine.abs().max() > 0
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert one[2] == other[2] == [None, None]


def evaluate_first(rank, ranks, wrapper):
    """An evaluation in inference mode leaves parameters that can be trained."""
    case = Case(ps.build("1F1B", ranks=2, microbatches=MICROBATCHES), WRAPPERS[wrapper])
    x, y = batches(1)[0]
    with torch.inference_mode():
        output = case.eval(x, y)
    if case.pipe.has_last:
        torch.testing.assert_close(output, case.mine(case.model(x)), rtol=0, atol=1e-12)
    nn.functional.mse_loss(case.model(x), y).backward()
    case.step(x, y)
    case.assert_equal_gradients()
    case.pipe.close()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_evaluation_in_inference_mode(workers, wrapper):
    workers.run(evaluate_first, wrapper)


def accumulate(rank, ranks, wrapper):
    """Two steps without zero_grad: gradients of both."""
    case = Case(ps.build("ZBVZeroBubble", ranks=2, microbatches=MICROBATCHES), WRAPPERS[wrapper])
    for x, y in batches(2):
        nn.functional.mse_loss(case.model(x), y).backward()
        own_gradients(case.model)
        case.step(x, y)
    case.assert_equal_gradients()
    case.pipe.close()


@pytest.mark.parametrize("wrapper", ["ddp", "all sharded", "replicate"])
def test_gradients_of_two_steps_add_up(workers, wrapper):
    workers.run(accumulate, wrapper)


def refused(rank, ranks):
    def hook(state, bucket):
        raise AssertionError

    messages = []
    hooked = with_ddp(nn.Linear(WIDTH, WIDTH), mesh()["replica"])
    hooked.register_comm_hook(None, hook)
    still = DistributedDataParallel(
        nn.Linear(WIDTH, WIDTH), process_group=mesh()["replica"].get_group(), static_graph=True
    )
    for module in (hooked, still):
        with pytest.raises(StageError) as caught:
            adapter_for(module).begin_step()
        messages.append(str(caught.value))
    with pytest.raises(StageError) as caught:
        adapter_for(nn.Sequential(still, with_root_sharded(nn.Linear(WIDTH, WIDTH), mesh()["replica"])), stage=3)
    return [*messages, str(caught.value), caught.value.stage]


def test_what_would_be_left_out_is_refused(workers):
    hooked, still, both, stage = workers.run(refused)[0]
    assert "communication hook" in hooked
    assert "static_graph" in still
    assert "fully_shard" in both
    assert stage == 3


def custom_reduction(rank, ranks):
    """A function of the user's own for REDUCE_GRAD: the runtime leaves gradients to it."""
    case = Case(ps.build("1F1B", ranks=2, microbatches=MICROBATCHES), with_ddp)
    reduced = []
    case.pipe.register_custom_function(REDUCE_GRAD, lambda action, _: reduced.append(action.stage_index))
    x, y = batches(1)[0]
    case.step(x, y)
    nn.functional.mse_loss(case.model(case.mine(x)), case.mine(y)).backward()
    case.assert_equal_gradients()
    case.pipe.close()
    return reduced


def test_a_reduction_of_the_users_own(workers):
    assert workers.run(custom_reduction) == [[0], [1], [0], [1]]


def unused_reduction(rank, ranks, wrapper):
    """A function of the user's own for REDUCE_GRAD, in a schedule that has none: the step ends as ever."""
    case = Case(ps.lower(ps.build("1F1B", ranks=2, microbatches=MICROBATCHES), reduce=False), WRAPPERS[wrapper])
    case.pipe.register_custom_function(REDUCE_GRAD, lambda *_: None)
    x, y = batches(1)[0]
    case.step(x, y)
    nn.functional.mse_loss(case.model(x), y).backward()
    case.assert_equal_gradients()
    case.pipe.close()


@pytest.mark.parametrize("wrapper", ["ddp", "all sharded"])
def test_a_reduction_of_the_users_own_that_never_runs(workers, wrapper):
    workers.run(unused_reduction, wrapper)


class Adapter:
    """Notes what is asked of it."""

    reduction = 0

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda: self.calls.append(name)


def test_what_is_reduced_when_a_step_ends():
    stages = [Stage(index, nn.Linear(1, 1)) for index in range(3)]
    for stage in stages[:2]:
        stage.parallel = Adapter()
    with reduction_scope(stages, reduce=True, elsewhere={1}):
        pass
    assert [stage.parallel.calls for stage in stages[:2]] == [
        ["begin_step", "reduce", "finish_step", "end_step"],
        ["begin_step", "finish_step", "end_step"],
    ]


class Normed(nn.Module):
    """A weight made of two parameters, whose gradients W computes from the parameters themselves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        return x + self.linear(x)


def train_with_one_active_stage(rank, ranks):
    schedule = ps.build("InterleavedZeroBubble", ranks=2, microbatches=MICROBATCHES, stages_per_rank=2)
    torch.manual_seed(4)
    whole = nn.Sequential(*[Normed() for _ in range(4)]).double()
    _, here = mesh().get_coordinate()
    stages = schedule.placement.stages_of(here)
    modules = {stage: fully_shard(copy.deepcopy(whole[stage]), mesh=mesh()["replica"]) for stage in stages}
    lowered = ps.lower(schedule, max_active_stages=1)
    pipe = Pipeline(modules, lowered, loss_fn=nn.functional.mse_loss, group=mesh().get_group("pipeline"))
    x, y = batches(1)[0]
    nn.functional.mse_loss(whole(x), y).backward()
    pipe.step(*([x] if pipe.has_first else []), target=y if pipe.has_last else None)
    for stage, module in modules.items():
        for ours, theirs in zip(module.parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=0, atol=1e-12)
    pipe.close()


def test_weight_gradients_that_need_the_parameters(workers):
    workers.run(train_with_one_active_stage)


def train_in_two_dimensions(rank, ranks):
    """Shards on two processes, and two copies of each."""
    dimensions = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(4)
    whole = nn.Sequential(Layer(), Layer()).double()
    modules = {stage: fully_shard(copy.deepcopy(layer), mesh=dimensions) for stage, layer in enumerate(whole)}
    alone = [dist.new_group([one]) for one in range(ranks)][rank]
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=2, stages_per_rank=2)
    pipe = Pipeline(modules, schedule, loss_fn=nn.functional.mse_loss, group=alone)
    x, y = batches(1)[0]
    nn.functional.mse_loss(whole(x), y).backward()
    own_gradients(whole)
    pipe.step(x.chunk(4)[rank], target=y.chunk(4)[rank])
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    torch.testing.assert_close(pipe.clip_grad_norm_(0.01), expected, rtol=1e-12, atol=0)
    for stage, module in modules.items():
        for ours, theirs in zip(module.parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-9, atol=1e-12)
    pipe.close()


def test_shards_and_copies(workers):
    workers.run(train_in_two_dimensions)
