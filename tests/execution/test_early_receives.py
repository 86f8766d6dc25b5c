"""When receives are posted: laws that hold for any row of operations."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.execution.early_receives import LEAD, LEEWAY, Slot, order_with_early_receives

KINDS = st.sampled_from(["compute", "send", "receive"])


@st.composite
def rows(draw):
    """Slots as they stand in a row."""
    computed, slots = 0, []
    for kind, peer in draw(st.lists(st.tuples(KINDS, st.integers(0, 2)), max_size=60)):
        if kind == "compute":
            slots.append(Slot(computed))
            computed += 1
        elif kind == "send":
            slots.append(Slot(computed, sends_to=peer))
        else:
            slots.append(Slot(computed, receives_from=peer))
    return slots


def early_until(slots, order):
    """How many compute actions run before each operation now."""
    computed, found = 0, {}
    for number in order:
        found[number] = computed
        computed += slots[number].sends_to is None and slots[number].receives_from is None
    return found


@given(rows())
def test_only_receives_move(slots):
    order = order_with_early_receives(slots)
    assert sorted(order) == list(range(len(slots)))
    rest = [number for number in order if slots[number].receives_from is None]
    assert rest == sorted(rest)


@given(rows())
def test_receives_from_one_rank_stay_in_order(slots):
    order = order_with_early_receives(slots)
    for peer in range(3):
        mine = [number for number in order if slots[number].receives_from == peer]
        assert mine == sorted(mine)


@given(rows())
def test_receives_are_posted_early_and_not_too_early(slots):
    now = early_until(slots, order_with_early_receives(slots))
    for number, slot in enumerate(slots):
        if slot.receives_from is not None:
            assert max(0, slot.computed - LEAD - LEEWAY) <= now[number] <= slot.computed


@given(rows())
def test_receives_stand_behind_a_send_to_the_same_rank_if_there_is_one_in_reach(slots):
    order = order_with_early_receives(slots)
    now = early_until(slots, order)
    for number, slot in enumerate(slots):
        if slot.receives_from is None:
            continue
        moment = slot.computed - LEAD
        reach = range(moment - LEEWAY, moment + LEEWAY + 1)
        sends = [
            other for other, one in enumerate(slots) if one.sends_to == slot.receives_from and one.computed in reach
        ]
        if sends:
            beside = [other for other in sends if slots[other].computed == now[number]]
            assert beside
            assert order.index(number) > max(map(order.index, beside))


def test_a_receive_without_a_send_is_posted_ahead_all_the_same():
    row = [*map(Slot, range(9)), Slot(9, receives_from=1), Slot(9)]
    assert order_with_early_receives(row) == [0, 1, 2, 3, 4, 9, 5, 6, 7, 8, 10]
