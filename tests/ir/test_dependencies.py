"""The one rule against the rule in words, written out for a small pipeline."""

import pytest

import interpreter
from penstock import Action
from penstock.ir.dependencies import NEEDS, TRANSFER_TYPES, TRANSFERS, needs


@pytest.mark.parametrize(
    ("action", "waits_for"),
    [
        ("0F1", []),
        ("1F1", [{"0F1"}]),
        ("2F1", [{"1F1"}]),
        ("0B1", [{"0F1"}, {"1B1", "1I1"}]),
        ("2B1", [{"2F1"}]),
        ("1I1", [{"1F1"}, {"2B1", "2I1"}]),
        ("2I1", [{"2F1"}]),
        ("0W1", [{"0I1"}]),
        ("2W1", [{"2I1"}]),
        ("(1F3;2B1)OVERLAP_F_B", [{"0F3"}, {"2F1"}]),
        ("(2F1;2B1)OVERLAP_F_B", [{"1F1"}, {"2F1"}]),
        ("1SEND_F0", []),
        ("1UNSHARD", []),
    ],
)
def test_in_a_pipeline_of_three_stages(action, waits_for):
    found = needs(Action.from_str(action), stages=3)
    assert [{str(one) for one in providers} for providers in found] == waits_for


def test_it_is_the_rule_of_the_independent_interpreter():
    kinds = {"F": {"F"}, "G": {"B", "I"}, "W": {"W"}}
    for stages in (1, 2, 4):
        for stage in range(stages):
            for kind in "FBIW":
                expected = [
                    {f"{where}{letter}0" for letter in kinds[event]}
                    for event, where, _ in interpreter._waits_for(stage, kind, 0, stages)
                ]
                if kind == "W":  # the interpreter takes any backward; a W is the rest of an I
                    expected = [{f"{stage}I0"}]
                found = needs(Action(stage, kind, 0), stages)
                assert [{str(one) for one in providers} for providers in found] == expected


def test_transfers_carry_what_is_needed_from_a_neighbour():
    from_neighbours = {(kind, need) for kind, wants in NEEDS.items() for need in wants if need.stage_offset}
    for transfer in TRANSFERS:
        for kind in transfer.needed_by:
            (need,) = [need for needing, need in from_neighbours if needing is kind]
            assert need.stage_offset == -transfer.stage_offset
            assert need.any_of == transfer.made_by
    assert len(TRANSFER_TYPES) == 4
