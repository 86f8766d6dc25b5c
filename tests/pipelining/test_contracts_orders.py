"""Orders and the passes over them, as programs call them: pictures of what comes out, and what is refused."""

import pytest

from pipelining.contracts import OURS, UPSTREAM, Package, text

LOOP = [0, 1, 0, 1]
V = [0, 1, 1, 0]
SIZES = [  # stages on a rank, microbatches, ranks
    (1, 2, 2), (1, 4, 2), (1, 5, 4), (2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 10, 4), (2, 16, 8), (3, 2, 2),
    (3, 12, 4), (4, 6, 3), (4, 10, 5), (4, 16, 4), (2, 3, 4), (2, 15, 4), (1, 1, 1), (2, 4, 1),
]  # fmt: skip
MULTI = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def stand_in(package, ranks, stages, rank=0):
    """A stage that only counts, made without the constructor of the base class."""

    class Counting(package.stage._PipelineStageBase):
        def __init__(self):
            self.submod = None
            self.num_stages = stages
            self.group_size = ranks
            self.group_rank = rank
            self.group = None

        def _prepare_forward_infra(self, *args, **kwargs):
            pass

        def _prepare_backward_infra(self, *args, **kwargs):
            pass

        def _create_grad_recv_info(self, *args, **kwargs):
            return None

    return Counting()


def made(package, name, stages_per_rank, microbatches, ranks, **options):
    stages = [stand_in(package, ranks, ranks * stages_per_rank) for _ in range(stages_per_rank)]
    kind = package.schedule_class(name)
    single = issubclass(kind, package.schedules.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, microbatches, **options)


# Passes ---------------------------------------------------------------------------------------------------------------


SENDS = [
    # Two ranks, one stage each: receives are posted as early as the sends allow.
    (
        [0, 1],
        ["0F0 0F1 . 0B0 . 0B1", ". 1F0 1B0 1F1 1B1 ."],
        ["0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"],
        11,
    ),
    # A V of four stages: stages 1 and 2 are neighbours on rank 1, and nothing is sent between them.
    (
        V,
        [
            "0F0 0F1 . 3F0 3B0 3F1 3B1 0B0 3W0 0B1 3W1 0W0 0W1",
            ". 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 2W0 2W1 1W0 1W1",
        ],
        [
            "0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1"
            " 0RECV_B0 0B0 3W0 0RECV_B1 0B1 3W1 0W0 0W1",
            "1RECV_F0 1RECV_F1 1F0 2F0 2SEND_F0 1F1 2RECV_B0 2F1 2SEND_F1 2B0 2RECV_B1 1B0 1SEND_B0"
            " 2B1 1B1 1SEND_B1 2W0 2W1 1W0 1W1",
        ],
        24,
    ),
]


@pytest.mark.parametrize(("ranks", "compute", "lowered", "steps"), SENDS)
def test_sends_and_receives(package, s, ranks, compute, lowered, steps):
    found = s._add_send_recv(package.rows(*compute), stage_to_rank=lambda stage: ranks[stage], num_stages=len(ranks))
    assert [text(found[rank]) for rank in found] == lowered
    simulated = s._simulate_comms_compute(found, stage_to_rank=lambda stage: ranks[stage], num_stages=len(ranks))
    assert max(map(len, simulated.values())) == steps
    assert [text([a for a in simulated[rank] if a is not None]) for rank in simulated] == lowered


