import numpy as np

import penstock as ps
from penstock.graph.action_table import ActionTable
from penstock.graph.routes import CHAIN, Routes
from penstock.ir.dependencies import TRANSFERS
from penstock.ir.edges import Edge, chain


def test_nothing_is_looked_up_in_a_chain():
    routes = Routes.of(ps.build("1F1B", ranks=4, microbatches=2))
    assert routes is CHAIN
    assert routes.transfers == TRANSFERS
    assert [routes.receivers(transfer) for transfer in TRANSFERS] == [None, None]


def test_who_sends_and_who_receives_by_distance():
    schedule = ps.build("1F1B", ranks=4, microbatches=2).with_edges(
        [Edge(0, (1,)), Edge(0, (3,)), Edge(1, (2,), gradient=False), Edge(1, (3,), gradient=False)]
    )
    routes = Routes.of(schedule)
    assert routes.distances == (1, 2, 3)
    found = {
        (str(transfer.send), transfer.distance): (
            np.flatnonzero(routes.senders(transfer)).tolist(),
            np.flatnonzero(routes.receivers(transfer)).tolist(),
        )
        for transfer in routes.transfers
    }
    assert found == {
        ("SEND_F", 1): ([0, 1], [1, 2]),
        ("SEND_F", 2): ([1], [3]),
        ("SEND_F", 3): ([0], [3]),
        ("SEND_B", 1): ([1], [0]),
        ("SEND_B", 2): ([], []),
        ("SEND_B", 3): ([3], [0]),
    }
    assert routes.number_of(np.array([1, 2, 3, 4])).tolist() == [0, 1, 2, -1]


def test_transfers_over_different_distances_have_tables_of_their_own():
    schedule = ps.build("1F1B", ranks=3, microbatches=2).with_edges([*chain(3), Edge(0, (2,))])
    actions = ActionTable(ps.lower(schedule, unshard=False, reduce=False))
    for distance, text in ((1, "0SEND_F1"), (2, "0SEND_F1@2")):
        position = actions.find(ps.ComputationType.SEND_F, np.array(0), np.array(1), distance)
        assert str(actions.schedule.actions[0][int(position)]) == text
    assert len(actions.duplicates) == 0
