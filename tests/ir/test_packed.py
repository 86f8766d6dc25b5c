import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir import packed
from penstock.ir.actions import COMPUTE
from strategies import actions

rows = st.lists(st.none() | actions(), max_size=12)


@given(rows)
def test_unpacking_gives_the_row_back(row):
    assert packed.unpack_cells(packed.pack_cells(row)) == tuple(row)


@given(rows)
def test_arrays_of_fields_are_those_of_the_leaves(row):
    codes = packed.pack_cells(row)
    leaves = [leaf for cell in row for leaf in ((None,) if cell is None else cell.leaves)]
    numbers = packed.TYPE_NUMBER
    assert packed.types(codes).tolist() == [numbers[leaf.computation_type] if leaf else 0 for leaf in leaves]
    assert packed.stages(codes).tolist() == [leaf.stage_index if leaf else 0 for leaf in leaves]
    assert packed.microbatches(codes).tolist() == [
        -1 if leaf is None or leaf.microbatch_index is None else leaf.microbatch_index for leaf in leaves
    ]
    assert packed.is_compute_or_idle(codes).tolist() == [
        leaf is None or leaf.computation_type in COMPUTE for leaf in leaves
    ]
    assert len(packed.cell_starts(codes)) == len(row)


@given(rows, st.data())
def test_keeping_some_actions_keeps_overlaps_of_what_is_left(row, data):
    codes = packed.pack_cells(row)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(codes), max_size=len(codes))), bool)
    expected = []
    place = 0
    for cell in row:
        leaves = (None,) if cell is None else cell.leaves
        kept = [leaf for offset, leaf in enumerate(leaves) if wanted[place + offset]]
        place += len(leaves)
        if len(kept) > 1:
            expected.append(type(kept[0]).overlap(*kept))
        else:
            expected += kept
    assert packed.unpack_cells(packed.keep(codes, wanted)) == tuple(expected)
