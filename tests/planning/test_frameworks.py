"""Plans as settings of frameworks: what is written reads back, torch runs it, and what differs is said."""

import shlex
import tomllib
from itertools import chain

import pytest
import yaml
from torch.distributed.pipelining import schedules as upstream

import penstock as ps
from penstock.errors import CostsError, PlanError, ScheduleError, WriteError
from penstock.models import megatron as layouts
from penstock.planning.frameworks.megatron import layout_of
from penstock.planning.frameworks.registry import FRAMEWORKS, settings_for
from penstock.planning.frameworks.settings import Settings
from penstock.schedules.registry import RECIPES
from torch_oracle import counting_stage

SCHEDULES = [recipe.name for recipe in RECIPES if recipe.name != "ForwardOnly"]


def build(name, ranks=4, microbatches=8, **sizes):
    return ps.build(name, ranks=ranks, microbatches=microbatches, **sizes)


def names_of(schedule):
    """Two layers per stage, an embedding, a norm and a head."""
    names = [[f"layers.{2 * stage}", f"layers.{2 * stage + 1}"] for stage in range(schedule.stages)]
    return [["embed", *names[0]], *names[1:-1], [*names[-1], "norm", "head"]]


def loaded_by_torch(path, schedule, stages_per_rank):
    """Return torch's runtime with the CSV loaded as torchtitan and AutoModel do."""
    stage = counting_stage(schedule.ranks, schedule.stages)
    runtime = upstream._PipelineScheduleRuntime([stage] * stages_per_rank, schedule.microbatches)
    runtime._load_csv(str(path))
    return runtime


def actions_of(rows):
    return [[str(action) for action in row if action is not None] for row in rows]


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_runs_the_schedule_that_was_written(name, tmp_path):
    schedule = build(name)
    settings = settings_for("torch", schedule)
    for file, content in settings.files.items():
        (tmp_path / file).write_text(content, newline="")
    read = ps.read(tmp_path / "schedule.csv")
    assert read.actions == schedule.actions
    assert read.placement == schedule.placement
    runtime = loaded_by_torch(tmp_path / "schedule.csv", schedule, schedule.stages // schedule.ranks)
    assert actions_of(runtime.pipeline_order[rank] for rank in range(4)) == actions_of(schedule.actions)
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement.rank_of))
    computed = [
        [str(action) for action in runtime.pipeline_order_with_comms[rank] if action.is_compute_op] for rank in range(4)
    ]
    assert computed == actions_of(schedule.actions)


def test_torch_runs_any_placement(tmp_path):
    plan = ps.plan(ps.Costs(forward=[1, 2, 1, 1, 2, 1]), microbatches=4, placement=ps.Placement((0, 1, 0, 1, 1, 0), 2))
    settings = settings_for("torch", plan.schedule, plan.costs)
    (tmp_path / "it.csv").write_text(settings.files["schedule.csv"], newline="")
    runtime = loaded_by_torch(tmp_path / "it.csv", plan.schedule, 3)
    assert actions_of(runtime.pipeline_order[rank] for rank in range(2)) == actions_of(plan.schedule.actions)
    assert "# rank 1: a PipelineStage for stages 1, 3, 4\n" in settings.text
    assert settings.value == settings.planned == plan.timeline.makespan
    compile(settings.text, "settings", "exec")


