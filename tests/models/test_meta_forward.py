"""Forwards of models whose parameters are on the meta device."""

import pytest
import torch
from torch import nn

from models.families import FAMILIES, builder
from penstock.errors import SplitError
from penstock.models.construction import construct
from penstock.models.meta_forward import MetaForward


def inputs_of(family):
    if family == "vit":
        return {"pixel_values": torch.rand(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 90, (2, 6))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    return {**inputs, "output_router_logits": True} if family == "mixtral" else inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_families_run_with_buffers_only(family):
    build = builder(family)
    model = construct(build, lambda known: set(known.buffers), seed=0, per_name=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    inputs = inputs_of(family)
    expected = build()(**inputs)
    with MetaForward():
        outputs = model(**inputs)
    assert set(outputs) == set(expected)
    for name in ("loss", "logits"):
        assert outputs[name].shape == expected[name].shape
        assert outputs[name].dtype == expected[name].dtype
        assert outputs[name].requires_grad
        assert not outputs[name].is_meta
        assert bool(outputs[name].isfinite().all())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x, offset):
        y = self.first(x)
        y = y + offset
        y *= 1 + self.scale  # in place, on a real tensor, by a value that is only computed from parameters
        self.seen.copy_(y.detach().sum(0))
        return y, offset + 1


def run(x, offset):
    with torch.device("meta"):
        model = Model()
    with MetaForward():
        return model(x, offset)


def test_values_that_meet_no_parameter_are_computed():
    result, offset = run(torch.ones(2, 3), torch.tensor(2.5))
    assert offset == 3.5
    assert result.requires_grad


def test_numbers_depend_on_what_an_operator_is_given():
    ones, offset = torch.ones(2, 3), torch.tensor(2.5)
    result, _ = run(ones, offset)
    assert torch.equal(run(ones, offset)[0], result)
    assert float(result.detach().abs().max()) <= 0.5
    assert len(result.unique()) == result.numel()
    for x, other in ((ones * 2, offset), (ones.index_fill(0, torch.tensor(1), 0), offset), (ones, offset + 1)):
        assert not torch.isclose(run(x, other)[0], result).any()


def test_numbers_depend_on_the_parameter():
    with torch.device("meta"):
        first, second = nn.Linear(3, 4), nn.Linear(3, 4)
    x = torch.ones(2, 3)
    with MetaForward(), torch.no_grad():
        assert torch.equal(first(x), first(x))
        assert not torch.isclose(first(x), second(x)).any()


def test_nan_goes_through_parameters():
    result, _ = run(torch.full((2, 3), torch.nan), torch.tensor(0.0))
    assert bool(result.isnan().all())


def test_an_operator_that_needs_values_is_named():
    class Deciding(Model):
        def forward(self, x, offset):
            return super().forward(x, offset) if self.scale.sum() > 0 else x

    with torch.device("meta"):
        model = Deciding()
    with (
        MetaForward(),
        pytest.raises(SplitError, match=r"aten._local_scalar_dense.* needs the values of a parameter"),
    ):
        model(torch.ones(2, 3), torch.tensor(0.0))


def test_a_mistake_in_the_model_is_shown():
    with torch.device("meta"):
        model = Model()
    with MetaForward(), pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied|must have same"):
        model(torch.ones(2, 5), torch.tensor(0.0))


def test_what_comes_from_parameters_only_can_be_mixed_with_real_tensors():
    class Latents(nn.Module):
        def __init__(self):
            super().__init__()
            self.latents = nn.Parameter(torch.ones(1, 3, 4))
            self.project = nn.Linear(4, 4)

        def forward(self, x):
            query = self.project(self.latents).expand(len(x), -1, -1)
            query = query.clone().add_(self.latents)
            x = nn.functional.scaled_dot_product_attention(query, x, x)
            return nn.functional.scaled_dot_product_attention(self.latents.expand(len(x), -1, -1), x, x)

    with torch.device("meta"):
        model = Latents()
    with MetaForward():
        assert model(torch.ones(2, 5, 4)).shape == (2, 3, 4)


def test_a_large_weight_that_is_converted_is_the_same_every_time():
    with torch.device("meta"):
        model = nn.Linear(1100, 1000)
    x = torch.ones(1, 1100, dtype=torch.bfloat16)
    with MetaForward(), torch.no_grad():
        first, second = (nn.functional.linear(x, model.weight.to(torch.bfloat16)) for _ in range(2))
        assert torch.equal(first, second)
        assert first.any()
