"""``pipe.state_dict`` and ``pipe.load_state_dict``: the names of the unsplit model, whatever the layout."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.errors import CheckpointError
from penstock.runtime import Pipeline, run_in_threads
from runtime.checkpoints.runs import LAYOUTS, build, pipeline, train


def merged(states):
    """The state of all ranks."""
    whole = {"model": {}, "optimizer": {"state": {}, "param_groups": {}}}
    for state in states:
        whole["model"] |= state["model"]
        for part, found in whole["optimizer"].items():
            found |= state.get("optimizer", {}).get(part, {})
    return whole


def trained(layout, steps, state=None, until=None):
    """The losses of some steps, from a state if there is one; and the state after them, or after the first ones."""

    def worker(transport):
        with pipeline(LAYOUTS[layout], transport=transport) as (pipe, optimizer, scheduler):
            if state is not None:
                pipe.load_state_dict(state, optimizer=optimizer)
                scheduler.last_epoch = steps.start
            middle = steps.stop if until is None else until
            losses = train(pipe, optimizer, scheduler, range(steps.start, middle))
            found = copy.deepcopy(pipe.state_dict(optimizer))
            return losses + train(pipe, optimizer, scheduler, range(middle, steps.stop)), found

    found = run_in_threads(worker, LAYOUTS[layout].ranks, timeout=60)
    return [loss for losses, _ in found for loss in losses], merged(state for _, state in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_and_values_are_those_of_the_model_with_a_tie_once(layout):
    model = (torch.manual_seed(0), build())[1]
    _, state = trained(layout, range(0))
    expected = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert state["model"].keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state["model"].items())
    assert state["optimizer"]["state"] == {}
    assert state["optimizer"]["param_groups"].keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize(("first", "second"), [("4x1", "2x2"), ("2V", "1x1")])
def test_another_layout_goes_on_with_the_same_losses(first, second):
    losses, state = trained(first, range(5), until=3)
    resumed, _ = trained(second, range(3, 5), state)
    assert resumed == losses[3:]


def test_every_parameter_has_its_options_and_state():
    _, state = trained("2x1", range(3))
    name = "layers.0.inner.0.weight"
    options = dict(state["optimizer"]["param_groups"][name])
    assert options["lr"] == 0.05 * 0.7
    assert options["betas"] == (0.9, 0.999)
    assert options["state"] == (("step",), ("exp_avg",), ("exp_avg_sq",))
    held = state["optimizer"]["state"][name]
    assert held["step"] == 3
    assert held["exp_avg"].shape == state["model"][name].shape


def alone(modules, **options):
    """A pipeline of hand-made stages, all on one rank."""
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=2, stages_per_rank=len(modules))
    return Pipeline(dict(enumerate(modules)), schedule, loss_fn=mse_loss, **options)


def test_tensors_are_those_of_the_pipeline():
    first = nn.Linear(2, 2)
    state = alone([first]).state_dict()
    assert state["model"]["weight"].data_ptr() == first.weight.data_ptr()


def test_names_of_stages_come_first_where_local_names_clash():
    assert list(alone([nn.Linear(2, 2, bias=False), nn.Linear(2, 2)]).state_dict()["model"]) == [
        "stages.0.weight",
        "stages.1.weight",
        "stages.1.bias",
    ]
    apart = [nn.Sequential(), nn.Sequential()]
    for number, module in enumerate(apart):
        module.add_module(f"layer{number}", nn.Linear(2, 2, bias=False))
    assert list(alone(apart).state_dict()["model"]) == ["layer0.weight", "layer1.weight"]


def test_names_agree_between_ranks_though_only_some_clash():
    modules = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)]
    schedule = ps.build("1F1B", ranks=3, microbatches=3)

    def worker(transport):
        rank = transport.rank
        with Pipeline({rank: modules[rank]}, schedule, loss_fn=mse_loss, transport=transport) as pipe:
            return list(pipe.state_dict()["model"])

    assert run_in_threads(worker, 3, timeout=60)[1] == ["stages.1.0.weight", "stages.1.0.bias"]


def test_a_tie_of_hand_made_stages_has_the_name_of_its_first_member():
    stages = [nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2, bias=False))]
    pipe = alone(stages, ties=[ps.Tie(((0, "weight"), (1, "0.weight")))]) if equal(stages) else None
    assert list(pipe.state_dict()["model"]) == ["weight"]
    pipe.load_state_dict({"model": {"0.weight": torch.ones(2, 2)}})  # by its other name
    assert stages[0].weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def equal(stages):
    with torch.no_grad():
        stages[1][0].weight.copy_(stages[0].weight)
    return True


def test_the_state_dict_of_the_unsplit_model_is_loaded_by_its_names():
    model = (torch.manual_seed(5), build())[1]

    def worker(transport):
        with pipeline(LAYOUTS["2x1"], transport=transport) as (pipe, _, _):
            pipe.load_state_dict({"model": model.state_dict()})
            return pipe.state_dict()

    for name, value in merged(run_in_threads(worker, 2, timeout=60))["model"].items():
        assert torch.equal(value, model.state_dict()[name])


def test_what_is_wrong_is_named_and_nothing_changes():
    pipe = alone([nn.Linear(2, 3)])
    before = copy.deepcopy(pipe.state_dict())
    good = torch.ones(3, 2)
    for state, message in (
        ({"model": {"weihgt": good, "bias": torch.ones(3)}}, "the state has no 'weight'; did you mean weihgt?"),
        ({"model": {"weight": good}}, "the state has no 'bias'"),
        ({"model": {"weight": good.T, "bias": torch.ones(3)}}, r"weight has shape \[3, 2\] .* \[2, 3\] in the state"),
        ({"weight": good}, "the state has no 'model'; pass what"),
    ):
        with pytest.raises(CheckpointError, match=message):
            pipe.load_state_dict(state)
    assert all(torch.equal(value, before["model"][name]) for name, value in pipe.state_dict()["model"].items())


def test_two_values_for_one_parameter_are_refused():
    stages = [nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2, bias=False))]
    equal(stages)
    pipe = alone(stages, ties=[("weight", "0.weight")])
    with pytest.raises(CheckpointError, match="several values for weight, which is one parameter"):
        pipe.load_state_dict({"model": {"weight": torch.ones(2, 2), "0.weight": torch.zeros(2, 2)}})


# Optimizers -----------------------------------------------------------------------------------------------------------


def step(pipe, optimizer):
    optimizer.zero_grad()
    pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))
    optimizer.step()


def test_state_that_was_saved_and_is_not_there_is_an_error():
    """Such as that of an optimizer without steps, for which torch.distributed.checkpoint has read nothing."""
    pipe = alone([nn.Linear(2, 2)])
    optimizer = torch.optim.AdamW(pipe.parameters())
    step(pipe, optimizer)
    state = copy.deepcopy(pipe.state_dict(optimizer))
    del state["optimizer"]["state"]["weight"]
    fresh = torch.optim.AdamW(pipe.parameters())
    with pytest.raises(CheckpointError, match="the state step of weight was saved, but is not in the state dict"):
        pipe.load_state_dict(state, optimizer=fresh)
    assert not fresh.state


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
        lambda parameters: torch.optim.Rprop(parameters),
        lambda parameters: torch.optim.Adagrad(parameters),
        lambda parameters: torch.optim.Adafactor(parameters),
        lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1)),
    ],
    ids=["SGD", "NAdam", "Rprop", "Adagrad", "Adafactor", "lr as a tensor"],
)
def test_other_optimizers_go_on_as_well(make):
    def pipe_of():
        torch.manual_seed(0)
        return alone([nn.Linear(2, 2), nn.Linear(2, 2)])

    pipe = pipe_of()
    optimizer = make(pipe.parameters())
    for _ in range(3):
        step(pipe, optimizer)
    state = copy.deepcopy(pipe.state_dict(optimizer))
    step(pipe, optimizer)
    resumed = pipe_of()
    fresh = make(resumed.parameters())
    resumed.load_state_dict(state, optimizer=fresh)
    step(resumed, fresh)
    assert all(map(torch.equal, pipe.parameters(), resumed.parameters()))


def test_groups_are_kept_by_name_and_must_fit():
    pipe = alone([nn.Linear(2, 2)])
    weight, bias = pipe.parameters()
    optimizer = torch.optim.SGD([{"params": [weight], "weight_decay": 0.5}, {"params": [bias]}], lr=0.1)
    state = pipe.state_dict(optimizer)
    swapped = torch.optim.SGD([{"params": [bias]}, {"params": [weight]}], lr=0.3)
    pipe.load_state_dict(state, optimizer=swapped)
    assert [(group["weight_decay"], group["lr"]) for group in swapped.param_groups] == [(0, 0.1), (0.5, 0.1)]
    with pytest.raises(CheckpointError, match=r"weight and bias are in one .* weight_decay=0.5 and weight_decay=0"):
        pipe.load_state_dict(state, optimizer=torch.optim.SGD(pipe.parameters()))


def test_state_keeps_its_element_type():
    """Unlike what Optimizer.load_state_dict does with it."""
    pipe = alone([nn.Linear(2, 2).to(torch.bfloat16)])
    optimizer = torch.optim.SGD(pipe.parameters(), momentum=0.9)
    for parameter in pipe.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.rand(parameter.shape), "more": {"count": torch.ones(3)}}
    fresh = torch.optim.SGD(pipe.parameters(), momentum=0.9)
    pipe.load_state_dict(pipe.state_dict(optimizer), optimizer=fresh)
    for parameter in pipe.parameters():
        held, expected = fresh.state[parameter], optimizer.state[parameter]
        assert held["momentum_buffer"].dtype == torch.float32
        assert torch.equal(held["momentum_buffer"], expected["momentum_buffer"])
        assert held["momentum_buffer"] is not expected["momentum_buffer"]
        assert torch.equal(held["more"]["count"], torch.ones(3))


def test_two_optimizers_are_one_state():
    pipe = alone([nn.Linear(2, 2)])
    weight, bias = pipe.parameters()
    both = [torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([bias], lr=0.2)]
    for _ in range(2):
        pipe.step(torch.ones(2, 2), target=torch.zeros(2, 2))
        for optimizer in both:
            optimizer.step()
    state = pipe.state_dict(both)
    assert dict(state["optimizer"]["param_groups"]["bias"])["lr"] == 0.2
    fresh = [torch.optim.SGD([weight], lr=0.5), torch.optim.AdamW([bias], lr=0.5)]
    pipe.load_state_dict(state, optimizer=fresh)
    assert [optimizer.param_groups[0]["lr"] for optimizer in fresh] == [0.1, 0.2]
    assert fresh[1].state[bias]["step"] == 2


def test_optimizers_of_other_parameters_are_refused():
    pipe = alone([nn.Linear(2, 2)])
    with pytest.raises(CheckpointError, match=r"a parameter of shape \[5\] that is in no stage of this rank"):
        pipe.state_dict(torch.optim.SGD([nn.Parameter(torch.ones(5))]))
    optimizer = torch.optim.SGD(pipe.parameters())
    optimizer.state["count"] = 3
    with pytest.raises(CheckpointError, match="SGD keeps state for 'count'"):
        pipe.state_dict(optimizer)
    frozen = torch.optim.SGD([next(pipe.parameters())])
    with pytest.raises(CheckpointError, match="bias was in no optimizer when the checkpoint was saved"):
        pipe.load_state_dict(pipe.state_dict(frozen), optimizer=torch.optim.SGD(pipe.parameters()))


# Wrappers and extra state ---------------------------------------------------------------------------------------------


class Counting(nn.Linear):
    """A module with state that is no tensor."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_extra_state_is_included():
    stage = Counting(2, 2)
    pipe = alone([stage])
    stage.calls = 5
    state = copy.deepcopy(pipe.state_dict())
    assert state["model"]["_extra_state"] == {"calls": 5}
    stage.calls = 0
    pipe.load_state_dict(state)
    assert stage.calls == 5


def test_names_of_wrappers_are_left_out():
    wrapped = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    pipe = alone([wrapped])
    optimizer = torch.optim.SGD(pipe.parameters(), momentum=0.9)
    state = copy.deepcopy(pipe.state_dict(optimizer))
    assert list(state["model"]) == list(state["optimizer"]["param_groups"]) == ["0.weight", "0.bias"]
    state["model"]["0.bias"].fill_(7)
    pipe.load_state_dict(state, optimizer=optimizer)
    assert wrapped._orig_mod[0].bias.tolist() == [7, 7]