@pytest.mark.parametrize(
    ("name", "placing"),
    [
        ("ZB-H1", "PipelineScheduleSingle"),
        ("InterleavedZeroBubble", "PipelineScheduleMulti"),
        ("V-Half", "ZBVZeroBubble"),
    ],
)
def test_torchtitan_and_automodel_load_the_csv_and_place_stages_by_a_name(name, placing):
    schedule = build(name)
    names = names_of(schedule)
    titan = settings_for("torchtitan", schedule, names=names)
    parallelism = tomllib.loads(titan.files["torchtitan.toml"])["parallelism"]
    assert parallelism == {
        "pipeline_parallel_degree": 4,
        "pipeline_parallel_schedule": placing,
        "pipeline_parallel_schedule_csv": "schedule.csv",
        "pipeline_parallel_microbatch_size": 1,
        "module_fqns_per_model_part": names,
    }
    assert tomllib.loads(titan.text)["training"] == {"local_batch_size": 8}
    automodel = settings_for("automodel", schedule, names=names)
    assert yaml.safe_load(automodel.files["automodel.yaml"])["distributed"] == {
        "strategy": "fsdp2",
        "pp_size": 4,
        "pipeline": {
            "pp_schedule": placing,
            "pp_schedule_csv": "schedule.csv",
            "pp_microbatch_size": 1,
            "pp_batch_size": 8,
            "module_fqns_per_model_part": names,
        },
    }
    for settings in (titan, automodel):
        assert settings.files["schedule.csv"] == settings_for("torch", schedule).files["schedule.csv"]
        assert (settings.value, settings.slowdown, settings.schedule) == (settings.planned, 0, schedule)
    upstream.get_schedule_class(placing)  # raises for a name that torch does not have


def test_a_placement_that_torchtitan_does_not_have_is_replaced():
    placement = ps.Placement((0, 1, 1, 0, 0, 1), 2)
    plan = ps.plan(ps.Costs(), microbatches=4, placement=placement)
    settings = settings_for("torchtitan", plan.schedule, plan.costs, names=names_of(plan.schedule))
    assert settings.schedule.placement in (ps.Placement.loop(2, 6), ps.Placement.loop(2, 2))
    of_stages = (
        ps.Costs() if settings.schedule.stages == 6 else ps.Costs(forward=3, backward_input=3, backward_weight=3)
    )
    assert settings.value == ps.simulate(settings.schedule, of_stages).makespan
    assert "torchtitan places stages in a loop or, two per rank, in a V; the nearest schedule is" in settings.notes[0]
    parts = tomllib.loads(settings.text)["parallelism"]["module_fqns_per_model_part"]
    assert len(parts) == settings.schedule.stages
    assert [*chain(*parts)] == [*chain(*names_of(plan.schedule))]


def test_megatron_runs_1f1b_instead_and_says_what_that_costs():
    schedule = build("ZB-H1")
    settings = settings_for("megatron", schedule, names=names_of(schedule))
    assert settings.schedule == build("1F1B")
    assert (settings.planned, settings.value) == (27, 33)
    assert settings.slowdown == pytest.approx(6 / 27)
    assert settings.notes[0] == (
        "Megatron-LM reads no custom schedule; the nearest schedule is 1F1B: a step takes 33, 22.2% longer than the "
        "plan's 27"
    )
    flags = shlex.split(settings.text.replace("\\\n", " "))
    assert flags == ["--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Ett|tt|tt|ttL"]


def test_megatron_interleaves_the_stages_of_a_v_where_they_fit():
    schedule = build("V-Half")
    costs = ps.Costs(forward=[1, 1, 1, 1, 1, 1, 1, 3])
    free = settings_for("megatron", schedule, costs, names=names_of(schedule))
    assert free.schedule == build("Interleaved1F1B")
    assert free.value == ps.simulate(free.schedule, costs).makespan
    assert '"Ett|(tt|)*6,ttL"' in free.text
    tight = settings_for("megatron", schedule, costs, names=names_of(schedule), memory_limit=8)
    assert tight.schedule == build("1F1B")
    assert any("the 8 stages of the plan are joined to 4" in note for note in tight.notes)
    joined = ps.Costs(forward=[2, 2, 2, 4], backward_input=2, backward_weight=2, activation=2)
    assert tight.value == ps.simulate(tight.schedule, joined).makespan
    assert ps.simulate(tight.schedule, joined).peak_memory[0] == 8
    over = settings_for("megatron", schedule, costs, memory_limit=7)
    assert any("1F1B does not fit into memory: rank 0 would hold 8 of 7" in note for note in over.notes)


def test_megatron_interleaves_only_multiples_of_the_ranks():
    schedule = build("V-Half", microbatches=6)
    settings = settings_for("megatron", schedule, names=names_of(schedule))
    assert settings.schedule == build("1F1B", microbatches=6)
    assert any("needs a multiple of 4 microbatches; 6 is none" in note for note in settings.notes)


