"""Weights on disk: stages read their own tensors, by the names of files of every family, and no others."""

import json
import re

import pytest
import torch
from torch import nn

import penstock as ps
from models.families import FAMILIES, builder
from models.small_configs import WITHOUT, build, class_names
from penstock.errors import FormatError, ReadError, SplitError
from penstock.ir.placement import Placement
from penstock.models.weights import WeightFiles
from penstock.models.weights.converted import ConvertedWeights, open_weights


def save_text(build_model, folder):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = build_model()
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def example_of(family):
    if family == "vit":
        return (), {"pixel_values": torch.rand(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 90, (2, 6))
    return (), {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_read_their_own_tensors_only(family, tmp_path, monkeypatch):
    model = save_text(builder(family), tmp_path)
    split = ps.split(builder(family), stages=3, example=example_of(family))
    opened = []
    monkeypatch.setattr(WeightFiles, "__init__", _noting(WeightFiles.__init__, opened))
    expected, held = model.state_dict(), []
    for rank in range(3):
        stages = split.materialize(rank, Placement.loop(3, 3), state_dict=tmp_path)
        found = {name: value for module in stages.values() for name, value in module.state_dict().items()}
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        held.append(sum({value.data_ptr(): value.nbytes for value in found.values()}.values()))
    monkeypatch.undo()
    tied = {name for tie in split.ties for _, name in tie.members}
    for files, size in zip(opened, held, strict=True):
        assert len(files.read) == len(set(files.read))  # each once
        assert sum(WeightFiles(tmp_path)[name].nbytes for name in files.read) == size
    for files in opened:
        others = {name for other in opened if other is not files for name in other.read}
        assert {*files.read} & others <= tied


def _noting(original, made):
    def construct(self, path):
        original(self, path)
        made.append(self)

    return construct


@pytest.mark.full
@pytest.mark.processes  # one class starts a compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind in ("causal", "masked") for name in class_names(kind)]
)
def test_weights_of_every_class_are_what_was_saved(name, kind, tmp_path):
    if name in WITHOUT:
        with pytest.raises(LookupError, match=re.escape(WITHOUT[name])):
            build(name, kind)
        return
    model = build(name, kind)
    model.save_pretrained(tmp_path)
    weights = open_weights(tmp_path, model)
    expected = model.state_dict()
    found = {key: weights[key] for key in expected if key in weights}
    assert all(torch.equal(found[key], expected[key]) for key in found)
    read = {expected[key].data_ptr() for key in found}
    assert all(expected[key].data_ptr() in read for key in expected)  # others are tied to these


def test_files_of_a_base_model_fit_the_model_with_a_head(tmp_path):
    model = save_text(builder("gpt2"), tmp_path)
    model.transformer.save_pretrained(tmp_path / "base")
    assert "wte.weight" in WeightFiles(tmp_path / "base")
    split = ps.split(builder("gpt2"), stages=2)
    found = split.materialize(1, Placement.loop(2, 2), state_dict=tmp_path / "base")[1].state_dict()
    assert torch.equal(found["transformer.ln_f.weight"], model.transformer.ln_f.weight)
    assert torch.equal(found["lm_head.weight"], model.transformer.wte.weight)


def test_any_model_reads_a_file_by_name(tmp_path):
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    split = ps.split(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), stages=2)
    stage = split.materialize(1, Placement.loop(2, 2), state_dict=str(tmp_path / "mine.safetensors"))[1]
    assert torch.equal(stage.state_dict()["1.weight"], model[1].weight)


def test_missing_values_are_listed(tmp_path):
    from safetensors.torch import save_file

    save_file({"0.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    split = ps.split(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), stages=2)
    with pytest.raises(SplitError, match=r"it lacks 1.weight, 1.bias; its own names are 0.weight"):
        split.materialize(1, Placement.loop(2, 2), state_dict=tmp_path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ReadError, match=r"there is no file or folder .*nowhere"):
        WeightFiles(tmp_path / "nowhere")
    with pytest.raises(ReadError, match=r"has neither model.safetensors nor .*; it has no files"):
        WeightFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ReadError, match=r"it has pytorch_model.bin"):
        WeightFiles(tmp_path)
    with pytest.raises(ReadError, match="is not a safetensors file"):
        WeightFiles(tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(FormatError, match="is damaged, or not a safetensors file"):
        WeightFiles(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ReadError, match=r"lists files that do not exist: gone\.safetensors"):
        WeightFiles(tmp_path)
    index.write_text("[]")
    with pytest.raises(FormatError, match="is not an index"):
        WeightFiles(tmp_path)


def test_quantized_weights_are_refused(tmp_path):
    model = save_text(builder("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ReadError, match="are quantized"):
        open_weights(tmp_path, model)


def test_experts_are_fused_from_their_files(tmp_path):
    model = save_text(builder("mixtral"), tmp_path)
    files = WeightFiles(tmp_path)
    weights = ConvertedWeights(files, model)
    fused = next(name for name in weights if name.endswith("gate_up_proj"))
    assert fused not in files
    assert torch.equal(weights[fused], model.state_dict()[fused])
    assert len(files.read) == 8  # two tensors of each of four experts
