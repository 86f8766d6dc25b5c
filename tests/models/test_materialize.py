"""Parts of a model are equal to those of the whole model, and nothing else takes memory."""

import gc
import threading

import numpy as np
import pytest
import torch
from torch import nn

from models.families import FAMILIES, builder
from penstock.errors import SplitError
from penstock.models.materialize import materialize, materialize_model

SEED = 7


class Inits(nn.Module):
    """All kinds of initialisation: in loops, by temporary tensors, from each other, by values, ties, buffers."""

    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]  # fails on the meta device
        self.first = nn.Linear(24, 24)
        self.second = nn.Linear(24, 24)
        self.raw = nn.Parameter(torch.randn(24, 24))
        self.copied = nn.Parameter(self.first.weight.detach().clone() * 2)
        self.norm = nn.BatchNorm1d(24)
        self.convolution = nn.Conv1d(2, 3, 3)
        self.attention = nn.MultiheadAttention(24, 2)
        self.register_buffer("table", torch.arange(24.0).cos(), persistent=False)
        self.register_buffer("noise", torch.rand(5))
        nn.init.trunc_normal_(self.first.weight, std=1.5)
        nn.init.trunc_normal_(self.attention.in_proj_weight, a=1, b=2)
        nn.init.orthogonal_(self.second.weight)
        nn.init.kaiming_normal_(self.raw)
        nn.init.sparse_(self.attention.out_proj.weight, 0.5)
        if self.second.weight[0, 0] > 0:
            self.first.bias.data.mul_(3)
        self.head = nn.Linear(24, 24)
        self.head.weight = self.first.weight


class Doubled(nn.Module):
    """A model that is converted after it was built."""

    def __new__(cls):
        return Inits().double()


def tensors_of(model):
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def whole(build, seed=SEED):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return tensors_of(build())


