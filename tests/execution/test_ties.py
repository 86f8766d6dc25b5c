"""Ties as data: what is a tie, and which errors say what is wrong with one."""

import re

import pytest
import torch

import penstock as ps
from penstock.errors import SplitError
from penstock.execution.ties import Member, checked_ties, describe_mismatch


def test_members_are_sorted_and_single():
    tie = ps.Tie(((3, "head.weight"), (0, "embed.weight"), (3, "head.weight")))
    assert checked_ties([tie], 4) == (ps.Tie(((0, "embed.weight"), (3, "head.weight"))),)


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        ([ps.Tie(((0, "a"),))], "at least two members"),
        ([ps.Tie(((0, "a"), (4, "b")))], "refers to b of stage 4, but there are 4 stages"),
        ([ps.Tie(((0, "a"), (1, 7)))], "needs names of parameters, got 7"),
        ([ps.Tie((0, "a"))], "needs stages and names of parameters"),
        ([7], "needs stages and names of parameters"),
        ([ps.Tie(((0, "a"), (1, "b"))), ps.Tie(((1, "b"), (2, "c")))], "b of stage 1 is in 2 ties; make them one"),
    ],
)
def test_what_is_not_a_tie(ties, message):
    with pytest.raises(SplitError, match=message):
        checked_ties(ties, 4)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3, 2), None),
        (torch.zeros(2, 3), r"a of stage 0 is float32\[3, 2\], but b of stage 1 is float32\[2, 3\]"),
        (torch.zeros(3, 2, dtype=torch.float64), r"but b of stage 1 is float64\[3, 2\]"),
    ],
)
def test_tied_parameters_are_alike(other, message):
    found = describe_mismatch({Member(0, "a"): torch.zeros(3, 2), Member(1, "b"): other})
    assert (found is None) if message is None else re.search(message, found)
