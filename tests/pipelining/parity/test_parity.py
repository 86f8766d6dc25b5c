"""Every scenario once with the installed torch.distributed.pipelining and once with ours.

What torch's package answers to most of them is kept in a file, and `make test-full` compares that with the package.
Both must return the same: outputs, losses, gradients, types of errors. And each must agree with the unsplit model,
except where ``DIFFERENCES`` says why torch's does not; there, ours is compared with the unsplit model alone.

With PENSTOCK_PARITY=torch.distributed.pipelining, torch's package stands on both sides: a check of the suite itself.
"""

import os

import pytest

from pipelining.parity.cases import CASES, MORE, RECORDED
from pipelining.parity.comparison import Raised, differences
from pipelining.parity.differences import SAID_BETTER, difference
from pipelining.parity.recorded import recorded
from pipelining.parity.setting import FORWARD_ONLY, IN_A_V, MULTI, OURS, SINGLE, THEIRS, run

MINE = os.environ.get("PENSTOCK_PARITY", OURS)
LIMIT = 30.0


def check(workers, case, theirs):
    """Run it with ours and compare with torch's answers, or with the unsplit model alone where there are none."""
    ours = workers.run(run, case, OURS if theirs is None else MINE, ranks=case.ranks, limit=LIMIT)
    wrong = [f"rank {rank}: {problem}" for rank, (_, problems) in enumerate(ours) for problem in problems]
    if theirs is None:
        theirs = [None if isinstance(found, Raised) else found for found, _ in ours]
    for rank, (expected, (found, _)) in enumerate(zip(theirs, ours, strict=True)):
        wrong += [f"rank {rank}: {each}" for each in differences(_comparable(expected), _comparable(found))]
    assert not wrong, "\n".join(wrong)


def answers_of_torch(workers, case):
    """What torch's package returns on each rank, which must be what the unsplit model gives."""
    theirs = workers.run(run, case, THEIRS, ranks=case.ranks, limit=LIMIT)
    wrong = [f"rank {rank} of torch's: {problem}" for rank, (_, problems) in enumerate(theirs) for problem in problems]
    assert not wrong, "\n".join(wrong)
    return [found for found, _ in theirs]


def _comparable(result):
    """Without the errors that are better than torch's; those must still be errors."""
    if not isinstance(result, dict) or not SAID_BETTER.keys() & result.keys():
        return result
    return {name: isinstance(value, Raised) if name in SAID_BETTER else value for name, value in result.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(workers, case):
    if MINE == THEIRS and difference(case) is not None:
        pytest.skip("torch's is known to be wrong")
    check(workers, case, recorded().answer(case) if difference(case) is None else None)


@pytest.mark.full
@pytest.mark.parametrize("case", RECORDED, ids=str)
def test_torch_answers_as_recorded(workers, case):
    pairs = enumerate(zip(recorded().answer(case), answers_of_torch(workers, case), strict=True))
    wrong = [f"rank {rank}: {each}" for rank, (kept, found) in pairs for each in differences(kept, found)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_parity_on_other_ranks(workers, case):
    if MINE == THEIRS and difference(case) is not None:
        pytest.skip("torch's is known to be wrong")
    check(workers, case, answers_of_torch(workers, case) if difference(case) is None else None)


def test_every_schedule_is_there():
    """In each of the lists that issue a promise."""
    assert {case.schedule for case in CASES} == {*SINGLE, *MULTI, FORWARD_ONLY}
    assert set(IN_A_V) <= set(MULTI)
    assert {case.ranks for case in CASES} == {1, 2, 4}
