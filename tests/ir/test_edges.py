import pytest

from penstock.errors import EdgeError
from penstock.ir.edges import Edge, chain, checked_edges, is_chain, links


def test_edges_are_sorted_by_source_and_keep_their_order():
    edges = [Edge(1, (2,)), Edge(0, (3,), "skip"), Edge(0, (1,), "x")]
    assert checked_edges(edges, 4) == (edges[1], edges[2], edges[0])


def test_the_names_of_values_do_not_matter_to_a_chain():
    assert is_chain([Edge(0, (1,), "x"), Edge(1, (2,))], 3)
    assert not is_chain([Edge(0, (1,)), Edge(1, (2,), gradient=False)], 3)
    assert not is_chain([*chain(3), Edge(0, (2,))], 3)
    assert is_chain((), 1)


def test_a_link_has_a_gradient_if_one_of_its_edges_has():
    found = links([Edge(0, (1, 2), "x"), Edge(0, (2,), "mask", gradient=False), Edge(1, (2,), gradient=False)])
    assert [(link.source, link.target, link.edges, link.gradient) for link in found] == [
        (0, 1, (0,), True),
        (0, 2, (0, 1), True),
        (1, 2, (2,), False),
    ]
    assert [link.is_chain for link in found] == [True, False, True]


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        (Edge(2, (1,)), "an edge from stage 2 to stage 1 goes backwards"),
        (Edge(1, (1,)), "an edge from stage 1 to stage 1 goes backwards"),
        (Edge(0, (4,)), r"edge 0>4 does not fit stages 0 to 3"),
        (Edge(-1, (2,)), r"edge -1>2 does not fit stages 0 to 3"),
        (Edge(0, ()), "the edge from stage 0 has no target"),
        (Edge(0, 1), r"needs a source stage and its target stages, got Edge"),
        (7, "needs a source stage and its target stages, got 7"),
        (Edge("0", (1,)), "needs a source stage"),
    ],
)
def test_a_bad_edge_is_refused(edge, message):
    with pytest.raises(EdgeError, match=message):
        checked_edges([edge], 4)


def test_edges_that_are_no_list_are_refused():
    with pytest.raises(EdgeError, match="edges must be a list of Edge, got 3"):
        checked_edges(3, 4)


def test_an_edge_as_text():
    assert str(Edge(0, (2, 5), "encoder", gradient=False)) == "0>2,5/F (encoder)"