def test_what_a_framework_has_is_not_replaced():
    for framework, name in (
        ("megatron", "1F1B"),
        ("megatron", "Interleaved1F1B"),
        ("primus", "Interleaved1F1B"),
        ("primus", "ZB-H1"),
        ("primus", "V-Min"),
    ):
        settings = settings_for(framework, build(name))
        assert settings.schedule == build(name)
        assert settings.slowdown == 0
        assert not any("nearest" in note for note in settings.notes)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("1F1B", "1f1b"), ("ZB-H1", "zero-bubble"), ("ZBVZeroBubble", "zbv-formatted"), ("V-Half", "v-half")],
)
def test_primus_gets_an_algorithm(name, algorithm):
    schedule = build(name)
    settings = settings_for("primus", schedule, names=names_of(schedule))
    fields = yaml.safe_load(settings.text)
    assert (fields["patch_primus_pipeline"], fields["pp_algorithm"]) == (True, algorithm)
    assert fields["pipeline_model_parallel_size"] == 4
    if schedule.stages == 4:
        assert fields["pipeline_model_parallel_layout"] == "Ett|tt|tt|ttL"
    else:
        assert fields["num_virtual_stages_per_pipeline_rank"] == 2
        assert any("the value holds only if" in note for note in settings.notes)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_framework_takes_every_schedule(framework, name):
    schedule = build(name)
    settings = settings_for(framework, schedule, names=names_of(schedule))
    assert isinstance(settings, Settings)
    assert settings.framework == framework
    assert settings.text in (*settings.files.values(), settings.text if framework == "torch" else None)
    assert ps.check(settings.schedule) == []
    named = settings_for(framework, schedule)
    assert named.schedule == settings.schedule


def test_a_layout_names_what_the_model_reads_back():
    names = [["embed", "layers.0"], ["layers.1", "layers.2"], ["layers.3"], ["mtp.0", "norm", "head"]]
    text = layout_of(names)
    assert text == "Et|tt|t|mL"
    groups = layouts.group_units([*chain(*names)])
    assert layouts.read(text, groups) == tuple(map(tuple, names))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([["a"], ["b"]], "no layers among the modules a, b"),
        ([["embed"], ["proj", "layers.0"], ["layers.1"]], "'proj' in stage 1 has no symbol"),
        ([["layers.0"], ["layers.1", "norm"], ["head"]], "'norm' in stage 1 has no symbol"),
        ([["layers.0", "adapter"], ["layers.1"]], "'adapter' in stage 0 has no symbol"),
    ],
)
def test_what_has_no_symbol_is_named(names, message):
    with pytest.raises(WriteError, match=message):
        layout_of(names)


def test_mistakes_are_named():
    schedule = build("1F1B")
    with pytest.raises(PlanError, match="unknown framework 'torchtitn'; did you mean 'torchtitan'"):
        settings_for("torchtitn", schedule)
    with pytest.raises(PlanError, match="the frameworks are torch, torchtitan, automodel, megatron, primus"):
        settings_for("quux", schedule)
    with pytest.raises(ScheduleError, match=r"need the schedule before ps\.lower"):
        settings_for("torch", ps.lower(schedule))
    with pytest.raises(PlanError, match="names are given for 1 stages, but the schedule has 4"):
        settings_for("torch", schedule, names=[["a"]])
    with pytest.raises(CostsError, match="forward has 3 numbers"):
        settings_for("megatron", schedule, ps.Costs(forward=[1, 1, 1]))
    uneven = ps.plan(ps.Costs(), microbatches=2, placement=ps.Placement((0, 1, 0), 2)).schedule
    with pytest.raises(WriteError, match="3 stages on 2 ranks cannot be expressed"):
        settings_for("megatron", uneven)
    skip = ps.Schedule(build("1F1B", ranks=3).actions, edges=[ps.Edge(0, (1,)), ps.Edge(1, (2,)), ps.Edge(0, (2,))])
    with pytest.raises(WriteError, match="chains of stages only"):
        settings_for("torch", skip)