DEFERRED = [
    # On the higher rank each receive waits for its consumer; the lower rank's are there already.
    ([0, 1], SENDS[0][2], [SENDS[0][2][0], "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"]),
    # The lower rank posts a receive before it sends to the same peer; I takes the received gradient, W takes none.
    (
        [0, 1],
        ["0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0I0 0W0 0RECV_B1 0I1 0W1",
         "1RECV_F0 1RECV_F1 1F0 1I0 1SEND_B0 1W0 1F1 1I1 1SEND_B1 1W1"],
        ["0F0 0RECV_B0 0SEND_F0 0F1 0SEND_F1 0I0 0W0 0RECV_B1 0I1 0W1",
         "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1"],
    ),
    # Both receives of a pair stand before the pair.
    (
        V,
        ["0F0 0SEND_F0", "1RECV_F0 1RECV_F1 2RECV_B0 1F0 2F0 2SEND_F0 (1F1;2B0)OVERLAP_F_B 2W0 1B0 1SEND_B0"],
        ["0F0 0SEND_F0", "1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 2RECV_B0 (1F1;2B0)OVERLAP_F_B 2W0 1B0 1SEND_B0"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "given", "expected"), DEFERRED)
def test_deferred_receives(package, s, ranks, given, expected):
    found = s._defer_recv_ops(package.rows(*given), lambda stage: ranks[stage])
    assert [text(found[rank]) for rank in found] == expected


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        ("0F0 0F1 . 0B0 0B1", "0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD"),
        ("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", "0UNSHARD 1UNSHARD 0F0 0F1 1F0 1F1 1B0 1B1 1RESHARD 0B0 0B1 0RESHARD"),
    ],
)
def test_unshards_and_reshards(package, s, compute, expected):
    assert text(s._add_unshard_reshard(package.actions(compute))) == expected


def test_one_active_stage_reshards_between_stages(package, s):
    found = s._add_unshard_reshard(package.actions("0F0 1F0 1B0 0B0"), 1)
    assert text(found) == "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        ("0F0 0F1 . 0B0 0B1", "0F0 0F1 0B0 0B1 0REDUCE_GRAD"),
        ("0F0 1F0 1B0 0B0", "0F0 1F0 1B0 0B0"),
        ("0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0F1 0I0 0I1 0W0 0W1 0REDUCE_GRAD"),
        (
            "0F0 3F0 (0F1;3B0)OVERLAP_F_B 3F1 0B0 3B1 0B1",
            "0F0 3F0 (0F1;3B0)OVERLAP_F_B 3F1 0B0 3B1 3REDUCE_GRAD 0B1 0REDUCE_GRAD",
        ),
    ],
)
def test_reductions(package, s, compute, expected):
    assert text(s._add_reduce_grad(package.actions(compute), 2)) == expected


def test_adjacent_halves_are_merged(package, s):
    found = s._merge_bw(package.actions("0F0 0F1 0F2 0I0 0I1 . 0W0 0I2 0W2 0W1"))
    assert text(found) == "0F0 0F1 0F2 0I0 0I1 0W0 0B2 0W1"


def test_a_schedule_that_cannot_go_on_is_reported(package, s):
    stuck = package.rows("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    with pytest.raises(ValueError, match="not progressing"):
        s._simulate_comms_compute(stuck, stage_to_rank=lambda stage: stage, num_stages=2)


# Validation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [["0F0 0B0", "1F0 1B0"], ["0F0 0I0 0W0", ". 1F0 1I0 1W0"], ["0F0 0B0", "1F0 1I0 1W0"]])
def test_what_is_valid_gives_the_ranks_of_stages(package, s, rows):
    assert s._validate_schedule(package.rows(*rows), 2, 2, 1) == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("rows", "expected_message"),
    [
        (["0F0 0B0"], "2"),
        (["0F0", "1F0"], "0"),
        (["0F0 0B0 0F1", "1F0 1B0"], "0"),
        (["0B0 0F0", "1F0 1B0"], "(?s)stage 0.*microbatch 0"),
        (["0I0 0F0 0W0", "1F0 1B0"], "(?s)stage 0.*microbatch 0"),
        (["0F0 0W0 0I0", "1F0 1B0"], "(?s)stage 0.*microbatch 0"),
        (["0F0 0I0", "1F0 1B0"], "I=1, W=0"),
        (["0F0 0B0", "1F0 0B0 1B0"], "rank 0"),
    ],
)
def test_what_is_not_valid_is_an_assertion(package, s, rows, expected_message):
    with pytest.raises(AssertionError, match=expected_message):
        s._validate_schedule(package.rows(*rows), 2, 2, 1)


def test_what_is_no_action_is_an_assertion(package, s):
    with pytest.raises(AssertionError, match="0F0"):
        s._validate_schedule({0: ["0F0"]}, 1, 1, 1)


