import copy
import json

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

import penstock as ps
from models.in_turn import Tied, assert_complete, assert_equal
from penstock.errors import SplitError
from penstock.ir.placement import Placement
from penstock.models.split import Split

DOUBLE = torch.float64


def squares(output):
    return sum((one * one).mean() for one in tree_leaves(output))


def rows(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 2))


class ResidualMLP(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.start = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(layers)])
        self.end = nn.Linear(8, 2)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = x + block(x)
        return self.end(x)


class UNet(nn.Module):
    """Down, middle, up; every up block takes the output of a down block."""

    def __init__(self, depth=3, width=4):
        super().__init__()
        self.downs = nn.ModuleList([nn.Linear(width + n, width + n + 1) for n in range(depth)])
        self.middle = nn.Linear(width + depth, width + depth)
        self.ups = nn.ModuleList([nn.Linear(2 * (width + n + 1), width + n) for n in reversed(range(depth))])

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = torch.relu(down(x))
            skips.append(x)
        x = self.middle(x)
        for up in self.ups:
            x = up(torch.cat([x, skips.pop()], dim=-1))
        return x


class SeveralInputsAndOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 5)
        self.right = nn.Linear(3, 5)
        self.both = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.offset = nn.Parameter(torch.ones(5))

    def forward(self, x, other, *, scale, names=None):
        one, two = self.left(x), self.right(other["deep"][0])
        for layer in self.both:
            one, two = layer(one + two) * scale, one - self.offset
        return {"sum": one + two, "pair": (one, x.sum() * two)}


class RandomInGlue(nn.Module):
    """Two stages read what the parent's code has drawn once."""

    def __init__(self, *, mixed):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.mixed = mixed

    def forward(self, x):
        noise = torch.randn(4, dtype=x.dtype)
        x = self.first(x) * noise
        return self.third(x) + self.second(x) * (1 if self.mixed else noise)


MODELS = {
    "mlp": (mlp, ((rows(3, 4),), {})),
    "residual": (ResidualMLP, ((rows(3, 4),), {})),
    "unet": (UNet, ((rows(3, 4),), {})),
    "tied": (Tied, ((torch.arange(10).view(2, 5),), {})),
    "dropout": (lambda: Tied(dropout=0.3), ((torch.arange(10).view(2, 5),), {})),
    "several": (
        SeveralInputsAndOutputs,
        ((rows(3, 4), {"deep": [rows(3, 3)], "more": None}), {"scale": rows(3, 1, seed=2)}),
    ),
}


def make(name):
    torch.manual_seed(0)
    build, example = MODELS[name]
    return build().to(DOUBLE), example


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_model(name, stages):
    model, example = make(name)
    split = ps.split(model, stages=stages, example=example)
    assert len(split.layout) == stages
    assert_complete(split, model)
    args, kwargs = example
    longer = tree_map_only(torch.Tensor, lambda t: torch.cat([t, t.flip(0)]), (args, kwargs))
    assert_equal(split, model, [example, longer], squares)


def test_a_sequential_needs_no_example():
    model = mlp()
    split = ps.split(model, stages=3)
    assert split.layout == (("0", "1"), ("2", "3", "4"), ("5",))
    assert [edge[:2] for edge in split.edges] == [(0, (1,)), (1, (2,))]
    assert [name for stage in split.stages().values() for name in stage.state_dict()] == list(model.state_dict())
    assert_equal(split, model, [((torch.ones(2, 4),), {})], squares)


def test_other_models_need_one():
    with pytest.raises(SplitError, match=r"a ResidualMLP needs an example .* pass example="):
        ps.split(ResidualMLP(), stages=2)


def test_a_residual_stream_is_one_edge_per_cut():
    split = ps.split(ResidualMLP(6), stages=3, example=((torch.ones(1, 4),), {}))
    assert [str(edge) for edge in split.edges] == ["0>1 (input of blocks.2)", "1>2 (input of blocks.4)"]


