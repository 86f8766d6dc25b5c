from collections import Counter

import pytest

import penstock as ps
from penstock.graph.comm_model import MODELS
from penstock.schedules.registry import RECIPES

PAIR = ps.CommModel("rendezvous", "pair")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_deferred_receives_are_repaired_under_every_model(recipe):
    deferred = ps.lower(ps.build(recipe.name, ranks=4, microbatches=8), defer_receives=True)
    for model in MODELS:
        repaired = ps.repair(deferred, model)
        assert ps.check(repaired, model=model) == []
        assert [Counter(row) for row in repaired.actions] == [Counter(row) for row in deferred.actions]
        for new, old in zip(repaired.actions, deferred.actions, strict=True):
            assert [a for a in new if "SEND" not in str(a) and "RECV" not in str(a)] == [
                a for a in old if "SEND" not in str(a) and "RECV" not in str(a)
            ]


def test_a_safe_one_stays_as_it_is():
    lowered = ps.lower(ps.build("1F1B", ranks=3, microbatches=4))
    assert ps.repair(lowered, PAIR) is lowered


def test_swapped_receives():
    swapped = ps.Schedule([["0F0", "0F1", "0SEND_F0", "0SEND_F1"], ["1RECV_F1", "1RECV_F0", "1F0", "1F1"]])
    assert [finding.kind for finding in ps.check(swapped, model=PAIR)] == ["deadlock"]
    assert ps.check(swapped, model=ps.CommModel("rendezvous", "message")) == []
    assert ps.repair(swapped, PAIR) == ps.Schedule(
        [["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1F0", "1RECV_F1", "1F1"]]
    )


def test_a_cycle_of_compute_alone_cannot_be_repaired():
    hopeless = ps.Schedule(
        [
            ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0F1", "0SEND_F1", "0RECV_B1", "0B1"],
            ["1RECV_F0", "1RECV_F1", "1F0", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"],
        ]
    )
    with pytest.raises(ps.VerificationError) as caught:
        ps.repair(hopeless, PAIR)
    (finding,) = caught.value.findings
    assert finding.kind == "deadlock"
    assert "RECV" not in finding.message
    assert "rank 0 waits in 0B0" in finding.message
    assert "rank 1" in finding.message


def test_what_else_is_wrong_comes_first():
    broken = ps.Schedule([["0F0", "0SEND_F0"], ["1F0"]])
    with pytest.raises(ps.VerificationError, match="0SEND_F0 has no 1RECV_F0 on rank 1"):
        ps.repair(broken, PAIR)
