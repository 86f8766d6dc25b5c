"""Splits of callables and of models on the meta device: found the same, and made real rank by rank."""

import ctypes

import pytest
import torch
from torch import nn

import penstock as ps
from models.families import FAMILIES, builder
from penstock.errors import SplitError
from penstock.ir.placement import Placement
from penstock.models import split as split_module
from penstock.models.self_check import run_stages
from penstock.models.split import Split
from penstock.runtime import Pipeline, run_in_threads

SEED = 11
TEXT = [family for family in FAMILIES if family != "vit"]


def on_meta(build):
    with torch.device("meta"):
        return build()


def seeded(build, seed=SEED):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def example_of(family):
    if family == "vit":
        return (), {"pixel_values": torch.rand(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 90, (2, 6))
    return (), {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [lambda build: build, on_meta], ids=["callable", "meta"])
def test_a_model_without_values_is_split_like_a_real_one(family, kind):
    build, example = builder(family), example_of(family)
    real = ps.split(build(), stages=3, example=example)
    found = ps.split(kind(build), stages=3, example=example)
    assert found.layout == real.layout
    assert found.edges == real.edges
    assert found.ties == real.ties
    assert found.description.held == real.description.held
    assert all(parameter.is_meta for parameter in found.model.parameters())


def memory_of(modules):
    """The bytes of all memory that the modules' parameters and buffers are in."""
    tensors = [tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_their_part_of_the_whole_model_exactly(family):
    build, example = builder(family), example_of(family)
    whole = seeded(build).eval()
    expected = whole.state_dict()
    split = ps.split(lambda: build().eval(), stages=4, example=example)
    placement = Placement((0, 1, 1, 0), 2)
    stages = {}
    for rank in range(2):
        own = split.materialize(rank, placement, seed=SEED)
        assert memory_of(own.values()) < memory_of([whole])
        stages |= own
    held = {name: value for module in stages.values() for name, value in module.state_dict().items()}
    assert set(held) == set(expected)
    for name, value in held.items():
        assert torch.equal(value, expected[name]), name
    with torch.no_grad():
        output = run_stages(stages, split.edges, *example)
        reference = whole(**example[1])
    torch.testing.assert_close(output.logits, reference.logits, atol=1e-6, rtol=0)
    torch.testing.assert_close(output.loss, reference.loss, atol=1e-6, rtol=0)


@pytest.mark.parametrize("init", ["exact", "per_name", "state_dict"])
def test_every_way_gives_a_split_that_trains_like_the_whole(init):
    build, example = builder("gpt2"), example_of("gpt2")
    whole = seeded(lambda: build().eval())
    options = {"state_dict": whole.state_dict()} if init == "state_dict" else {"init": init, "seed": SEED}
    split = ps.split(lambda: build().eval(), stages=3, example=example)
    if init == "per_name":
        whole.load_state_dict(
            split.materialize(**options)[0].state_dict() | split.stages()[2].state_dict(), strict=False
        )
        whole.load_state_dict(split.stages()[1].state_dict(), strict=False)
    stages = {rank: split.materialize(rank, Placement((0, 1, 2), 3), **options)[rank] for rank in range(3)}
    run_stages(stages, split.edges, *example).loss.backward()
    whole(**example[1]).loss.backward()
    gradients = {}
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad
    tied = gradients.pop("lm_head.weight")
    gradients["transformer.wte.weight"] = gradients["transformer.wte.weight"] + tied
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-7, rtol=1e-5)


def test_both_ends_of_a_tie_on_one_rank_are_one_tensor():
    split = ps.split(builder("gpt2"), stages=4)
    own = split.materialize(0, Placement((0, 1, 1, 0), 2), init="per_name")
    assert own[0].get_parameter("transformer.wte.weight") is own[3].get_parameter("lm_head.weight")


def test_declared_ties_are_one_value_on_all_ranks():
    split = ps.split(builder("llama"), stages=3, ties=[("model.embed_tokens.weight", "lm_head.weight")])
    placement = Placement((0, 1, 2), 3)
    first = split.materialize(0, placement, seed=SEED)[0].get_parameter("model.embed_tokens.weight")
    last = split.materialize(2, placement, seed=SEED)[2].get_parameter("lm_head.weight")
    assert torch.equal(first, last)
    assert torch.equal(first, seeded(builder("llama")).model.embed_tokens.weight)


def test_per_name_does_not_depend_on_the_number_of_stages():
    def parameters(stages):
        split = ps.split(builder("llama"), stages=stages)
        placement = Placement(tuple(range(stages)), stages)
        made = [split.materialize(rank, placement, init="per_name", seed=SEED)[rank] for rank in range(stages)]
        return {name: parameter for module in made for name, parameter in module.named_parameters()}

    two, three = parameters(2), parameters(3)
    assert two.keys() == three.keys()
    assert all(torch.equal(two[name], three[name]) for name in two)


# What users call


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("offset", torch.full((4,), 0.5), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh() + self.offset
        return x


EXAMPLE = ((torch.ones(2, 4),), {})


def test_stages_of_a_callable_are_what_it_would_have_built():
    torch.manual_seed(SEED)
    split = ps.split(Layers, stages=2, example=EXAMPLE)
    torch.manual_seed(1)  # does not matter any more
    whole = seeded(Layers)
    placement = Placement((0, 1), 2)
    stages = split.stages(0, placement) | split.stages(1, placement)
    assert torch.equal(run_stages(stages, split.edges, *EXAMPLE), whole(*EXAMPLE[0]))
    again = split.stages(0, placement)[0]
    assert again.get_parameter("layers.0.weight") is stages[0].get_parameter("layers.0.weight")


def test_an_nn_sequential_is_made_real_in_parts():
    def build():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    split = ps.split(build, stages=2)
    expected = seeded(build).state_dict()
    for rank in range(2):
        for name, value in split.materialize(rank, Placement((0, 1), 2), seed=SEED)[rank].state_dict().items():
            assert torch.equal(value, expected[name])


def test_a_model_on_meta_needs_values():
    split = ps.split(on_meta(Layers), stages=2, example=EXAMPLE)
    with pytest.raises(SplitError, match=r"the model is on the meta device; .*split.materialize\(rank, placement"):
        split.stages()
    with pytest.raises(SplitError, match=r"pass a callable that builds the model"):
        split.materialize()
    with pytest.raises(SplitError, match=r"no module initialises offset"):
        split.materialize(init="per_name")


def test_a_function_gives_values():
    split = ps.split(Layers, stages=2, example=EXAMPLE)
    own = split.materialize(1, Placement((0, 1), 2), init=lambda name, tensor: tensor.fill_(len(name)))[1]
    assert own.get_parameter("layers.3.bias").tolist() == [13.0] * 4


def test_values_that_are_missing_are_listed():
    split = ps.split(Layers, stages=2, example=EXAMPLE)
    values = {"layers.0.weight": torch.ones(4, 4)}
    with pytest.raises(
        SplitError, match=r"the state_dict does not fit the model: it lacks layers.2.weight, layers.2.bias"
    ):
        split.materialize(1, Placement((0, 1), 2), state_dict=values)


def test_a_description_is_enough_for_another_rank():
    data = ps.split(Layers, stages=2, example=EXAMPLE).to_json()
    split = Split.from_json(Layers, data)
    own = split.materialize(1, Placement((0, 1), 2), seed=SEED)[1]
    assert torch.equal(own.get_parameter("layers.3.weight"), seeded(Layers).layers[3].weight)


def test_a_rank_outside_of_the_placement_is_refused():
    split = ps.split(Layers, stages=2, example=EXAMPLE)
    with pytest.raises(SplitError, match="the placement has 3 stages, but the model was split into 2"):
        split.materialize(0, Placement((0, 1, 2), 3))
    with pytest.raises(SplitError, match="need a placement"):
        split.materialize(0)


def test_a_missing_value_is_noticed_without_parameters(monkeypatch):
    """The self-check finds, on the meta device, that a stage reads what no edge brings."""

    class Skipping(Layers):
        def forward(self, x):
            first = self.layers[0](x)
            second = self.layers[1](first)
            return self.layers[3](self.layers[2](second) + first)

    found = split_module.find_flow

    def forgetful(*args):
        flow = found(*args)
        return flow._replace(edges=tuple(edge._replace(targets=edge.targets[:1]) for edge in flow.edges))

    layout = [["layers.0"], ["layers.1"], ["layers.2", "layers.3"]]
    assert [str(edge)[:5] for edge in ps.split(Skipping, layout=layout, example=EXAMPLE).edges] == ["0>1,2", "1>2 ("]
    monkeypatch.setattr(split_module, "find_flow", forgetful)
    for model in (Skipping, Skipping()):
        with pytest.raises(SplitError, match=r"a stage reads a value of 'layers.0' that was not found to be needed"):
            ps.split(model, layout=layout, example=EXAMPLE)


class ReadsMemoryInGlue(Layers):
    def forward(self, x):
        x = self.layers[0](x)
        number = ctypes.c_float.from_address(x.data_ptr()).value
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x * number


def test_a_wrong_output_is_noticed_without_parameters():
    for model in (ReadsMemoryInGlue(), ReadsMemoryInGlue):
        with pytest.raises(SplitError, match=r"the stages do not compute what the model does|a stage reads a value"):
            ps.split(model, stages=4, example=EXAMPLE)


def test_a_pipeline_of_a_callable_trains_like_the_whole_model():
    schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=4)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    torch.manual_seed(SEED)
    split = ps.split(Layers, stages=4, example=EXAMPLE)

    def train(transport):
        with Pipeline(split, schedule, loss_fn=nn.functional.mse_loss, transport=transport) as pipe:
            pipe.step(*([x] if pipe.has_first else []), target=y if pipe.has_last else None)
        stages = split.stages(transport.rank, schedule.placement)
        return {name: value.grad for module in stages.values() for name, value in module.named_parameters()}

    whole = seeded(Layers)
    nn.functional.mse_loss(whole(x), y).backward()
    first, second = run_in_threads(train, 2)
    assert len(first) == len(second) == 4
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close((first | second)[name], parameter.grad)


# Stages and what was materialized


def weight(stages, stage):
    return stages[stage].get_parameter(f"layers.{2 * stage}.weight")


@pytest.mark.parametrize("model", [Layers, Layers()], ids=["callable", "real"])
def test_stages_are_made_of_what_was_materialized(model):
    split, ranks = ps.split(model, stages=2, example=EXAMPLE), Placement((0, 1), 2)
    both = split.materialize(init="per_name", seed=3)
    assert weight(split.stages(1, ranks), 1) is weight(both, 1) is weight(split.stages(), 1)
    own = split.materialize(0, ranks, init="per_name", seed=4)
    assert weight(split.stages(0, ranks), 0) is weight(own, 0)
    for stages in (lambda: split.stages(1, ranks), split.stages):
        with pytest.raises(SplitError, match=r"no call of materialize made stages (0, )?1 together; .*for 0\. Pass"):
            stages()
    last = split.materialize(1, ranks, init="per_name", seed=4)
    assert weight(split.stages(1, ranks), 1) is weight(last, 1)
    with pytest.raises(SplitError, match=r"made stages 0, 1 together; there were calls for 0 and for 1\."):
        split.stages()


def test_what_stages_are_made_of_does_not_change_before_they_are_materialized():
    split, ranks = ps.split(Layers, stages=2, example=EXAMPLE), Placement((0, 1), 2)
    before = split.stages(0, ranks) | split.stages(1, ranks)
    assert weight(split.stages(0, ranks), 0) is weight(before, 0)
    assert torch.equal(weight(split.stages(), 1), weight(before, 1))
    split.materialize(0, ranks, seed=3)
    with pytest.raises(SplitError, match="made stages 1 together"):
        split.stages(1, ranks)


def test_each_rank_says_what_its_own_stages_come_from():
    split, schedule = ps.split(Layers, stages=2, example=EXAMPLE), ps.build("1F1B", ranks=2, microbatches=1)
    for rank in range(2):
        split.materialize(rank, schedule.placement, seed=rank)

    def build(transport):
        Pipeline(split, schedule, loss_fn=nn.functional.mse_loss, transport=transport).close()

    with pytest.warns(UserWarning, match=r"\(exact, seed 0; exact, seed 1\)"):
        run_in_threads(build, 2)
