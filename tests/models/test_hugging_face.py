import json

import pytest
import torch

import penstock as ps
from models import small_configs
from models.hugging_face import FAMILIES, batch, build
from models.in_turn import assert_complete, assert_equal
from penstock.errors import SplitError, StageError
from penstock.models.loss import count_labels, count_shifted
from penstock.models.split import Split
from penstock.runtime import Pipeline, run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore")

HALVES = (slice(2), slice(2, 4))


def loss_of(output):
    return output.loss


def example(family):
    return ((), batch(family, 2, 9)) if family == "llava" else None


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_equal_to_the_unsplit_model(family, stages):
    model = build(family)
    split = ps.split(model, stages=stages, example=example(family))
    assert_complete(split, model)
    microbatches = [((), batch(family, 3, 11, seed=1)), ((), batch(family, 1, 8, seed=2))]
    assert_equal(split, model, microbatches, loss_of, use_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_description_is_enough(family):
    model = build(family)
    split = ps.split(model, stages=3, example=example(family))
    again = Split.from_json(model, json.loads(json.dumps(split.to_json())))
    assert again.digest == split.digest
    assert_equal(again, model, [((), batch(family, 2, 10, seed=3))], loss_of, use_cache=False)


@pytest.mark.parametrize(
    ("family", "weight"),
    [("llama", count_shifted), ("llava", count_shifted), ("t5", count_labels), ("bert", count_labels)],
)
def test_the_loss_is_a_mean_over_the_labels_that_count(family, weight):
    model = build(family).eval()
    loss = ps.split(model, stages=2, example=example(family)).loss
    assert (loss.reduction, loss.weight, loss.target) == ("weighted", weight, "labels")
    whole = batch(family, 4, 12)
    parts = [{name: value[start : start + 2] for name, value in whole.items()} for start in (0, 2)]
    with torch.no_grad():
        losses = torch.stack([loss.loss_fn(model(**part), part["labels"]) for part in parts])
        weights = torch.stack([loss.weight(part["labels"]) for part in parts])
        expected = model(**whole).loss
    assert weights[0] != weights[1]
    assert float((losses * weights).sum() / weights.sum()) == pytest.approx(float(expected), rel=1e-6)
    assert float(losses.mean()) != pytest.approx(float(expected), rel=1e-6)


UNSHIFTED = ["BartForCausalLM", "MarianForCausalLM", "WhisperForCausalLM", "XLNetLMHeadModel"]


@pytest.mark.parametrize("name", [*UNSHIFTED, "OPTForCausalLM"])
def test_the_loss_is_measured_and_not_named(name):
    model = small_configs.build(name, "causal").eval()
    loss = ps.split(model, stages=2).loss
    kind, config = type(model), model.config
    assert ps.split(lambda: kind(config), stages=2).loss == loss
    ids = batch("llama", 4, 12)["input_ids"]
    labels = ids.clone()
    labels[:2, 3:] = -100
    with torch.no_grad():
        losses = torch.stack([model(input_ids=ids[part], labels=labels[part]).loss for part in HALVES])
        expected = model(input_ids=ids, labels=labels).loss
    weights = torch.stack([loss.weight(labels[part]) for part in HALVES])
    assert weights.tolist() == ([6, 24] if name in UNSHIFTED else [4, 22])
    assert float((losses * weights).sum() / weights.sum()) == pytest.approx(float(expected), rel=1e-6)


def test_an_ignored_sample_does_not_count():
    import transformers

    config = transformers.BertConfig(**FAMILIES["bert"][1], num_labels=5)
    model = transformers.BertForSequenceClassification(config).double().eval()
    loss = ps.split(model, stages=2).loss
    ids, labels = batch("bert", 4, 8)["input_ids"], torch.tensor([3, -100, 4, 1])
    with torch.no_grad():
        losses = torch.stack([model(input_ids=ids[part], labels=labels[part]).loss for part in HALVES])
        expected = model(input_ids=ids, labels=labels).loss
    weights = torch.stack([loss.weight(labels[part]) for part in HALVES])
    assert float((losses * weights).sum() / weights.sum()) == pytest.approx(float(expected), rel=1e-6)


def test_a_loss_that_fits_nothing_has_no_weight():
    class PerSequence(type(build("llama"))):
        def forward(self, input_ids=None, labels=None, attention_mask=None):
            output = super().forward(input_ids=input_ids, labels=labels, attention_mask=attention_mask)
            output.loss = output.loss * (labels != -100).sum() / len(labels)
            return output

    model = PerSequence(build("llama").config)
    split = ps.split(model, stages=2)
    assert split.loss.weight is None
    schedule = ps.build("GPipe", ranks=2, microbatches=2)

    def build_pipeline(transport):
        with pytest.raises(StageError, match="loss_weight go together; pass both"):
            Pipeline(split, schedule, transport=transport)
        return True

    assert run_in_threads(build_pipeline, 2) == [True, True]


def test_the_loss_of_other_models():
    assert ps.split(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), stages=2).loss is None


def test_labels_are_needed_on_the_last_stage_only():
    stages = ps.split(build("llama"), stages=2).stages()
    given = batch("llama", 2, 8)
    labels = given.pop("labels")
    hidden = stages[0](**given)
    assert torch.equal(hidden, stages[0](**given, labels=labels * 1000))  # no label of this size exists
    output = stages[1](hidden, **given, labels=labels)
    assert type(output).__name__ == "CausalLMOutputWithPast"
    assert output.loss.isfinite()
    assert output.past_key_values is None


def test_gradient_checkpointing():
    model = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    split = ps.split(model, stages=3)
    assert_equal(split, model, [((), batch("llama", 2, 8))], loss_of, use_cache=False)


def test_router_logits_are_edges():
    split = ps.split(build("mixtral"), stages=2)
    assert [str(edge) for edge in split.edges] == [
        "0>1 (model.layers.0.mlp.gate)",
        "0>1 (model.layers.1.mlp.gate)",
        "0>1 (model.layers.1)",
    ]


def test_a_keyword_that_the_probe_has_not_seen():
    stages = ps.split(build("llama"), stages=2).stages()
    with pytest.raises(SplitError, match="output_hidden_states=True was not part of the example"):
        stages[0](**batch("llama", 2, 8), output_hidden_states=True)


def test_layers_in_a_loop_are_refused():
    import transformers

    config = transformers.AlbertConfig(
        hidden_size=16,
        embedding_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=32,
    )
    with pytest.raises(SplitError, match="is called 4 times, in a loop") as caught:
        ps.split(transformers.AlbertForMaskedLM(config), stages=2)
    assert caught.value.unit == "albert.encoder.albert_layer_groups.0"
