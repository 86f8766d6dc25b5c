"""A pipeline's model on disk: what save_pretrained would write, and readable by any number of ranks."""

import json
import threading

import pytest
import torch
from torch import nn

import penstock as ps
from models.families import FAMILIES, builder
from penstock.errors import CheckpointError, WriteError
from penstock.models.weights import WeightFiles
from penstock.runtime import Pipeline, run_in_threads
from penstock.runtime.checkpoints import export as export_module

TEXT = [family for family in FAMILIES if family != "vit"]
SCHEDULES = {1: "GPipe", 2: "ZBVZeroBubble", 3: "1F1B"}


def schedule_of(ranks, name=None):
    return ps.build(name or SCHEDULES[ranks], ranks=ranks, microbatches=ranks)


def example_of():
    ids = torch.randint(3, 90, (4, 6), generator=torch.Generator().manual_seed(1))
    return (), {"input_ids": ids, "labels": ids.clone()}


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return build()


def export(split, schedule, folder, **options):
    def worker(transport):
        with Pipeline(split, schedule, transport=transport) as pipe:
            ps.export(pipe, folder, **options)

    run_in_threads(worker, schedule.ranks, timeout=60)


def contents(folder):
    files = WeightFiles(folder)
    return {name: files[name] for name in files}


@pytest.mark.parametrize("family", TEXT)
def test_the_files_are_those_of_save_pretrained(family, tmp_path):
    schedule = schedule_of(2)
    model = seeded(builder(family))
    split = ps.split(model, stages=schedule.stages, example=example_of())
    export(split, schedule, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("config.json", "generation_config.json"):
        if (tmp_path / "theirs" / name).exists():
            written = json.loads((tmp_path / "ours" / name).read_text())
            assert written == json.loads((tmp_path / "theirs" / name).read_text())
    loaded = type(model).from_pretrained(tmp_path / "ours").eval()
    batch = example_of()[1]
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model.eval()(**batch).logits)


@pytest.mark.parametrize(("written", "read"), [(2, 3), (3, 1), (1, 2)])
def test_other_ranks_read_what_some_have_written(written, read, tmp_path):
    model = seeded(builder("gpt2"))
    schedule = schedule_of(written)
    export(ps.split(model, stages=schedule.stages), schedule, tmp_path)
    assert (tmp_path / "model.safetensors").exists() == (written == 1)
    other = schedule_of(read)
    split = ps.split(builder("gpt2"), stages=other.stages)
    for rank in range(read):
        for stage in split.materialize(rank, other.placement, state_dict=tmp_path).values():
            for name, value in stage.state_dict().items():
                assert torch.equal(value, model.state_dict()[name])


def test_files_have_a_largest_size_and_old_ones_go(tmp_path):
    model = seeded(builder("llama"))
    schedule = schedule_of(2)
    split = ps.split(model, stages=schedule.stages)
    (tmp_path / "tokenizer.json").write_text("{}")
    export(split, schedule, tmp_path, max_shard_size="10KB")
    many = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(many) > 4
    assert many[0] == f"model-00001-of-{len(many):05}.safetensors"
    export(split, schedule, tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) == 2
    assert contents(tmp_path).keys() == model.state_dict().keys()
    assert (tmp_path / "tokenizer.json").exists()
    assert not [*tmp_path.glob(".export*")]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == sum(
        parameter.nbytes for parameter in model.parameters()
    )


def test_trained_values_and_their_type_are_written(tmp_path):
    model = seeded(builder("llama")).bfloat16()
    schedule = schedule_of(3)
    export(ps.split(model, stages=3), schedule, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in contents(tmp_path).values()} == {torch.bfloat16}


class WithStatistics(nn.Module):
    """A model with a buffer that several stages read."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Buffer(torch.tensor(2.0))
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x * self.scale)
        return x


def test_a_buffer_of_several_stages_is_written_once(tmp_path):
    model = WithStatistics()
    split = ps.split(model, stages=2, example=torch.ones(2, 3))
    assert all("scale" in stage.state_dict() for stage in split.stages().values())

    def worker(transport):
        with Pipeline(split, schedule_of(2, "1F1B"), transport=transport, loss_fn=nn.functional.mse_loss) as pipe:
            ps.export(pipe, tmp_path)

    run_in_threads(worker, 2, timeout=60)
    assert contents(tmp_path).keys() == model.state_dict().keys()


def hand_made(transport, folder):
    stages = {transport.rank: nn.Linear(2, 2)}
    schedule = schedule_of(2, "1F1B")
    with Pipeline(stages, schedule, transport=transport, loss_fn=nn.functional.mse_loss) as pipe:
        ps.export(pipe, folder)


def test_stages_without_names_of_their_own_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"have tensors of one name.*penstock\.split"):
        run_in_threads(lambda transport: hand_made(transport, tmp_path), 2, timeout=60)
    assert not [*tmp_path.iterdir()]


def test_a_rank_that_cannot_write_stops_all_and_nothing_is_lost(tmp_path, monkeypatch):
    model = seeded(builder("llama"))
    schedule = schedule_of(2)
    split = ps.split(model, stages=schedule.stages)
    export(split, schedule, tmp_path)
    before = contents(tmp_path)
    write_shard, errors, after = export_module.write_shard, {}, threading.Barrier(2)

    def fail(tensors, path):
        if path.name.startswith("1-"):
            raise WriteError(f"cannot write {path}: no space left on device")
        write_shard(tensors, path)

    monkeypatch.setattr(export_module, "write_shard", fail)

    def worker(transport):
        with Pipeline(split, schedule, transport=transport) as pipe:
            try:
                ps.export(pipe, tmp_path)
            except CheckpointError as error:
                errors[transport.rank] = str(error)
            after.wait(30)
            pipe.step(**example_of()[1])  # the pipeline still works

    run_in_threads(worker, 2, timeout=60)
    assert "no space left" in errors[1]
    assert errors[0] == errors[1]
    now = contents(tmp_path)
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert not [*tmp_path.glob(".export*")]


def test_mistakes_in_the_call(tmp_path):
    split, schedule = ps.split(seeded(builder("llama")), stages=1), schedule_of(1)
    with Pipeline(split, schedule) as pipe:
        with pytest.raises(CheckpointError, match="unknown format 'bin'; write format='safetensors'"):
            ps.export(pipe, tmp_path, format="bin")
        with pytest.raises(WriteError, match=r"'5 potatoes' is not the size of a file; write"):
            ps.export(pipe, tmp_path, max_shard_size="5 potatoes")
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match=r"rank 0 failed: NotADirectoryError: .*file"):
            ps.export(pipe, tmp_path / "file")
