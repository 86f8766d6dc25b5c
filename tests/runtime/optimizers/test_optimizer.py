"""One optimizer over the stages of a rank trains as torch's optimizer trains the unsplit model."""

import math
import warnings

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import RunError, StageError, StepError
from penstock.runtime import Pipeline, run_in_threads
from runtime.optimizers.trained import MSE, WIDTH, batches, layers, pipeline

NO_DECAY = {"*.bias": {"weight_decay": 0.0}, "*norm*": {"weight_decay": 0.0, "lr": 0.02}}


def close(ours, theirs):
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "1F1B"])
def test_it_trains_as_the_unsplit_model(name):
    ranks = 2 if name == "ZBVZeroBubble" else 4
    whole, split = layers(), layers()
    named = dict(whole.named_parameters())
    norms = [p for n, p in named.items() if "norm" in n and "bias" not in n]
    biases = [p for n, p in named.items() if n.endswith("bias")]
    rest = [p for p in named.values() if not any(p is other for other in norms + biases)]
    theirs = torch.optim.AdamW(
        [{"params": rest}, {"params": biases, "weight_decay": 0.0}, {"params": norms, "weight_decay": 0.0, "lr": 0.02}],
        lr=0.05,
        weight_decay=0.3,
    )
    decay = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.7)
    expected = []
    for x, y in batches(5):
        MSE(whole(x), y).backward()
        expected.append(float(nn.utils.clip_grad_norm_(whole.parameters(), 0.3)))
        theirs.step()
        decay.step()
        theirs.zero_grad()

    def train(transport):
        with pipeline(split, transport, name) as pipe:
            optimizer = ps.Optimizer(pipe, torch.optim.AdamW, lr=0.05, weight_decay=0.3, groups=NO_DECAY, max_norm=0.3)
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            norms = []
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a scheduler warns if it steps before the optimizer
                for x, y in batches(5):
                    pipe.step(x, target=y)
                    optimizer.step()
                    norms.append(optimizer.grad_norm)
                    decay.step()
                    optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in pipe.parameters())
            return norms, [group["lr"] for group in optimizer.param_groups]

    for norms, rates in run_in_threads(train, ranks):
        assert norms == pytest.approx(expected, rel=1e-12)
        assert rates == [group["lr"] for group in theirs.param_groups]
    close(split, whole)


def trained(make, *, clips, scaled=False, steps=4):
    """Train with the optimizer that `make` makes; the second step of a scaled run overflows. Returns the parameters."""
    split = layers()

    def train(transport):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        with pipeline(split, transport, scaler=scaler) as pipe:
            optimizer = make(pipe)
            for step, (x, y) in enumerate(batches(steps)):
                split[2].spoils = scaled and step == 1
                transport.exchange(b"")
                pipe.step(x, target=y)
                if scaler is not None:
                    scaler.unscale_(optimizer)
                if clips:
                    pipe.clip_grad_norm_(0.3)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad(set_to_none=scaled)
            assert scaler is None or scaler.get_scale() == 512.0

    run_in_threads(train, 2)
    return list(split.parameters())


@pytest.mark.parametrize("max_norm", [0.3, None])
@pytest.mark.parametrize("scaled", [False, True])
def test_it_steps_as_clipping_and_a_plain_optimizer_do(max_norm, scaled):
    plain = trained(
        lambda pipe: torch.optim.AdamW(pipe.parameters(), lr=0.05), clips=max_norm is not None, scaled=scaled
    )
    ours = trained(
        lambda pipe: ps.Optimizer(pipe, torch.optim.AdamW, lr=0.05, max_norm=max_norm), clips=False, scaled=scaled
    )
    assert all(map(torch.equal, ours, plain))
    assert not any(map(torch.equal, ours, layers().parameters()))


def test_a_step_that_is_not_finite_is_skipped_on_all_ranks():
    split = layers()

    def train(transport):
        with pipeline(split, transport) as pipe:
            optimizer = ps.Optimizer(pipe, torch.optim.Adam, lr=0.05, skip_nonfinite=True)
            found = []
            for step, (x, y) in enumerate(batches(3)):
                split[2].spoils = step == 1  # spoils the first stages, on both ranks; not the last one
                transport.exchange(b"")
                pipe.step(x, target=y)
                optimizer.step()
                found.append((optimizer.skipped, math.isfinite(optimizer.grad_norm)))
                optimizer.zero_grad()
            return found, {int(state["step"]) for state in optimizer.state.values()}

    for found, steps in run_in_threads(train, 2):
        assert found == [(False, True), (True, False), (False, True)]
        assert steps == {2}


