"""A step that is validated afterwards is bit for bit the step that waits, with and without roll-backs."""

import math
import threading

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import RunError, StageError
from penstock.runtime import Pipeline, run_in_threads
from runtime.optimizers.trained import MSE, WIDTH, batches, layers, pipeline

STEPS = 6


class Turns:
    """Has rank 0 look at the norms that are known before the others announce theirs: it knows only its own."""

    def __init__(self):
        self._looked = [threading.Event() for _ in range(STEPS)]
        self._turns = [0, 0]

    def watch(self, transport):
        """Note when rank 0 has looked, or waits for the others."""
        if transport.rank == 0:
            announce = transport.announce
            transport.announce = lambda *args: Watched(announce(*args), self._looked[self._turns[0]])

    def step(self, rank, step):
        looked = self._looked[self._turns[rank]]
        if rank == 0:
            step()
            looked.set()  # a gradient scaler may have left out the step
        else:
            assert looked.wait(20)
            step()
        self._turns[rank] += 1


class Watched:
    """An announcement that shows when it has been looked at."""

    def __init__(self, announced, looked):
        self._announced, self._looked = announced, looked

    def known(self):
        found = self._announced.known()
        self._looked.set()
        return found

    def collect(self):
        self._looked.set()
        return self._announced.collect()


class Together:
    """Lets ranks step when they are ready."""

    def watch(self, transport):
        pass

    def step(self, _, step):
        step()


def train(split, transport, turns, make, *, spoiled=(), zero=True, scaled=False, look=lambda _: None):
    """Train; returns the parameters, the norms and what was skipped, the state, and how many steps were undone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    turns.watch(transport)
    with pipeline(split, transport, scaler=scaler) as pipe:
        optimizer = make(pipe)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        seen = []
        for number, (x, y) in enumerate(batches(STEPS)):
            if transport.rank == 0:
                split[2].spoils = scaled and number in spoiled
            transport.exchange(b"")
            pipe.step(x, target=y)
            if number in spoiled and not scaled:
                spoil(pipe)
            if scaler is not None:
                scaler.unscale_(optimizer)
            turns.step(transport.rank, optimizer.step if scaler is None else lambda: scaler.step(optimizer))
            if scaler is not None:
                scaler.update()
            decay.step()
            look(optimizer)
            if zero is not None:
                optimizer.zero_grad(set_to_none=zero)
            if number % 2:  # else it is validated in the next step
                seen.append((optimizer.grad_norm, optimizer.skipped))
        undone = optimizer.rollbacks
    state = {
        (index, key): value.clone() if isinstance(value, torch.Tensor) else value
        for index, kept in optimizer.wrapped.state_dict()["state"].items()
        for key, value in kept.items()
    }
    return [one.detach().clone() for one in pipe.parameters()], seen, state, undone


def spoil(pipe):
    """Make a gradient infinite on rank 1 alone."""
    if pipe.rank == 1:
        next(pipe.parameters()).grad[0] = math.inf


def first_norm():
    """The norm of all gradients in the first step."""
    whole, ((x, y), *_) = layers(), batches(1)
    MSE(whole(x), y).backward()
    return math.hypot(*(float(one.grad.norm()) for one in whole.parameters()))


def same(one, other):
    """Whether two values are equal bit for bit, also where they are not numbers."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7e77), other.nan_to_num(7e77))
    return one == other or (one != one and other != other)


def both(kind, options, **how):
    """Train with and without post-validation; returns how many steps rank 0 and rank 1 have undone."""
    results = []
    for post_validate in (False, True):
        split, turns = layers(), Turns()

        def make(pipe, late=post_validate):
            return ps.Optimizer(pipe, kind, post_validate=late, **options)

        def run(transport, split=split, turns=turns, make=make):
            return train(split, transport, turns, make, **how)

        results.append(run_in_threads(run, 2))
    for (plain, norms, state, _), (late, late_norms, late_state, _) in zip(*results, strict=True):
        assert all(map(same, plain, late))
        assert [[*map(str, one)] for one in norms] == [[*map(str, one)] for one in late_norms]
        assert state.keys() == late_state.keys()
        assert all(same(value, late_state[place]) for place, value in state.items())
    assert [undone for *_, undone in results[0]] == [0, 0]
    return [undone for *_, undone in results[1]]


