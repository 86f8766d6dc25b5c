"""Outputs of a stage that share memory, e.g. the same tensor twice: gradients are right, or it is refused."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import StepError
from penstock.runtime import DistributedTransport, Pipeline, Replicate, Stage, run_in_threads

WIDTH = 4
#: A schedule of three stages, its ranks and stages per rank.
PLACES = {"one rank": ("LoopedBFS", 1, 3), "1F1B": ("1F1B", 3, 1), "ZB-H1": ("ZB-H1", 3, 1)}
MODES = ["inferred", "given", "per_microbatch"]
REFUSED = r"stage 2, microbatch \d.*modified one of input\[0\] and input\[1\] in place; they share memory"


def twice(x):
    return x, x


def flat(x):
    return x, x.view(-1)


def column(x):
    return x, x[:, 1]


def transposed(x):
    return x.T, x


def overlapping(x):
    return x[:, :3], x[:, 1:]


def without_gradient(x):
    return x, x.detach()


def halves(x):
    return x[:, :2], x[:, 2:]


def interleaved(x):
    return x[:, ::2], x[:, 1::2]


def copies(x):
    return x, x.clone()


SHARING = [twice, flat, column, transposed, overlapping, without_gradient]
APART = [halves, interleaved, copies]


class First(nn.Module):
    """A layer, and a way to return what it gives."""

    def __init__(self, returned):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.returned = returned

    def forward(self, x):
        return self.returned(self.layer(x))


class Passing(nn.Module):
    """Hands on what it gets."""

    def forward(self, *values):
        return values


class Last(nn.Module):
    """May modify an input in place before it uses both."""

    def __init__(self, *, modifies):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.modifies = modifies

    def forward(self, one, other):
        if self.modifies:
            one.mul_(2)
        return (one.square().sum() + 3 * other.square().sum()) * self.scale


def stages(returned, *, modifies):
    torch.manual_seed(0)
    return [First(returned), Passing(), Last(modifies=modifies)]


def batch():
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def the_output(output, _):
    return output


def run(modules, place, use, *, transport=None, **options):
    """What ``use(pipe)`` gives on each rank."""
    name, ranks, several = PLACES[place]
    schedule = ps.build(name, ranks=ranks, microbatches=2, **({"stages_per_rank": several} if several > 1 else {}))

    def worker(transport):
        mine = {
            index: Stage(index, modules[index], changes_inputs=index == 2 and modules[index].modifies)
            for index in schedule.placement.stages_of(transport.rank)
        }
        options.setdefault("loss_reduction", "sum")
        with Pipeline(mine, schedule, loss_fn=the_output, transport=transport, **options) as pipe:
            return use(pipe)

    return worker(transport) if transport else run_in_threads(worker, schedule.ranks, timeout=60)


def shapes(mode, returned):
    if mode != "given":
        return mode
    example = torch.empty(2, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    return {0: returned(example), 1: returned(example)}


def step(pipe):
    losses = []
    pipe.step(batch(), target=torch.zeros(4), losses=losses, return_outputs=False)
    return sum(losses)


def check_gradients(modules, place, **options):
    """Losses and gradients are those of the unsplit model."""
    first, _, last = deepcopy(modules)
    expected = last(*first(batch()))
    expected.backward()
    losses = run(modules, place, step, **options)
    torch.testing.assert_close(losses[-1], expected.detach())
    torch.testing.assert_close(modules[0].layer.weight.grad, first.layer.weight.grad)
    torch.testing.assert_close(modules[2].scale.grad, last.scale.grad)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("returned", SHARING)
def test_a_stage_that_modifies_one_of_two_inputs_in_one_memory_is_refused(returned, mode, place):
    modules = stages(returned, modifies=True)
    with pytest.raises(StepError, match=REFUSED):
        run(modules, place, step, shapes=shapes(mode, returned))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("returned", SHARING)
def test_inputs_in_one_memory_that_nobody_modifies(returned, mode, place):
    check_gradients(stages(returned, modifies=False), place, shapes=shapes(mode, returned))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("returned", APART)
def test_inputs_without_a_common_element_may_be_modified(returned, mode, place):
    check_gradients(stages(returned, modifies=True), place, shapes=shapes(mode, returned))


def test_parity_is_refused_with_it():
    with pytest.raises(StepError, match="they share memory"):
        run(stages(twice, modifies=True), "1F1B", lambda pipe: pipe.check_parity(batch(), target=torch.zeros(4)))


@pytest.mark.parametrize("place", ["one rank", "1F1B"])
@pytest.mark.parametrize("returned", SHARING)
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_evaluation(returned, place, mode):
    """Right where the memory is the same, refused where it is not."""

    def evaluate(pipe):
        losses = []
        with mode():
            pipe.eval(batch(), target=torch.zeros(4), losses=losses)
        return sum(losses)

    modules = stages(returned, modifies=True)
    if place == "one rank" and mode is nullcontext:
        first, _, last = deepcopy(modules)
        torch.testing.assert_close(run(modules, place, evaluate)[-1], last(*first(batch())).detach())
    else:
        with pytest.raises(StepError, match=REFUSED):
            run(modules, place, evaluate)


def test_given_shapes_say_what_shares_memory():
    """If a stage modifies its inputs; else it does not matter."""
    example = torch.empty(2, WIDTH, dtype=torch.float64, device="meta")
    apart = (example, torch.empty_like(example))
    check_gradients(stages(twice, modifies=False), "1F1B", shapes={0: apart, 1: apart})
    advice = "share memory in the example"
    with pytest.raises(StepError, match=rf"rank 0 failed in 0F0.*output\[0\] and output\[1\] share memory.*{advice}"):
        run(stages(twice, modifies=True), "1F1B", step, shapes={0: apart, 1: (example, example)})
    with pytest.raises(StepError, match=rf"rank 1 failed in 1F0.*output\[0\] and output\[1\] share memory.*{advice}"):
        run(stages(twice, modifies=True), "1F1B", step, shapes={0: (example, example), 1: apart})


class Sometimes(nn.Module):
    """Returns the same tensor twice for every other microbatch, from the second one on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.calls = 0

    def forward(self, x):
        x = self.layer(x)
        self.calls += 1
        return (x, x) if self.calls % 2 == 0 else (x, x.clone())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_a_stage_that_returns_a_tensor_twice_for_some_microbatches(mode, place):
    def modules(*, modifies):
        return [Sometimes(), Passing(), Last(modifies=modifies)]

    check_gradients(modules(modifies=False), place, shapes=shapes(mode, copies))
    with pytest.raises(StepError, match="share memory"):
        run(modules(modifies=True), place, step, shapes=shapes(mode, copies))