# Groups ---------------------------------------------------------------------------------------------------------------


def of_one_rank(options, *, kind=torch.optim.AdamW, stages=None):
    stages = stages or {0: layers(1)[0], 1: layers(1)[0]}
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=1, stages_per_rank=len(stages))
    pipe = Pipeline(stages, schedule, loss_fn=MSE)
    return pipe, ps.Optimizer(pipe, kind, **options)


def test_the_first_group_that_fits_counts():
    groups = [("linear.*", {"lr": 0.5}), (lambda _, parameter: parameter.ndim < 2, {"lr": 0.25}), ("*", {"lr": 0.125})]
    with pytest.warns(UserWarning, match=r"the group '\*' takes no parameter of any stage"):
        _, optimizer = of_one_rank({"lr": 1.0, "groups": groups})
    assert [(group["lr"], group["param_names"]) for group in optimizer.param_groups] == [
        (1.0, []),
        (0.5, ["linear.weight", "linear.bias"] * 2),
        (0.25, ["norm.weight", "norm.bias"] * 2),
        (0.125, []),
    ]


def test_names_are_those_without_wrappers():
    stage = nn.Sequential(torch.compile(layers(1)[0]))
    _, optimizer = of_one_rank({"groups": {"0.norm*": {}}}, stages={0: stage})
    assert optimizer.param_groups[1]["param_names"] == ["0.norm.weight", "0.norm.bias"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": {"*.bias": {"weight_decya": 0.0}}}, r"the group '\*.bias' has the option 'weight_decya', which"),
        ({"groups": ["*.bias"]}, "groups must be options by pattern"),
        ({"groups": {"*.bias": 0.0}}, "groups must be options by pattern"),
        ({"max_norm": 0.0}, "max_norm must be a positive number"),
        ({"max_norm": 1.0, "norm_type": -1.0}, "norm_type must be a positive number"),
        ({"kind": torch.optim.LBFGS}, "LBFGS needs inner products"),
        ({"kind": lambda *_, **__: None}, "expected an optimizer, or a class or function that makes one"),
    ],
)
def test_mistakes(options, message):
    kind = options.pop("kind", torch.optim.AdamW)
    with pytest.raises((StageError, TypeError), match=message):
        of_one_rank(options, kind=kind)


def test_an_optimizer_that_exists():
    stage = layers(1)[0]
    theirs = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    pipe, optimizer = of_one_rank({}, kind=theirs, stages={0: stage})
    pipe.step(torch.ones(2, WIDTH, dtype=torch.float64), target=torch.zeros(2, WIDTH, dtype=torch.float64))
    optimizer.step()
    assert optimizer.state is theirs.state
    assert len(theirs.state) == 4
    with pytest.raises(StageError, match="groups and options are for an optimizer that is made here"):
        ps.Optimizer(pipe, theirs, lr=0.2)
    stale = torch.optim.SGD(layers(1)[0].parameters(), lr=0.1)
    with pytest.raises(StageError, match=r"the optimizer has a parameter \(.*\) that is in no stage of rank 0"):
        ps.Optimizer(pipe, stale)


def test_a_group_that_is_added_later():
    pipe, optimizer = of_one_rank({"lr": 0.1}, stages={0: layers(1)[0]})
    with pytest.raises(StageError, match="is in no stage of rank 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    stage = pipe.stages[0].module
    stage.more = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": stage.more, "lr": 0.7})
    assert optimizer.param_groups[1]["param_names"] == ["more"]
    assert optimizer.param_groups[1]["lr"] == 0.7


# What torch's tools expect of an optimizer ----------------------------------------------------------------------------


SCHEDULERS = [
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step] * 3),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ConstantLR(optimizer)],
        milestones=[2],
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers_of_learning_rates(make):
    pipe, optimizer = of_one_rank({"lr": 1.0, "groups": NO_DECAY})
    plain = torch.optim.AdamW(
        [{"params": [nn.Parameter(torch.zeros(1))]} | options for options in ({}, {}, {"lr": 0.02})], lr=1.0
    )
    ours, theirs = make(optimizer), make(plain)
    for _ in range(4):
        optimizer.step()
        plain.step()
        ours.step()
        theirs.step()
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in plain.param_groups]
    assert pipe.rank == 0