KINDS = [
    (torch.optim.AdamW, {"lr": 0.05}),
    (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.RAdam, {"lr": 0.05}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_no_roll_back_without_reason(kind, options):
    assert both(kind, {**options, "max_norm": 1e6}) == [0, 0]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("zero", [True, False, None])
def test_a_clipped_step_is_undone_and_taken_again(kind, options, zero):
    """Only the first one of a row: after it the rank waits."""
    assert both(kind, {**options, "max_norm": 1e-3}, zero=zero)[1] == 0


def test_rank_0_alone_is_within_the_norm():
    """Its part of the norm is too small to clip by, so only the others show that it must."""
    options = {"lr": 0.05, "max_norm": 0.99 * first_norm(), "groups": {"*norm*": {"lr": 0.01}}}
    undone = both(torch.optim.AdamW, options)
    assert undone[0] >= 1
    assert undone[1] == 0


def test_a_step_with_an_infinite_gradient_on_another_rank_is_skipped():
    options = {"lr": 0.05, "skip_nonfinite": True}
    assert both(torch.optim.AdamW, options, spoiled={1, 4}) == [2, 0]


def test_without_skipping_it_spoils_the_parameters_alike():
    assert both(torch.optim.SGD, {"lr": 0.05, "max_norm": 1e6}, spoiled={3}) == [1, 0]


def test_with_a_gradient_scaler():
    options = {"lr": 0.05, "max_norm": 0.99 * first_norm()}
    assert both(torch.optim.AdamW, options, spoiled={1}, scaled=True)[0] >= 1


def test_hooks_are_called_for_steps_that_count_only():
    calls = []

    def make(pipe):
        optimizer = ps.Optimizer(pipe, torch.optim.SGD, lr=0.05, max_norm=0.35, post_validate=True)
        optimizer.register_step_post_hook(lambda *_: calls.append(pipe.rank))
        return optimizer

    split, turns = layers(), Together()
    found = run_in_threads(lambda transport: train(split, transport, turns, make), 2)
    assert [undone for *_, undone in found] == [0, 0]
    assert sorted(calls) == [0] * STEPS + [1] * STEPS


def after_a_step(look):
    """Take a step that must be undone, and call a function on rank 0 before it is."""
    split, turns = layers(), Turns()

    def run(transport):
        turns.watch(transport)
        with pipeline(split, transport) as pipe:
            optimizer = ps.Optimizer(pipe, torch.optim.SGD, lr=0.05, skip_nonfinite=True, post_validate=True)
            (x, y), *_ = batches(1)
            before = [one.detach().clone() for one in pipe.parameters()]
            pipe.step(x, target=y)
            spoil(pipe)
            turns.step(transport.rank, optimizer.step)
            if transport.rank == 0:
                changed = [not torch.equal(*pair) for pair in zip(before, pipe.parameters(), strict=True)]
                assert any(changed)
                look(pipe, optimizer)
            optimizer.validate()
            assert all(map(torch.equal, before, pipe.parameters()))
        return optimizer.rollbacks

    return run_in_threads(run, 2)


@pytest.mark.parametrize(
    "look",
    [
        lambda pipe, optimizer: optimizer.state_dict(),
        lambda pipe, optimizer: optimizer.state,
        lambda pipe, optimizer: optimizer.skipped,
        lambda pipe, optimizer: optimizer.zero_grad(set_to_none=False),
    ],
)
def test_what_shows_the_step_validates_it(look):
    def looked(pipe, optimizer):
        look(pipe, optimizer)
        assert optimizer._trial.rollbacks == 1

    assert after_a_step(looked) == [1, 0]


def test_a_gradient_that_is_modified_in_between():
    def modify(pipe, _):
        next(pipe.parameters()).grad.zero_()

    with pytest.raises(RunError, match=r"a parameter of shape \[4, 4\] was modified in place after optimizer.step"):
        after_a_step(modify)


def test_a_rank_that_fails_before_its_step_leaves_that_of_the_others_undone():
    split, kept = layers(), {}

    def run(transport):
        with pipeline(split, transport) as pipe:
            optimizer = ps.Optimizer(pipe, torch.optim.SGD, lr=0.05, max_norm=1e6, post_validate=True)
            (x, y), *_ = batches(1)
            pipe.step(x, target=y)
            if transport.rank == 1:
                stepped.wait(20)
                raise ZeroDivisionError
            kept[0] = [one.detach().clone() for one in pipe.parameters()]
            optimizer.step()
            kept[1] = list(pipe.parameters())
            stepped.set()
            pipe.step(x, target=y)

    stepped = threading.Event()
    with pytest.raises(ZeroDivisionError):
        run_in_threads(run, 2)
    assert all(map(torch.equal, kept[0], kept[1]))


def test_closing_a_pipeline_validates_the_last_step():
    split, turns = layers(), Turns()

    def run(transport):
        turns.watch(transport)
        pipe = pipeline(split, transport)
        optimizer = ps.Optimizer(pipe, torch.optim.SGD, lr=0.05, skip_nonfinite=True, post_validate=True)
        (x, y), *_ = batches(1)
        before = [one.detach().clone() for one in pipe.parameters()]
        pipe.step(x, target=y)
        spoil(pipe)
        turns.step(transport.rank, optimizer.step)
        pipe.close()
        return all(map(torch.equal, before, pipe.parameters()))

    assert run_in_threads(run, 2) == [True, True]


def test_a_pipeline_is_closed_if_its_last_step_turns_out_to_be_invalid():
    def fail():
        raise RunError("the gradient was modified")

    closed = []
    pipe = Pipeline({0: nn.Linear(WIDTH, WIDTH)}, ps.build("GPipe", ranks=1, microbatches=2), loss_fn=MSE)
    pipe._engine.settlers.append(fail)
    pipe.transport.close = lambda: closed.append(pipe)
    with pytest.raises(RunError, match="was modified"), pipe:
        pass
    assert closed == [pipe]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.25, dtype=torch.float64))
        self.own = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x @ self.weight) @ self.own


