"""What is refused as a tie, and what is noticed while tied parameters train: drift, and a rank that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import SplitError, StageError, StepError
from penstock.runtime import Pipeline, run_in_threads
from runtime.tied_models import TIE, apart, build, loss_fn, model, parameters, run, stages_of, step


def nothing(pipe: Pipeline, _mine: dict[int, nn.Module]) -> tuple[ps.Tie, ...]:
    return pipe.ties


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        ([("wte.wieght", "head.weight")], r"'wte.wieght', but no stage has such a parameter; did you mean wte.weight"),
        (["wte.weight"], r"needs at least two holders, but of wte.weight there is only wte.weight of stage 0"),
        (
            [ps.Tie(((0, "wte.weight"), (1, "hed.weight")))],
            r"hed.weight of stage 1, but that stage has no such .*mean head.weight",
        ),
        ([("wte.weight", "norm.weight")], r"wte.weight of stage 0 is float64\[11, 6\], but norm.weight of stage 1 is"),
        ([ps.Tie(((0, "wte.weight"), (5, "head.weight")))], r"head.weight of stage 5, but there are 2 stages"),
        ([3], r"a tie must be a Tie, a name or names of parameters"),
    ],
)
def test_what_is_not_a_tie_is_refused(ties: Any, message: str) -> None:
    with pytest.raises((SplitError, StageError), match=message):
        run(build("1F1B", 2), nothing, ties=ties)


def test_a_name_that_several_stages_have_is_a_tie_by_itself() -> None:
    modules = apart(model(3, readers=1))
    expected = (ps.Tie(((1, "head.weight"), (2, "head.weight"))),)
    assert run(build("1F1B", 3), nothing, modules=modules, ties=["head.weight"]) == [expected] * 3
    assert run(build("1F1B", 3), nothing, modules=modules, ties=[("head.weight",)]) == [expected] * 3


def test_ties_with_a_common_member_are_one() -> None:
    modules = apart(model(3, readers=1))
    ties = [ps.Tie(((0, "wte.weight"), (1, "head.weight"))), ps.Tie(((1, "head.weight"), (2, "head.weight")))]
    (tie,) = run(build("1F1B", 3), nothing, modules=modules, ties=ties)[2]
    assert tie == ps.Tie(((0, "wte.weight"), (1, "head.weight"), (2, "head.weight")))


def test_holders_must_begin_equal() -> None:
    modules = apart(model(2))
    with torch.no_grad():
        modules[1].head.weight[3, 2] += 1e-9
    with pytest.raises(StageError, match=r"wte.weight of stage 0 and head.weight of stage 1 are tied, but begin with"):
        run(build("1F1B", 2), nothing, modules=modules)


def test_holders_are_trained_or_frozen_together() -> None:
    modules = apart(model(2))
    modules[1].head.weight.requires_grad_(False)
    with pytest.raises(StageError, match=r"wte.weight of stage 0 is trained, but head.weight of stage 1 is frozen"):
        run(build("1F1B", 2), nothing, modules=modules)


def test_ranks_must_declare_the_same_ties() -> None:
    schedule, modules = build("1F1B", 2), apart(model(2))

    def worker(transport: Any) -> None:
        ties = [TIE] if transport.rank == 0 else []
        mine = stages_of(modules, schedule, transport.rank)
        Pipeline(mine, schedule, loss_fn=loss_fn, transport=transport, ties=ties)

    with pytest.raises(StageError, match="was given a different list of ties"):
        run_in_threads(worker, 2, timeout=60)


def drift(pipe: Pipeline, mine: dict[int, nn.Module], size: float, steps: int) -> list[str]:
    """Change one holder after each step, and return the errors of each step."""
    found = []
    for number in range(steps):
        try:
            step(pipe, number)
        except (StageError, StepError) as error:
            found.append(f"{number}: {error}")
            break
        if pipe.has_last:
            with torch.no_grad():
                mine[1].head.weight[5] += size
    return found


def test_drift_is_noticed_after_the_first_step() -> None:
    for found in run(build("1F1B", 2), lambda pipe, mine: drift(pipe, mine, 1e-3, 4)):
        (error,) = found
        assert error.startswith("1: ")
        assert "tied parameters have drifted apart: wte.weight of stage 0 = head.weight of stage 1" in error
        assert "differ by 0.001 after 1 step;" in error


def test_rounding_is_no_drift() -> None:
    assert run(build("1F1B", 2), lambda pipe, mine: drift(pipe, mine, 1e-13, 4)) == [[], []]


def test_drift_is_noticed_at_the_given_interval_or_not_at_all() -> None:
    def late(pipe: Pipeline, mine: dict[int, nn.Module]) -> list[str]:
        for number in range(4):  # checked in steps 1, 2 and 4, then in 5
            step(pipe, number)
        return drift(pipe, mine, 1e-3, 8)

    for (error,) in run(build("1F1B", 2), late, check_ties_every=5):
        assert error.startswith("5: ")
        assert "after 9 steps" in error
    assert run(build("1F1B", 2), late, check_ties_every=0) == [[], []]


def test_the_interval_is_a_number() -> None:
    with pytest.raises(ps.SizeError, match="check_ties_every must be at least 0, got -1"):
        run(build("1F1B", 2), nothing, check_ties_every=-1)


def two_steps(pipe: Pipeline) -> None:
    """A rank without a member of the tie learns of a failure in the second one."""
    step(pipe, 1)
    step(pipe, 2)


def test_a_rank_that_fails_in_the_exchange_ends_the_step_of_all() -> None:
    """Rank 3 fails where it would send its gradient: no holder waits, and gradients are dropped everywhere."""
    schedule = build("1F1B", 4)

    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> str:
        step(pipe, 0)
        if pipe.rank == 3:

            def fail(*_: object) -> None:
                raise RuntimeError("no gradients today")

            pipe.transport.send_bytes = fail  # type: ignore[method-assign]
        with pytest.raises(StepError) as caught:
            two_steps(pipe)
        if pipe.rank in (0, 3):
            assert all(one.grad is None for one in parameters(mine))
        return str(caught.value)

    for said in run(schedule, work):
        assert "rank 3 failed" in said
        assert "no gradients today" in said


def test_a_united_tensor_that_is_replaced_in_one_place_is_refused() -> None:
    def work(pipe: Pipeline, mine: dict[int, nn.Module]) -> str:
        step(pipe, 0)
        if pipe.has_first:
            mine[3].head.weight = nn.Parameter(mine[3].head.weight.detach().clone())
        with pytest.raises((StageError, StepError)) as caught:
            two_steps(pipe)
        return str(caught.value)

    for said in run(build("ZBVZeroBubble", 2), work):
        assert "head.weight of stage 3 and wte.weight of stage 0 were made one tensor" in said