def test_a_scheduler_that_reads_the_loss():
    _, optimizer = of_one_rank({"lr": 1.0})
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0):
        plateau.step(loss)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_state_is_saved_and_loaded():
    def trained(state):
        pipe, optimizer = of_one_rank({"lr": 0.1, "groups": NO_DECAY})
        (batch,) = batches(1)
        for _ in range(2):
            pipe.step(batch[0], target=batch[1])
            if state is not None:
                optimizer.load_state_dict(state)
            optimizer.step()
            optimizer.zero_grad()
            state = None
        return optimizer.state_dict(), [parameter.clone() for parameter in pipe.parameters()]

    saved, _ = trained(None)
    assert saved["param_groups"][2]["param_names"] == ["norm.weight"] * 2
    again, _ = trained(saved)
    assert {int(state["step"]) for state in again["state"].values()} == {4}


def test_hooks():
    _, optimizer = of_one_rank({"lr": 0.1, "max_norm": 1.0})
    called = []
    for event in ("step_pre", "step_post", "state_dict_pre", "load_state_dict_pre"):
        getattr(optimizer, f"register_{event}_hook")(lambda *_, event=event: called.append(event))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["step_pre", "step_post", "state_dict_pre", "load_state_dict_pre"]


def test_a_closure_is_refused():
    _, optimizer = of_one_rank({"lr": 0.1})
    with pytest.raises(RunError, match=r"call pipe.step\(\.\.\.\) first"):
        optimizer.step(lambda: 1.0)


# Ranks ----------------------------------------------------------------------------------------------------------------


def test_a_rank_without_stages():
    rows = [[f"{stage}{letter}0" for letter, order in (("F", (0, 1)), ("B", (1, 0))) for stage in order], []]
    schedule = ps.Schedule(rows, placement=ps.Placement((0, 0), 2))
    split = layers(2)

    def train(transport):
        stages = {0: split[0], 1: split[1]} if transport.rank == 0 else {}
        (batch,) = batches(1)
        with Pipeline(stages, schedule, loss_fn=MSE, transport=transport) as pipe:
            optimizer = ps.Optimizer(pipe, torch.optim.AdamW, lr=0.1, max_norm=1.0, groups=NO_DECAY)
            decay = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step] * 3)
            pipe.step(batch[0], target=batch[1])
            optimizer.step()
            decay.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            return optimizer.grad_norm, [group["lr"] for group in optimizer.param_groups]

    (norm, rates), (none, same) = run_in_threads(train, 2)
    assert norm > 0
    assert none is None
    assert rates == same


KINDS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind.__name__ not in ("Optimizer", "LBFGS")
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_without_parameters(kind):
    schedule = ps.Schedule([["0F0", "0B0"], []], placement=ps.Placement((0,), 2))
    stage = nn.Linear(2, 2, bias=False)

    def train(transport):
        with Pipeline({0: stage} if transport.rank == 0 else {}, schedule, loss_fn=MSE, transport=transport) as pipe:
            optimizer = ps.Optimizer(pipe, kind, lr=0.1)
            if transport.rank == 1:
                optimizer.step()
            return len(optimizer.param_groups[0]["params"])

    assert run_in_threads(train, 2) == [1, 0]


def both_ranks(options_of, split=None, **settings):
    split = split or layers()

    def make(transport):
        with pipeline(split, transport, **settings) as pipe:
            ps.Optimizer(pipe, torch.optim.AdamW, **options_of(transport.rank))

    return run_in_threads(make, 2, timeout=30)


