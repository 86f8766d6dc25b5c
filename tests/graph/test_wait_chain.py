from penstock.graph.wait_chain import MAX_LINKS, WaitingRank, describe_wait_chain


def test_a_chain_that_ends():
    chain = [WaitingRank(2, "2RECV_F3"), WaitingRank(1, "1RECV_F3")]
    assert describe_wait_chain(chain, "rank 0, which has been in 0F1 for 31 s") == (
        "rank 2 waits in 2RECV_F3 for rank 1, which waits in 1RECV_F3 for rank 0, which has been in 0F1 for 31 s"
    )


def test_a_rank_that_is_held_up_by_another_action():
    chain = [WaitingRank(0, "0SEND_F1", is_lane_full=True), WaitingRank(1, "1SEND_B0", "1RECV_F0", True)]
    assert describe_wait_chain(chain, "rank 0") == (
        "rank 0 waits in 0SEND_F1 (its lane is full) for rank 1,"
        " which waits in 1SEND_B0, ahead of 1RECV_F0, (its lane is full) for rank 0"
    )


def test_a_long_chain_is_cut():
    chain = [WaitingRank(rank, f"{rank}F0") for rank in range(100)]
    text = describe_wait_chain(chain, "rank 100, which has not started a step")
    assert text.count("waits in") == MAX_LINKS
    assert text.endswith("11F0 for 88 more ranks, and finally for rank 100, which has not started a step")