class Masking(nn.Module):
    """Modifies an input that needs no gradient."""

    def forward(self, x, mask):
        return (x * mask.logical_not_()).sum()


class WithMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return self.layer(x), x > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_input_without_a_gradient_may_be_modified(ranks):
    """A dry run finds it; where there is none, it has to be said."""
    modules = [WithMask(), Masking()]
    schedule = ps.build("1F1B" if ranks == 2 else "LoopedBFS", ranks=ranks, microbatches=2)
    modules[1](*modules[0](batch())).backward()
    expected = modules[0].layer.weight.grad
    given = {0: (torch.empty(2, WIDTH, dtype=torch.float64), torch.empty(2, WIDTH, dtype=torch.bool))}

    def run_with(shapes, *, said):
        modules[0].zero_grad()

        def worker(transport):
            mine = {
                index: Stage(index, modules[index], changes_inputs=said and index == 1)
                for index in schedule.placement.stages_of(transport.rank)
            }
            options = {"loss_fn": the_output, "loss_reduction": "sum", "transport": transport, "shapes": shapes}
            with Pipeline(mine, schedule, **options) as pipe:
                return step(pipe)

        run_in_threads(worker, ranks, timeout=60)
        torch.testing.assert_close(modules[0].layer.weight.grad, expected)

    for shapes, said in (("inferred", False), ("per_microbatch", False), (given, True)):
        run_with(shapes, said=said)
    with pytest.raises(StepError, match=r"stage 1, microbatch 0.*modified input\[1\] in place.*changes_inputs=True"):
        run_with(given, said=False)


class Nested(nn.Module):
    """Returns a tensor twice in a dict; the second place is further down."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        x = self.layer(x)
        return {"x": x, "more": [None, x.sum(1), x]}


class Reading(nn.Module):
    def forward(self, value):
        return (value["x"].mul_(2) + value["more"][2]).sum()


def test_the_places_are_named():
    modules = [Nested(), Reading()]
    schedule = ps.build("1F1B", ranks=2, microbatches=2)

    def worker(transport):
        index = transport.rank
        with Pipeline({index: modules[index]}, schedule, loss_fn=the_output, transport=transport) as pipe:
            return step(pipe)

    with pytest.raises(StepError, match=r"modified one of input\['x'\] and input\['more'\]\[2\] in place"):
        run_in_threads(worker, 2, timeout=60)


@pytest.mark.parametrize("returned", SHARING)
@pytest.mark.parametrize("needed", [True, False])
def test_arguments_in_one_memory(returned, needed):
    """Those of the first stage: as they are where no gradient is needed, else refused if one is modified."""
    schedule = ps.build("GPipe", ranks=1, microbatches=1)

    def run_with(module, x):
        args = returned(x * 1)
        pipe = Pipeline({0: module}, schedule, loss_fn=the_output, loss_reduction="sum", args_spec=Replicate)
        losses = []
        pipe.step(*args, target=torch.zeros(4), losses=losses)
        return losses[0]

    for modifies in (False, True):
        module, x = Last(modifies=modifies), batch().requires_grad_(needed)
        whole, same_x = deepcopy(module), batch().requires_grad_(needed)
        if modifies and needed:
            with pytest.raises(StepError, match=r"modified one of input\[0\] and input\[1\] in place"):
                run_with(module, x)
            continue
        expected = whole(*returned(same_x * 1))
        expected.backward()
        torch.testing.assert_close(run_with(module, x), expected.detach())
        torch.testing.assert_close(module.scale.grad, whole.scale.grad)
        torch.testing.assert_close(x.grad, same_x.grad)


def in_process(rank, ranks, mode, *, group):
    torch.set_num_threads(1)
    transport = DistributedTransport(group, timeout=60)
    try:
        run(stages(twice, modifies=True), "1F1B", step, transport=transport, shapes=shapes(mode, twice))
    except StepError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("mode", MODES)
def test_processes(workers, mode):
    for message in workers.run(in_process, mode, ranks=3):
        assert "modified one of input[0] and input[1] in place; they share memory" in message