@pytest.mark.parametrize(
    ("options_of", "message"),
    [
        (lambda rank: {"max_norm": 1.0 + rank}, r"the optimizer of rank (1 has max_norm=2.0|0 has max_norm=1.0)"),
        (lambda rank: {"skip_nonfinite": bool(rank)}, r"has skip_nonfinite=(True|False), that of rank"),
        (lambda rank: {"groups": {"*.bias": {}} if rank else None}, r"has the groups ('\*.bias'|none), rank"),
        (lambda rank: {"max_norm": -1.0 if rank else 1.0}, r"max_norm must be a positive number"),
    ],
)
def test_ranks_that_differ(options_of, message):
    with pytest.raises(StageError, match=message):
        both_ranks(options_of)


def test_a_pipeline_outlives_an_optimizer_that_one_rank_cannot_make():
    split = layers()

    def make(transport):
        with pipeline(split, transport) as pipe:
            with pytest.raises((StageError, TypeError), match="nonsense"):
                ps.Optimizer(pipe, torch.optim.AdamW, **({"nonsense": 1} if transport.rank else {}))
            (batch,) = batches(1)
            optimizer = ps.Optimizer(pipe, torch.optim.AdamW, max_norm=1.0)
            pipe.step(batch[0], target=batch[1])
            optimizer.step()
            return optimizer.grad_norm

    first, second = run_in_threads(make, 2)
    assert first == second


class Start(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.wte(x)


class End(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.head(x)


def tied(transport, **options):
    start, end = Start(), End()
    nn.init.ones_(start.wte.weight)  # ranks are threads, which share the random numbers
    nn.init.ones_(end.head.weight)
    schedule = ps.build("1F1B", ranks=2, microbatches=2)
    ties = [("wte.weight", "head.weight")]
    stages = {transport.rank: (start, end)[transport.rank]}
    with Pipeline(stages, schedule, loss_fn=MSE, transport=transport, ties=ties) as pipe:
        optimizer = ps.Optimizer(pipe, torch.optim.AdamW, **options)
        return [(group["lr"], group["param_names"]) for group in optimizer.param_groups]


def test_tied_parameters_are_in_the_group_of_the_first():
    with pytest.warns(UserWarning, match="'head.weight' takes no parameter"):
        found = run_in_threads(lambda transport: tied(transport, lr=0.5, groups={"head.weight": {"lr": 0.1}}), 2)
    assert found == [[(0.5, ["wte.weight"]), (0.1, [])]] * 2


def test_tied_parameters_that_would_be_trained_differently():
    with pytest.raises(StageError, match=r"the tied parameters wte.weight of stage 0 = head.weight of stage 1 would"):
        run_in_threads(lambda transport: tied(transport, lr=0.5 / (1 + transport.rank)), 2)


def test_an_error_of_one_rank_is_one_of_all():
    split = layers()

    def train(transport):
        with pipeline(split, transport) as pipe:
            optimizer = ps.Optimizer(pipe, torch.optim.AdamW, max_norm=1.0)
            if transport.rank == 1:
                optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            (batch,) = batches(1)
            for _ in range(2):
                pipe.step(batch[0], target=batch[1])
                optimizer.step()

    with pytest.raises(StepError, match="rank 1 failed: ZeroDivisionError"):
        run_in_threads(train, 2)


# Accumulation ---------------------------------------------------------------------------------------------------------


def test_steps_that_make_one_batch():
    whole, split = layers(), layers()
    x, y = (torch.cat(parts) for parts in zip(*batches(3), strict=True))
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1)
    MSE(whole(x), y).backward()
    nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    theirs.step()

    def train(transport):
        with pipeline(split, transport, share_losses=True) as pipe:
            optimizer = ps.Optimizer(pipe, torch.optim.SGD, lr=0.1, max_norm=0.1)
            losses = []
            for part in batches(3):
                pipe.step(part[0], target=part[1], share=1 / 3)
                losses.append(pipe.loss)
            optimizer.step()
            return torch.stack(losses).mean()

    for loss in run_in_threads(train, 2):
        torch.testing.assert_close(loss, MSE(layers()(x), y).detach())
    close(split, whole)


def test_a_share_must_be_a_number():
    pipe, _ = of_one_rank({})
    (batch,) = batches(1)
    with pytest.raises(StageError, match="share must be a finite number"):
        pipe.step(batch[0], target=batch[1], share=math.nan)