# The classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1F1B", "1f1b", "Interleaved1F1B", "INTERLEAVED1F1B", "GPipe", "LoopedBFS",
                                  "dualpipev", "InterleavedZeroBubble", "ZBVZeroBubble", "PipelineScheduleSingle",
                                  "PipelineScheduleMulti"])  # fmt: skip
def test_a_class_is_found_by_its_name(s, name):
    assert issubclass(s.get_schedule_class(name), s._PipelineSchedule)


def test_an_unknown_class_is_reported_by_its_name(s):
    with pytest.raises(ValueError, match="ScheduleThatDoesNotExist"):
        s.get_schedule_class("ScheduleThatDoesNotExist")


@pytest.mark.parametrize("name", ["GPipe", "1F1B", *MULTI])
def test_orders_are_those_of_torch(name):
    """On stand-ins that have seen no constructor; the sizes that one refuses, the other refuses with the same type."""
    for size in SIZES:
        if name in ("GPipe", "1F1B") and size[0] > 1:
            continue
        assert order_or_error(Package(OURS), name, size) == order_or_error(Package(UPSTREAM), name, size), size


def order_or_error(package, name, size):
    try:
        schedule = made(package, name, *size)
    except Exception as error:
        return type(error)
    if name == "1F1B":  # in torch's, the forwards of the last rank are one too late; its step does not use it
        del schedule.pipeline_order[len(schedule.pipeline_order) - 1]
    lowered = getattr(schedule, "pipeline_order_with_comms", {})
    return [{rank: text(row) for rank, row in rows.items()} for rows in (schedule.pipeline_order, lowered)]


@pytest.mark.parametrize("name", MULTI)
def test_orders_are_valid_and_simulate(package, s, name):
    size = (2, 8, 4)
    schedule = made(package, name, *size)
    ranks = s._validate_schedule(schedule.pipeline_order, 4, 8, 8)
    assert ranks == schedule.stage_index_to_group_rank
    if name != "DualPipeV":  # its pairs are not taken apart by the pass
        lowered = s._add_send_recv(schedule.pipeline_order, stage_to_rank=ranks.__getitem__, num_stages=8)
        s._simulate_comms_compute(lowered, stage_to_rank=ranks.__getitem__, num_stages=8)


@pytest.mark.parametrize(
    ("name", "size", "expected_message"),
    [
        ("ZBVZeroBubble", (1, 4, 2), "2"),
        ("ZBVZeroBubble", (3, 4, 2), "2"),
        ("DualPipeV", (3, 12, 2), "2"),
        ("DualPipeV", (2, 3, 2), "3"),
        ("1F1B", (1, 1, 2), "1"),
        ("Interleaved1F1B", (2, 5, 2), "5"),
        ("InterleavedZeroBubble", (2, 5, 2), "5"),
    ],
)
def test_sizes_that_are_refused(package, name, size, expected_message):
    with pytest.raises(ValueError, match=expected_message):
        made(package, name, *size)


@pytest.mark.parametrize("name", MULTI)
def test_deferred_receives_of_a_class(package, s, name):
    early, late = (
        made(package, name, 2, 8, 4, defer_pp_recv=defer).pipeline_order_with_comms for defer in (False, True)
    )
    ranks = made(package, name, 2, 8, 4).stage_index_to_group_rank
    assert [text(row) for row in late.values()] != [text(row) for row in early.values()]
    assert [sorted(row) for row in late.values()] == [sorted(row) for row in early.values()]
    expected = s._defer_recv_ops(early, ranks.__getitem__)
    for rank, row in late.items():
        assert [action for action in row if "RECV" not in str(action)] == [
            action for action in expected[rank] if "RECV" not in str(action)
        ]
        # Ours posts them in the order of the sends as well, or a receive would get the message of another one.
        assert sorted(row) == sorted(expected[rank])
        assert package.ours or row == expected[rank]


