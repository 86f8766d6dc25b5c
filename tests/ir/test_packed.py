import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir import packed
from penstock.ir.actions import COMPUTE, FORWARD, PEER_SIDE, RECV_F, SEND_F
from strategies import actions

rows = st.lists(st.none() | actions(), max_size=12)


@given(rows)
def test_unpacking_gives_the_row_back(row):
    assert packed.unpack_cells(packed.pack_cells(row)) == tuple(row)


@given(rows)
def test_arrays_of_fields_are_those_of_the_parts(row):
    codes = packed.pack_cells(row)
    parts = [part for cell in row for part in ((None,) if cell is None else cell.parts)]
    numbers = packed.TYPE_NUMBER
    assert packed.types(codes).tolist() == [numbers[part.computation_type] if part else 0 for part in parts]
    assert packed.stages(codes).tolist() == [part.stage_index if part else 0 for part in parts]
    assert packed.microbatches(codes).tolist() == [
        -1 if part is None or part.microbatch_index is None else part.microbatch_index for part in parts
    ]
    assert packed.is_compute_or_idle(codes).tolist() == [
        part is None or part.computation_type in COMPUTE for part in parts
    ]
    assert len(packed.cell_starts(codes)) == len(row)


@given(rows, st.data())
def test_keeping_some_actions_keeps_overlaps_of_what_is_left(row, data):
    codes = packed.pack_cells(row)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(codes), max_size=len(codes))), bool)
    expected = []
    place = 0
    for cell in row:
        parts = (None,) if cell is None else cell.parts
        kept = [part for offset, part in enumerate(parts) if wanted[place + offset]]
        place += len(parts)
        if len(kept) > 1:
            expected.append(type(kept[0]).overlap(*kept))
        else:
            expected += kept
    assert packed.unpack_cells(packed.select(codes, wanted)) == tuple(expected)


@given(rows)
def test_transfers_know_the_stage_they_exchange_with(row):
    parts = [part for cell in row if cell for part in cell.parts]
    codes = packed.pack_cells(parts)
    assert packed.is_wellformed(codes, np.array([0, len(codes)]))
    assert packed.has_hops(codes) == any(part.peer_index is not None for part in parts)
    for part, stage, peer, hop in zip(
        parts, packed.stages(codes), packed.peers(codes), packed.hops(codes), strict=True
    ):
        side = PEER_SIDE.get(part.computation_type, 0)
        assert peer == (stage + side if part.peer_index is None else part.peer_index)
        assert abs(peer - stage) == (hop + 1 if side else 0)
    assert packed.largest(codes)[0] == max((part.stage_index for part in parts), default=-1)


def test_only_transfers_have_hops_and_only_to_stages_that_can_exist():
    forward, send, receive = (packed.pack(1, kind, 0).reshape(1) for kind in (FORWARD, SEND_F, RECV_F))
    ends = np.array([0, 1])
    assert packed.is_wellformed(packed.add_hops(send, 1), ends)
    assert not packed.is_wellformed(packed.add_hops(forward, 1), ends)
    assert not packed.is_wellformed(packed.add_hops(receive, 1), ends), "from stage -1"
