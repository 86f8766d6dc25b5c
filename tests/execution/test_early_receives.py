"""When receives are posted: laws that hold for any row of operations."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.execution.early_receives import AHEAD, LEEWAY, Place, by_posting

KINDS = st.sampled_from(["compute", "send", "receive"])


@st.composite
def rows(draw):
    """Places as they stand in a row."""
    computed, places = 0, []
    for kind, peer in draw(st.lists(st.tuples(KINDS, st.integers(0, 2)), max_size=60)):
        if kind == "compute":
            places.append(Place(computed))
            computed += 1
        elif kind == "send":
            places.append(Place(computed, sends_to=peer))
        else:
            places.append(Place(computed, receives_from=peer))
    return places


def early_until(places, order):
    """How many compute actions run before each operation now."""
    computed, found = 0, {}
    for number in order:
        found[number] = computed
        computed += places[number].sends_to is None and places[number].receives_from is None
    return found


@given(rows())
def test_only_receives_move(places):
    order = by_posting(places)
    assert sorted(order) == list(range(len(places)))
    rest = [number for number in order if places[number].receives_from is None]
    assert rest == sorted(rest)


@given(rows())
def test_receives_from_one_rank_stay_in_order(places):
    order = by_posting(places)
    for peer in range(3):
        mine = [number for number in order if places[number].receives_from == peer]
        assert mine == sorted(mine)


@given(rows())
def test_receives_are_posted_early_and_not_too_early(places):
    now = early_until(places, by_posting(places))
    for number, place in enumerate(places):
        if place.receives_from is not None:
            assert max(0, place.computed - AHEAD - LEEWAY) <= now[number] <= place.computed


@given(rows())
def test_receives_stand_behind_a_send_to_the_same_rank_if_there_is_one_in_reach(places):
    order = by_posting(places)
    now = early_until(places, order)
    for number, place in enumerate(places):
        if place.receives_from is None:
            continue
        moment = place.computed - AHEAD
        reach = range(moment - LEEWAY, moment + LEEWAY + 1)
        sends = [
            other for other, one in enumerate(places) if one.sends_to == place.receives_from and one.computed in reach
        ]
        if sends:
            beside = [other for other in sends if places[other].computed == now[number]]
            assert beside
            assert order.index(number) > max(map(order.index, beside))


def test_a_receive_without_a_send_is_posted_ahead_all_the_same():
    row = [*map(Place, range(9)), Place(9, receives_from=1), Place(9)]
    assert by_posting(row) == [0, 1, 2, 3, 4, 9, 5, 6, 7, 8, 10]