def train_tied(rank, ranks, max_norm, *, group):
    """In processes each rank has a copy of the tied parameter. Returns the parameters with and without the option."""
    found = []
    for late in (False, True):
        schedule = ps.build("1F1B", ranks=ranks, microbatches=4)
        ties = ["weight"]
        with Pipeline({rank: Tied()}, schedule, loss_fn=MSE, group=group, ties=ties) as pipe:
            optimizer = ps.Optimizer(pipe, torch.optim.AdamW, lr=0.05, max_norm=max_norm, post_validate=late)
            for x, y in batches(5):
                pipe.step(x, target=y)
                optimizer.step()
                optimizer.zero_grad()
        found.append([one.detach() for one in pipe.parameters()])
    return found


def test_tied_parameters_in_processes(workers):
    for max_norm in (1e6, 1e-3, 0.05):
        for plain, late in workers.run(train_tied, max_norm, ranks=2):
            assert all(map(torch.equal, plain, late))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (torch.optim.AdamW, {}, r"post_validate=True needs max_norm or skip_nonfinite=True"),
        (type("Mine", (torch.optim.SGD,), {}), {"max_norm": 1.0}, r"a step of Mine may change more than its state"),
        (
            torch.optim.SGD,
            {"max_norm": 1.0, "momentum": 0.9, "nesterov": True, "foreach": True},
            r"SGD with nesterov=True and foreach modifies the gradients; pass foreach=False",
        ),
    ],
)
def test_what_cannot_be_validated_afterwards(kind, options, message):
    def run(transport):
        with pipeline(layers(), transport) as pipe:
            ps.Optimizer(pipe, kind, lr=0.05, post_validate=True, **options)

    with pytest.raises(StageError, match=message):
        run_in_threads(run, 2)


def test_one_rank_has_nothing_to_wait_for():
    schedule = ps.build("GPipe", ranks=1, microbatches=2)
    with Pipeline({0: nn.Linear(WIDTH, WIDTH)}, schedule, loss_fn=MSE) as pipe:
        optimizer = ps.Optimizer(pipe, torch.optim.SGD, lr=0.1, max_norm=1e-3, post_validate=True)
        pipe.step(torch.ones(4, WIDTH), target=torch.zeros(4, WIDTH))
        optimizer.step()
        assert (optimizer.rollbacks, math.isfinite(optimizer.grad_norm)) == (0, True)