def test_skips_go_straight_to_the_stage_that_needs_them():
    layout = [["downs.0"], ["downs.1"], ["downs.2", "middle", "ups.0"], ["ups.1"], ["ups.2"]]
    split = ps.split(UNet(), layout=layout, example=((torch.ones(2, 4),), {}))
    assert [edge[:2] for edge in split.edges] == [(0, (1, 4)), (1, (2, 3)), (2, (3,)), (3, (4,))]


def test_the_stages_of_a_rank():
    model, example = make("residual")
    split = ps.split(model, stages=4, example=example)
    placement = Placement.v(2, 4)
    assert list(split.stages(rank=0, placement=placement)) == [0, 3]
    assert list(split.stages(rank=1, placement=placement)) == [1, 2]
    with pytest.raises(SplitError, match="the placement has 2 stages, but the model was split into 4"):
        split.stages(rank=0, placement=Placement.loop(2, 2))
    with pytest.raises(SplitError, match=r"pass placement=schedule\.placement"):
        split.stages(rank=0)


def test_ties_by_identity_and_by_what_the_parent_reads():
    model, example = make("tied")
    split = ps.split(model, stages=2, example=example)
    assert [str(tie) for tie in split.ties] == [
        "scale of stage 0 = scale of stage 1",
        "embedding.weight of stage 0 = embedding.weight of stage 1",
    ]


def test_declared_ties_are_one_parameter():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    split = ps.split(model, stages=3, ties=[("0.weight", "2.weight")])
    assert [str(tie) for tie in split.ties] == ["0.weight of stage 0 = 2.weight of stage 2"]
    stages = split.stages()
    assert stages[0][0].weight is stages[2][0].weight
    assert model[0].weight is not model[2].weight  # the user's model is not changed


def test_a_module_called_twice_is_held_by_both_stages():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.middle, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.end(self.shared(self.middle(self.shared(x))))

    model, example = Twice().to(DOUBLE), ((rows(2, 4),), {})
    split = ps.split(model, layout=[["shared"], ["middle"], ["end"]], example=example)
    assert [str(tie) for tie in split.ties] == [
        "shared.weight of stage 0 = shared.weight of stage 1",
        "shared.bias of stage 0 = shared.bias of stage 1",
    ]
    assert_equal(split, model, [example], squares)


def test_a_unit_can_be_opened():
    model, example = make("residual")
    layout = [["start", "blocks.0.0"], ["blocks.0.1", "blocks.0.2"], [f"blocks.{n}" for n in range(1, 6)] + ["end"]]
    split = ps.split(model, layout=layout, example=example)
    assert split.layout[0] == ("start", "blocks.0.0")
    assert_equal(split, model, [example], squares)


def test_the_description_is_plain_data():
    for name in MODELS:
        model, example = make(name)
        split = ps.split(model, stages=3, example=example)
        again = Split.from_json(model, json.loads(json.dumps(split.to_json())))
        assert (again.layout, again.edges, again.ties) == (split.layout, split.edges, split.ties)
        assert again.digest == split.digest
        assert_equal(again, model, [example], squares)
    assert ps.split(model, stages=2, example=example).digest != split.digest


def test_the_model_is_not_changed():
    model, example = make("dropout")
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    forwards = [module for module in model.modules() if "forward" in vars(module)]
    state = torch.random.get_rng_state()
    ps.split(model, stages=3, example=example)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    assert [module for module in model.modules() if "forward" in vars(module)] == forwards == []


def test_never_called_modules_are_placed_and_reported():
    class Spare(ResidualMLP):
        def __init__(self):
            super().__init__(2)
            self.spare = nn.Linear(2, 2)
            self.unused = nn.Parameter(torch.ones(1))

    model = Spare()
    split = ps.split(model, stages=2, example=((torch.ones(2, 4),), {}))
    assert_complete(split, model)
    assert split.description.uncalled == ("spare",)
    assert split.description.unread == ("unused",)
    assert "never called, placed with a neighbor:\n  spare" in split.describe()
    assert "never read, placed with a neighbor:\n  unused" in split.describe()


