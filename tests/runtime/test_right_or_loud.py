"""Ways to be silently wrong: each is right, or an error."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import MicrobatchError, StageError, StepError
from penstock.runtime import Pipeline, Stage, run_in_threads
from penstock.runtime.transport.threads import thread_transports

PLACES = [("LoopedBFS", 1), ("GPipe", 2), ("1F1B", 2), ("ZB-H1", 2)]


def built(name, ranks, microbatches=4):
    several = {"stages_per_rank": 2} if name == "LoopedBFS" else {}
    return ps.build(name, ranks=ranks, microbatches=microbatches, **several)


def run(modules, schedule, x, target, *, loss=functional.mse_loss, call="step", **options):
    """One step of two stages on their ranks; what each rank returns."""

    def worker(transport):
        mine = {index: modules[index] for index in schedule.placement.stages_of(transport.rank)}
        with Pipeline(mine, schedule, loss_fn=loss, transport=transport, **options) as pipe:
            return getattr(pipe, call)(x, target=target)

    return run_in_threads(worker, schedule.ranks, timeout=60)


def compare(modules, schedule, x, target, *, loss=functional.mse_loss, **options):
    """Gradients are those of the unsplit model, and None where they are."""
    whole = nn.Sequential(*modules)
    loss(whole(x), target).backward()
    expected = [parameter.grad for parameter in whole.parameters()]
    whole.zero_grad()
    run(modules, schedule, x, target, loss=loss, **options)
    for parameter, gradient in zip(whole.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def linear():
    return nn.Linear(4, 4, dtype=torch.float64)


def values(*shape):
    return torch.randn(*shape, dtype=torch.float64)


class Stacked(nn.Module):
    """Autograd makes the gradients of input and parameter as views of one memory."""

    def __init__(self):
        super().__init__()
        self.added = nn.Parameter(values(2, 4))

    def forward(self, x):
        return torch.cat([torch.stack([part, self.added]).sum(0) for part in x.split(2)])


@pytest.mark.parametrize(("name", "ranks"), PLACES)
def test_gradients_in_one_memory(name, ranks):
    compare([linear(), Stacked()], built(name, ranks), values(8, 4), values(8, 4))


def test_the_gradient_of_an_argument_in_one_memory_with_a_parameter():
    x = values(8, 4).requires_grad_()
    target = values(8, 4)
    module = Stacked()
    functional.mse_loss(module(x), target).backward()
    expected, x.grad = x.grad, None
    module.zero_grad()
    run([module], built("GPipe", 1), x, target)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize(("name", "ranks"), PLACES)
def test_a_stage_that_changes_its_input_in_place(name, ranks):
    first, last = linear(), nn.Sequential(nn.ReLU(inplace=True), linear())
    compare([first, last], built(name, ranks), values(8, 4), values(8, 4))


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return self.layer(x.mul_(2))


@pytest.mark.parametrize(("name", "ranks"), PLACES)
def test_a_stage_that_changes_what_the_one_before_has_saved(name, ranks):
    """As in the unsplit model, autograd refuses it; between ranks each has its own."""
    torch.manual_seed(0)
    modules = [nn.Sequential(linear(), nn.Sigmoid()), Doubling()]
    x, target = values(8, 4), values(8, 4)
    if ranks == 1:
        with pytest.raises(StepError, match=r"output 0 of Sigmoid.* is at version 1"):
            run(modules, built(name, ranks), x, target)
        return
    copied = nn.Sequential(*modules)
    functional.mse_loss(modules[1](modules[0](x).clone()), target).backward()
    expected = [parameter.grad for parameter in copied.parameters()]
    copied.zero_grad()
    run(modules, built(name, ranks), x, target)
    for parameter, gradient in zip(copied.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def test_a_stage_that_changes_its_input_in_place_says_so_where_nobody_can_find_out():
    first, last = linear(), nn.Sequential(nn.ReLU(inplace=True), linear())
    schedule = built("1F1B", 2)
    x, target = values(8, 4), values(8, 4)
    with pytest.raises(StepError, match=r"[Pp]ass Stage\(index, module, changes_inputs=True\)"):
        run([first, last], schedule, x, target, shapes="per_microbatch")
    run([first, Stage(1, last, changes_inputs=True)], schedule, x, target, shapes="per_microbatch")


class Counting(nn.Module):
    """Returns a buffer that it changes for every microbatch."""

    def __init__(self, copies):
        super().__init__()
        self.layer = linear()
        self.copies = copies
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        self.count += 1
        return self.layer(x), self.count.clone() if self.copies else self.count


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.seen = []

    def forward(self, x, count):
        self.seen.append(count.item())
        return self.layer(x) * count


@pytest.mark.parametrize(("name", "ranks"), PLACES)
def test_what_a_stage_changes_after_it_returned_it(name, ranks):
    schedule = built(name, ranks)
    x, target = values(8, 4), values(8, 4)
    with pytest.raises((StepError, StageError), match=r"modified a tensor \(.*\) in place after returning it"):
        run([Counting(copies=False), Scaled()], schedule, x, target)
    last = Scaled()
    run([Counting(copies=True), last], schedule, x, target)
    assert last.seen[-4:] == [1, 2, 3, 4]


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x):
        return self.used(x), self.unused(x)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x, _other):
        return self.layer(x)


def test_an_output_that_the_next_stage_of_the_rank_ignores_has_no_gradient():
    twins = Twins()
    run([twins, First()], built("LoopedBFS", 1), values(8, 4), values(8, 4))
    assert twins.used.weight.grad is not None
    assert twins.unused.weight.grad is None


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return self.layer(x).square().mean()


def test_uneven_microbatches_count_by_their_samples_without_a_target_too():
    compare([linear(), WithLoss()], built("GPipe", 2, 2), values(5, 4), None, loss=lambda output, _: output)


def test_a_mean_over_what_nobody_can_count():
    with pytest.raises((MicrobatchError, StepError), match="needs the number of samples of each microbatch"):
        run(
            [linear(), WithLoss()],
            built("GPipe", 2, 2),
            values(5, 4),
            None,
            loss=lambda output, _: output,
            shapes="per_microbatch",
        )


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
@pytest.mark.parametrize("call", ["step", "eval"])
def test_a_target_of_another_batch(shapes, call):
    with pytest.raises(
        (MicrobatchError, StepError), match=r"the target has \d samples .* but the first stage was given"
    ):
        run([linear(), linear()], built("GPipe", 2), values(8, 4), values(4, 4), shapes=shapes, call=call)


class Seen(torch.autograd.Function):
    autocast = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Seen.autocast = torch.is_autocast_enabled("cpu")
        return gradient


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return self.layer(Seen.apply(x))


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_a_backward_does_not_run_under_autocast(name):
    schedule = built(name, 1)
    pipe = Pipeline({0: Watched()}, schedule, loss_fn=functional.mse_loss)
    x = values(8, 4).requires_grad_()
    with torch.autocast("cpu"):
        pipe.step(x, target=values(8, 4))
    assert Seen.autocast is False


@pytest.mark.parametrize("frozen", [False, True])
def test_given_shapes_of_a_frozen_stage(frozen):
    first = linear().requires_grad_(not frozen)
    example = torch.empty(2, 4, dtype=torch.float64, device="meta")
    compare([first, linear()], built("1F1B", 2), values(8, 4), values(8, 4), shapes={0: example})


class FromWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, *, x):
        return self.layer(x)


def test_uneven_microbatches_of_a_stage_that_gets_keywords_alone():
    first, last = FromWords(), linear()
    schedule = built("1F1B", 2, 3)
    x, target = values(8, 4), values(8, 4)

    def worker(transport):
        mine = {transport.rank: (first, last)[transport.rank]}
        with Pipeline(mine, schedule, loss_fn=functional.mse_loss, transport=transport) as pipe:
            pipe.step(target=target, **({"x": x} if pipe.has_first else {}))

    run_in_threads(worker, 2, timeout=60)
    expected = torch.autograd.grad(functional.mse_loss(last(first.layer(x)), target), list(first.parameters()))
    for parameter, gradient in zip(first.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_stage_under_another_index():
    with pytest.raises(StageError, match=r"stages\[0\] is a Stage of index 1"):
        Pipeline({0: Stage(1, linear())}, built("GPipe", 1), loss_fn=functional.mse_loss)


class Ragged(nn.Module):
    def forward(self, x):
        return x[:, : int(x[0, 0])]


def test_outputs_that_cannot_be_merged_are_an_error_on_every_rank():
    x = torch.ones(4, 4, dtype=torch.float64)
    x[2:, 0] = 2
    schedule = ps.build("ForwardOnly", ranks=2, microbatches=2)

    def worker(transport):
        mine = {transport.rank: (nn.Identity(), Ragged())[transport.rank]}
        with Pipeline(mine, schedule, transport=transport, share_losses=True) as pipe:
            try:
                for _ in range(2):  # the rank that has nothing to merge learns of it at its next call
                    pipe.eval(x)
            except (MicrobatchError, StepError) as error:
                return "cannot be concatenated" in str(error)

    assert run_in_threads(worker, 2, timeout=60) == [True, True]


@pytest.mark.parametrize(("name", "ranks"), PLACES)
def test_a_loss_that_is_detached_is_refused(name, ranks):
    with pytest.raises(StepError, match=r"the loss does not depend on the output of the last stage"):
        run(
            [linear(), linear()],
            built(name, ranks),
            values(8, 4),
            values(8, 4),
            loss=lambda output, target: functional.mse_loss(output.detach(), target),
        )


def test_a_model_of_which_nothing_is_trained_needs_no_loss_that_depends_on_it():
    frozen = [linear().requires_grad_(False), linear().requires_grad_(False)]
    output = run(frozen, built("1F1B", 2), values(8, 4), values(8, 4), allow_untrained=True)[1]
    assert output.shape == (8, 4)
    assert all(parameter.grad is None for module in frozen for parameter in module.parameters())


def test_a_loss_that_does_not_need_a_target_gets_none():
    run([linear(), linear()], built("1F1B", 2), values(8, 4), None, loss=lambda output, _: output.mean())


def test_a_target_that_is_forgotten_is_named():
    with pytest.raises(StepError, match=r"called without a target: pass target= on the rank of the last stage"):
        run([linear(), linear()], built("1F1B", 2), values(8, 4), None)
    with pytest.raises(
        (StageError, StepError), match=r"called without a target: pass target= on the rank of the last stage"
    ):
        run([linear(), linear()], built("1F1B", 2), values(8, 4), None, call="check_parity")


class Named(nn.Module):
    """Has an argument of a name that a Pipeline has, too."""

    def forward(self, x, loss_weight):
        return x * loss_weight


def test_an_argument_of_the_constructor_is_not_given_to_stages():
    for name in ("step", "eval"):
        (transport,) = thread_transports(1)
        pipe = Pipeline({0: linear()}, built("1F1B", 1), loss_fn=functional.mse_loss, transport=transport)
        with pytest.raises(StageError, match=rf"pass share_losses to Pipeline\(\.\.\.\), not to {name}"):
            getattr(pipe, name)(values(8, 4), target=values(8, 4), share_losses=True)
        pipe.close()
    (transport,) = thread_transports(1)
    with Pipeline({0: Named()}, built("1F1B", 1), loss_fn=functional.mse_loss, transport=transport) as pipe:
        x = values(8, 4).requires_grad_()
        torch.testing.assert_close(pipe.step(x, target=values(8, 4), loss_weight=2.0), 2 * x)


class Refilling(nn.Module):
    """Returns the same container for every microbatch, with other tensors in it."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kept = linear(), kind()

    def forward(self, x):
        self.kept.clear()
        if isinstance(self.kept, dict):
            self.kept.update(x=self.layer(x), y=x)
        else:
            self.kept.extend([self.layer(x), x])
        return self.kept


class Multiplying(nn.Module):
    """Takes a container."""

    def forward(self, values):
        one, other = values.values() if isinstance(values, dict) else values
        return one * other


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize(("name", "ranks"), PLACES)
@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
def test_a_container_that_is_filled_anew_for_every_microbatch(kind, name, ranks, shapes):
    modules, x = [Refilling(kind), Multiplying()], values(8, 4)
    compare(modules, built(name, ranks), x, values(8, 4), shapes=shapes)
    output = run(modules, built(name, ranks), x, None, call="eval", shapes=shapes)[-1]
    torch.testing.assert_close(output, modules[0].layer(x).detach() * x)