def test_files_of_both_formats_are_read_back(package, s, tmp_path):
    original = made(package, "InterleavedZeroBubble", 2, 4, 2)
    for kind in ("compute_only", "compute_comms"):
        file = str(tmp_path / f"{kind}.csv")
        original._dump_csv(file, kind)
        stages = [stand_in(package, 2, 4) for _ in range(2)]
        again = s._PipelineScheduleRuntime(stages, 4)
        again._load_csv(file, format=kind)
        assert again.pipeline_order_with_comms == original.pipeline_order_with_comms
        assert again.stage_index_to_group_rank == original.stage_index_to_group_rank
        assert all(stage.stage_index_to_group_rank == original.stage_index_to_group_rank for stage in stages)
    with pytest.raises(NotImplementedError):
        again._load_csv(file, format="compute_and_more")


def test_a_file_of_a_multi_schedule_is_of_computations(package, s, tmp_path):
    file = str(tmp_path / "v.csv")
    (tmp_path / "v.csv").write_text("0F0,,3F0,3B0,,0B0\n,1F0,2F0,2B0,1B0\n")
    stages = [stand_in(package, 2, 4) for _ in range(2)]
    schedule = s.PipelineScheduleMulti(stages, 1)
    schedule._load_csv(file)
    assert schedule.stage_index_to_group_rank == {0: 0, 1: 1, 2: 1, 3: 0}
    assert text(schedule.pipeline_order[0]) == "0F0 . 3F0 3B0 . 0B0"
    schedule._dump_csv(str(tmp_path / "again.csv"))
    assert (tmp_path / "again.csv").read_text().splitlines() == ["0F0,,3F0,3B0,,0B0", ",1F0,2F0,2B0,1B0"]
    with pytest.raises(AssertionError, match="compute_only"):
        schedule._load_csv(file, format="compute_comms")


def test_communication_is_refused_where_only_computations_are_expected(package, s):
    schedule = s._PipelineScheduleRuntime([stand_in(package, 1, 1)], 1)
    with pytest.raises(ValueError, match="compute"):
        schedule._prepare_schedule_with_comms(package.rows("0F0 0SEND_F0 0B0"))
    with pytest.raises(AssertionError):
        schedule._prepare_schedule_with_comms(package.rows("0F0 . 0B0"), format="compute_comms")
    with pytest.raises(NotImplementedError):
        schedule._prepare_schedule_with_comms(package.rows("0F0 0B0"), format="other")


def test_orders_for_pictures(package):
    visualizer = package._schedule_visualizer
    plain = visualizer.get_schedule_ops("GPipe", 2, 3)
    assert [text(row) for row in plain] == [
        "0F0 0F1 0F2 0B0 0B1 0B2 0REDUCE_GRAD",
        "1F0 1F1 1F2 1B0 1B1 1B2 1REDUCE_GRAD",
    ]
    kind = package.schedule_class("Interleaved1F1B")
    lowered = visualizer.get_schedule_ops(kind, 2, 4, num_stages_per_rank=2, with_comms=True)
    deferred = visualizer.get_schedule_ops("Interleaved1F1B", 2, 4, with_comms=True, defer_pp_recv=True)
    receive = package.schedules._Action.from_str("2RECV_F0")
    assert lowered[0].index(receive) < deferred[0].index(receive)
    assert sorted(map(str, lowered[1])) == sorted(map(str, deferred[1]))
    with pytest.raises(ValueError):  # noqa: PT011
        visualizer.get_schedule_ops("GPipe", 2, 3, add_spacing=True, with_comms=True)


def test_ranks_of_stages(package):
    utils = package._utils
    assert utils.generate_stage_to_rank_mapping(2, 4) == dict(enumerate(LOOP))
    assert utils.generate_stage_to_rank_mapping(2, 4, style="v") == dict(enumerate(V))
    assert list(utils.generate_stage_to_rank_mapping(4, 12, style="v").values()) == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]
    assert utils.generate_rank_to_stage_mapping(2, 4) == {0: [0, 2], 1: [1, 3]}
    assert utils.generate_rank_to_stage_mapping(2, 4, style="v") == {0: [0, 3], 1: [1, 2]}
    with pytest.raises(ValueError, match="5"):
        utils.generate_stage_to_rank_mapping(2, 5, style="v")
    with pytest.raises(ValueError, match="zigzag"):
        utils.generate_stage_to_rank_mapping(2, 4, style="zigzag")