def test_keyword_arguments_that_only_the_last_stage_needs():
    model, example = make("tied")
    mask = torch.ones(1, dtype=DOUBLE)
    split = ps.split(model, stages=3, example=(example[0], {"mask": mask}))
    stages = split.stages()
    hidden = stages[0](*example[0])  # without the mask
    assert torch.equal(hidden, stages[0](*example[0], mask=mask * float("nan")))


def test_another_element_type_after_the_split():
    model, _ = make("residual")
    split = ps.split(model.float(), stages=3, example=((torch.ones(2, 4),), {}))
    stages = {stage: module.to(torch.bfloat16) for stage, module in split.stages().items()}
    hidden = stages[1](stages[0](torch.ones(5, 4, dtype=torch.bfloat16)))
    assert stages[2](hidden).dtype == torch.bfloat16


def test_draws_in_the_code_of_a_parent():
    layout = [["first"], ["second"], ["third"]]
    example = ((rows(2, 4),), {})
    split = ps.split(RandomInGlue(mixed=True).to(DOUBLE), layout=layout, example=example, check=False)
    assert [str(edge) for edge in split.edges] == ["0>1,2 (input of third)", "1>2 (second)"]
    with pytest.raises(SplitError, match="the forward of the model draws random numbers that stages 0, 2 need"):
        ps.split(RandomInGlue(mixed=False).to(DOUBLE), layout=layout, example=example)


def test_thirty_layers_are_distributed():
    for stages in (4, 7, 8):
        split = ps.split(ResidualMLP(30), stages=stages, example=((torch.ones(1, 4),), {}), check=False)
        counts = [sum(name.startswith("blocks") for name in names) for names in split.layout]
        assert sum(counts) == 30
        assert max(counts) - min(counts) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.complex128])
def test_parameters_without_elements(shape, dtype):
    model = mlp().double()
    model[2].extra = nn.Parameter(torch.empty(shape, dtype=dtype))
    model[0].phase = nn.Parameter(torch.ones(2, dtype=dtype))
    split = ps.split(model, stages=2, example=rows(2, 4))
    assert_complete(split, model)
    assert torch.equal(split.stages()[1](split.stages()[0](rows(2, 4))), model(rows(2, 4)))


def test_a_copy_of_a_stage_is_independent():
    model, example = make("tied")
    first, last = ps.split(model, stages=2, example=example).stages().values()
    twin = copy.deepcopy(first)
    hidden = first(*example[0])
    assert torch.equal(twin(*example[0]), hidden)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(first(*example[0]), hidden)
    assert not twin(*example[0]).any()
    assert torch.equal(copy.deepcopy(last)(hidden), last(hidden))


def test_the_layers_of_each_stage_can_be_counted():
    model = ResidualMLP().to(DOUBLE)
    example = ((rows(2, 4),), {})
    layers = [name for stage in ps.split(model, stages=8, example=example).layout for name in stage]
    made = ps.split(model, stages=[3, 1, 4], example=example)
    assert [len(stage) for stage in made.layout] == [3, 1, 4]
    assert [name for stage in made.layout for name in stage] == layers


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([3, 4], "stages=\\[3, 4\\] are 7 layers, but the model has 8: start, blocks.0, "),
        ([8, 0], "every stage needs at least one layer, but stages=\\[8, 0\\] gives stage 1 0"),
        ([4.0, 4], "gives stage 0 4.0"),
    ],
)
def test_wrong_counts_of_layers(sizes, message):
    with pytest.raises(SplitError, match=message):
        ps.split(ResidualMLP(), stages=sizes, example=((torch.ones(2, 4),), {}))


def test_counted_layers_and_costs_are_two_answers():
    with pytest.raises(SplitError, match="costs= has nothing to choose"):
        ps.split(ResidualMLP(), stages=[4, 4], costs=[1] * 8, example=((torch.ones(2, 4),), {}))