def assert_same(part, reference):
    assert part
    for name, tensor in part.items():
        assert torch.equal(tensor, reference[name]), name
        assert tensor.dtype == reference[name].dtype
        assert tensor.requires_grad == reference[name].requires_grad
        assert type(tensor) is type(reference[name])
        assert tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def parts(names, count):
    """Divide names in their order."""
    names = list(names)
    size = -(-len(names) // count)
    return [names[start : start + size] for start in range(0, len(names), size)]


@pytest.mark.parametrize("build", [Inits, Doubled])
def test_every_tensor_alone_is_that_of_the_whole_model(build):
    reference = whole(build)
    for name in reference:
        assert_same(materialize(build, [name], seed=SEED), reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_exact_in_parts(family):
    build = builder(family)
    reference = whole(build)
    for names in parts(reference, 3):
        part = materialize(build, names, seed=SEED)
        assert set(part) == set(names)
        assert_same(part, reference)


def test_a_converted_family_is_exact():
    def build():
        return builder("gemma2")().double()

    reference = whole(build)
    for names in parts(reference, 3):
        assert_same(materialize(build, names, seed=SEED), reference)


def test_generators_are_left_as_they_were():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    materialize(Inits, ["raw"], seed=SEED)
    materialize(Inits, ["raw"], seed=SEED, init="per_name")
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_do_not_disturb_each_other():
    reference = whole(Inits)
    made = {}
    threads = [
        threading.Thread(target=lambda name=name: made.update(materialize(Inits, [name], seed=SEED)))
        for name in ("raw", "first.weight", "second.weight", "noise")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert_same(made, reference)


def test_tied_names_give_one_tensor():
    part = materialize(Inits, ["first.weight", "head.weight"])
    assert part["first.weight"] is part["head.weight"]


# Memory

LAYERS, WIDTH = 24, 128


class Deep(nn.Module):
    """Many layers of the same size, initialised twice, as transformers does."""

    def __init__(self, observe=lambda: None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        for number, layer in enumerate(self.layers):
            if number % 8 == 5:
                observe()
            nn.init.trunc_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        observe()


def bytes_alive():
    """The memory of all tensors that exist."""
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and not found.is_meta:
            storage = found.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("init", ["exact", "per_name"])
@pytest.mark.parametrize("convert", [False, True])
def test_other_tensors_take_the_memory_of_a_few(init, convert):
    weight = 4 * WIDTH * WIDTH
    gc.collect()
    before = bytes_alive()
    peak = []

    def build():
        model = Deep(lambda: peak.append(bytes_alive() - before))
        model = model.double() if convert else model
        peak.append(bytes_alive() - before)
        return model

    names = ["layers.3.weight", "layers.3.bias"]
    model = materialize_model(build, names, init=init, seed=SEED)
    assert max(peak) <= 6 * weight  # of 24
    real = [name for name, tensor in tensors_of(model).items() if not tensor.is_meta]
    assert sorted(real) == sorted(names)
    assert sum(tensor.untyped_storage().nbytes() for tensor in model.parameters() if not tensor.is_meta) <= 3 * weight
    if init == "exact":
        assert_same({name: tensors_of(model)[name] for name in names}, whole(build))


class Unpredictable(nn.Module):
    def __init__(self):
        super().__init__()
        Unpredictable.built += 1
        self.weight = nn.Parameter(torch.zeros(Unpredictable.built))


def test_a_constructor_that_changes_is_refused():
    Unpredictable.built = 0
    with pytest.raises(SplitError, match="registers other parameters each time"):
        materialize(Unpredictable, ["weight"])


class OnMetaOtherwise(nn.Module):
    """Registers something else on the meta device."""

    def __init__(self):
        super().__init__()
        if torch.empty(0).is_meta:
            self.extra = nn.Linear(2, 2)
        self.own = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.other.weight = self.own.weight if not torch.empty(0).is_meta else self.other.weight


def test_a_constructor_that_differs_on_the_meta_device_runs_for_real():
    reference = whole(OnMetaOtherwise)
    for name in reference:
        assert_same(materialize(OnMetaOtherwise, [name], seed=SEED), reference)


class Reading(nn.Module):
    """Reads memory in ways that tensors do not see, and looks at every parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        values = [layer.weight.detach().numpy().sum() + sum(layer.bias.tolist()) for layer in self.layers]
        assert all(bool(layer.weight.isfinite().all()) for layer in self.layers)
        self.total = nn.Parameter(torch.full((2,), float(sum(values))))


def test_a_constructor_that_reads_everything_is_exact_nevertheless():
    reference = whole(Reading)
    for name in ("total", "layers.2.weight"):
        assert_same(materialize(Reading, [name], seed=SEED), reference)


# A generator per name


@pytest.mark.parametrize("build", [Inits, builder("gpt2"), builder("mixtral")])
def test_per_name_does_not_depend_on_the_other_names(build):
    reference = materialize(build, list(whole(build)), init="per_name", seed=SEED)
    for names in parts(reference, 4):
        assert_same(materialize(build, names, init="per_name", seed=SEED), reference)
    other = materialize(build, list(reference), init="per_name", seed=SEED + 1)
    assert any(not torch.equal(other[name], reference[name]) for name in reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_per_name_from_a_model_on_meta_has_the_distributions_of_the_constructor(family):
    reference = whole(builder(family))
    with torch.device("meta"):
        model = builder(family)()
    made = materialize(model, list(reference), init="per_name", seed=SEED)
    assert made.keys() == reference.keys()
    for name, tensor in made.items():
        if reference[name].unique().numel() < min(100, tensor.numel()) or not isinstance(tensor, nn.Parameter):
            assert torch.equal(tensor, reference[name]), name
        elif tensor.numel() > 500:
            assert 0.85 < tensor.std() / reference[name].std() < 1.15, name
            assert abs(tensor.mean() - reference[name].mean()) < 0.2 * reference[name].std(), name
    for names in parts(reference, 3):
        assert_same(materialize(model, names, init="per_name", seed=SEED), made)
    assert all(tensor.is_meta for tensor in tensors_of(model).values())


def test_per_name_keeps_the_distributions():
    build = builder("llama")
    part = materialize(build, list(whole(build)), init="per_name", seed=SEED)
    assert torch.equal(part["model.norm.weight"], torch.ones(32))
    assert 0.018 < part["model.embed_tokens.weight"].std() < 0.022
    weights = [tensor.flatten()[:8].tolist() for name, tensor in part.items() if "proj" in name]
    assert len({tuple(values) for values in weights}) == len(weights)


def test_per_name_of_a_real_model_leaves_it_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    before = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    part = materialize(model, ["0.weight", "1.running_mean"], init="per_name", seed=SEED)
    assert not torch.equal(part["0.weight"], before["0.weight"])
    assert part["1.running_mean"] is model[1].running_mean
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(model).items())


def test_a_tensor_that_no_module_initialises_is_refused_on_meta():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(2))

    with torch.device("meta"):
        model = Scaled()
    assert set(materialize(model, ["inner.weight"], init="per_name")) == {"inner.weight"}
    with pytest.raises(SplitError, match=r"no module initialises scale .*; pass a callable"):
        materialize(model, ["scale", "inner.weight"], init="per_name")
    assert torch.equal(materialize(Scaled, ["scale"], init="per_name")["scale"], torch.ones(2))


def test_an_initialisation_that_fails_on_meta_is_named():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def _init_weights(self, module):
            if module is self.inner and module.weight.sum().item() > 100:
                raise ValueError

    with torch.device("meta"):
        model = nn.ModuleDict({"a": Failing(), "b": Failing()})
    with pytest.raises(
        SplitError, match=r"b.inner cannot be initialised on the meta device \(.*\); pass a callable"
    ) as caught:
        materialize(model, ["a.inner.weight"], init="per_name")
    assert caught.value.unit == "b.inner"


# Functions and given values


def test_a_function_fills_parameters_only():
    def init(name, tensor):
        seen.append(name)
        tensor.fill_(len(name))

    for source in (builder("llama"), builder("llama")()):
        seen = []
        names = ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.rotary_emb.inv_freq"]
        part = materialize(source, names, init=init, seed=SEED)
        assert sorted(seen) == sorted(names[:2])
        assert bool((part["lm_head.weight"] == len("lm_head.weight")).all())
        assert torch.equal(part["model.rotary_emb.inv_freq"], whole(builder("llama"))["model.rotary_emb.inv_freq"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["callable", "meta", "real"])
def test_a_state_dict_gives_every_part(family, kind):
    build = builder(family)
    model = build()
    reference = tensors_of(model)
    values = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    if kind == "meta":
        with torch.device("meta"):
            source = build()
    else:
        source = build if kind == "callable" else build()
    for names in parts(reference, 3):
        part = materialize(source, names, state_dict=values)
        assert set(part) == set(names)
        assert_same(part, reference)


def test_only_what_is_needed_is_looked_up():
    class Lazy(dict):
        def __getitem__(self, name):
            looked_up.append(name)
            return super().__getitem__(name)

    looked_up = []
    model = builder("gpt2")()
    names = ["lm_head.weight", "transformer.h.1.ln_1.bias"]
    values = Lazy({name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"})
    part = materialize(builder("gpt2"), names, state_dict=values)
    assert sorted(looked_up) == ["transformer.h.1.ln_1.bias", "transformer.wte.weight"]
    assert torch.equal(part["lm_head.weight"], model.transformer.wte.weight)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"0.weight": torch.ones(2, 2)}, "it lacks 0.bias, 1.bias; its own names are 0.weight$"),
        (
            {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(2), "1.bias": torch.ones(5)},
            r"it has other shapes: 0.weight: \(3, 2\), expected \(2, 2\); 1.bias: \(5,\), expected \(2,\)",
        ),
        ({"0.weight": torch.ones(3, 2), "0.bias": torch.ones(2)}, "it lacks 1.bias; it has other shapes: 0.weight"),
    ],
)
def test_values_that_do_not_fit_are_listed(values, message):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(SplitError, match=f"the state_dict does not fit the model: {message}"):
        materialize(model, ["0.weight", "0.bias", "1.bias"], state_dict=values)


def test_values_that_are_no_tensors_are_refused():
    with pytest.raises(SplitError, match=r"other shapes: weight: a int, expected a tensor"):
        materialize(nn.Linear(2, 2), ["weight"], state_dict={"weight": 3})
    with pytest.raises(SplitError, match=r"state_dict= must have tensors by name, or be a path, got a int"):
        materialize(nn.Linear(2, 2), ["weight"], state_dict=3)


def test_seeds_of_any_integer_type_are_one_seed():
    for init in ("exact", "per_name"):
        parts = [materialize(Inits, ["raw"], init=init, seed=seed) for seed in (5, np.int64(5), torch.tensor(5))]
        assert torch.equal(parts[0]["raw"], parts[1]["raw"])
        assert torch.equal(parts[0]["raw"], parts[2]["raw"])
    with pytest.raises(SplitError, match=r"seed= must be an integer, .* got 'x'"):
        materialize(Inits, ["raw"], seed="x")
    with pytest.raises(SplitError, match=r"seed= must be an integer, .* got a tensor of shape \[\d+\]"):
        materialize(Inits, ["raw"], init="per_name", seed=torch.get_rng_state())


def test_values_are_converted_to_the_type_of_the_model():
    part = materialize(lambda: nn.Linear(2, 2).double(), ["weight"], state_dict={"weight": torch.ones(2, 2)})
    assert part["weight"].dtype == torch.float64


# Models and mistakes


def test_a_real_model_is_used_as_it_is():
    model = Inits()
    part = materialize(model, ["raw", "table"])
    assert part["raw"] is model.raw
    assert part["table"] is model.table


def test_exact_needs_the_constructor():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(SplitError, match=r"weight is on the meta device, .*pass a callable.*init='per_name'"):
        materialize(model, ["weight"])


def test_new_tensors_go_to_the_device():
    model = materialize_model(Inits, ["raw", "table"], device="meta")
    assert model.raw.is_meta
    assert isinstance(model.raw, nn.Parameter)


@pytest.mark.parametrize(
    ("source", "names", "options", "message"),
    [
        (Inits, ["rawr"], {}, r"has no parameter or buffer 'rawr'; did you mean 'raw'\?"),
        (Inits(), ["rawr", "zzz"], {}, r"has no parameter or buffer 'rawr', and 1 more; did you mean 'raw'\?"),
        (Inits, ["raw"], {"init": "exactly"}, "unknown init 'exactly'; use 'exact', 'per_name'"),
        ("Inits", ["raw"], {}, "split needs an nn.Module, or a function that returns one, got str"),
        (lambda: 3, ["raw"], {}, "split needs an nn.Module, or a function that returns one, got int"),
    ],
)
def test_mistakes_are_named(source, names, options, message):
    with pytest.raises(SplitError, match=message):
        materialize(source, names, **options)


def test_an_error_of_the_constructor_is_raised_as_it_is():
    def build():
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        materialize(build, ["raw"])
