"""Scenarios that train or evaluate: what a training loop does with a schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pipelining.parity.models import (
    WIDTH,
    Counting,
    Deferring,
    Direct,
    Forked,
    Frozen,
    Layer,
    Pair,
    Plain,
    Random,
    Scaled,
    Shared,
    Unused,
)
from pipelining.parity.setting import FORWARD_ONLY, Setting, scenario


def _trained(setting: Setting, kind: Any = Layer, *, none_is_zero: bool = False) -> dict[str, Any]:
    """One step of a kind of model, compared with the unsplit one."""
    modules = setting.use(kind)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    found = setting.step(schedule)
    setting.expect_step(found)
    setting.expect_gradients(modules, none_is_zero=none_is_zero)
    return found | {"gradients": setting.gradients(modules)}


@scenario
def targets(setting: Setting) -> Any:
    """A step with targets and losses."""
    return _trained(setting)


@scenario
def plain_layers(setting: Setting) -> Any:
    """The same with other layers."""
    return _trained(setting, Plain)


@scenario
def two_tensors(setting: Setting) -> Any:
    """Two tensors on every edge."""
    return _trained(setting, Pair)


@scenario
def none_gradients(setting: Setting) -> Any:
    """A tensor on every edge that gets no gradient, and one that cannot have any."""
    return _trained(setting, Unused, none_is_zero=True)


@scenario
def frozen_stages(setting: Setting) -> Any:
    """The first stages are not trained."""
    return _trained(setting, Frozen)


@scenario
def shared_and_idle_weights(setting: Setting) -> Any:
    """A weight that is used twice in a stage, and one that is never used."""
    return _trained(setting, Shared)


@scenario
def forward(setting: Setting) -> Any:
    """Forwards without a loss, with gradients on and off."""
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    found = [setting.step(schedule) for _ in range(2)]
    with torch.no_grad():
        found.append(setting.step(schedule))
    for each in found:
        setting.expect_step(each, backward=False)
    return [{"output": None if each["output"] is None else each["output"].detach()} for each in found]


@scenario
def without_loss(setting: Setting) -> Any:
    """A schedule that has no loss function only goes forward."""
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules), loss_fn=None)
    output = schedule.step(*setting.first(setting.batch[0]))
    if setting.has_last:
        setting.expect("output", output.detach(), setting.whole(setting.batch[0]).detach())
    return {"output": output, "gradients": setting.gradients(modules)}


@scenario
def kwargs(setting: Setting) -> Any:
    """Keyword arguments on every rank: one is split, one is not."""
    scale = torch.linspace(0.5, 1.5, setting.rows, dtype=torch.float64).unsqueeze(1)
    modules = setting.use(Scaled, scale=scale[: setting.rows // setting.microbatches], power=0.5)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    found = setting.step(schedule, scale=scale, power=0.5)
    setting.expect_step(found, named={"scale": scale, "power": 0.5})
    setting.expect_gradients(modules)
    return found | {"gradients": setting.gradients(modules)}


@scenario
def kwargs_with_gradients(setting: Setting) -> Any:
    """A keyword argument that wants a gradient itself, on every rank."""
    scale = torch.linspace(0.5, 1.5, setting.rows, dtype=torch.float64).unsqueeze(1).requires_grad_()
    modules = setting.use(Scaled, scale=scale[: setting.rows // setting.microbatches].detach())
    schedule = setting.schedule(setting.pipeline_stages(modules))
    found = setting.step(schedule, scale=scale)
    setting.expect_step(found, named={"scale": scale.detach()})
    setting.expect_gradients(modules)
    setting.expect("gradient of the argument", scale.grad, _of_argument(setting, scale.detach()))
    return found | {"gradients": setting.gradients(modules), "of the argument": scale.grad}


def _of_argument(setting: Setting, scale: torch.Tensor) -> torch.Tensor:
    """The gradient of an argument of this rank: that of the sum of the losses, since only weights are scaled."""
    mine = scale.clone().requires_grad_()
    y, target = setting.batch
    for index, stage in enumerate(setting.whole.stages):
        y = stage(y, scale=mine if index in setting.mine else scale)
    (functional.mse_loss(y, target) * setting.microbatches).backward()
    return mine.grad


@scenario
def iterations(setting: Setting) -> Any:
    """Several steps with an optimizer."""
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    optimizer = torch.optim.SGD(torch.nn.ModuleList(modules.values()).parameters(), lr=0.1)
    beside = torch.optim.SGD(setting.whole.parameters(), lr=0.1)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        beside.zero_grad()
        found.append(setting.step(schedule))
        setting.expect_step(found[-1])
        setting.expect_gradients(modules)
        optimizer.step()
        beside.step()
    return {"steps": found, "gradients": setting.gradients(modules)}


@scenario
def gradients_add_up(setting: Setting) -> Any:
    """Two steps without zero_grad, for a loss that is a sum."""
    modules = setting.use(Layer)
    loss_fn = torch.nn.MSELoss(reduction="sum")
    schedule = setting.schedule(setting.pipeline_stages(modules), loss_fn=loss_fn, scale_grads=False)
    found = [setting.step(schedule) for _ in range(2)]
    for each in found:
        setting.expect_step(each, loss_fn=loss_fn, scale_grads=False)
    setting.expect_gradients(modules)
    return {"steps": found, "gradients": setting.gradients(modules)}


@scenario
def scaled_gradients_add_up(setting: Setting) -> Any:
    """Two steps without zero_grad, for a loss that is a mean."""
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    found = [setting.step(schedule) for _ in range(2)]
    for each in found:
        setting.expect_step(each)
    setting.expect_gradients(modules)
    return {"steps": found, "gradients": setting.gradients(modules)}


@scenario
def eval_then_train(setting: Setting) -> Any:
    """Evaluate, train, evaluate."""
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    before = setting.step(schedule, function="eval")
    setting.expect_step(before, backward=False)
    found = setting.step(schedule)
    setting.expect_step(found)
    setting.expect_gradients(modules)
    gradients = setting.gradients(modules)
    after = setting.step(schedule, function="eval")
    setting.expect_step(after, backward=False)
    return {"before": _only(before), "step": found, "after": _only(after), "gradients": gradients}


@scenario
def eval_leaves_gradients(setting: Setting) -> Any:
    """Gradients that are there stay as they are in an evaluation."""
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    setting.expect_step(setting.step(schedule))
    setting.step(schedule, function="eval")
    setting.expect_gradients(modules)
    return setting.gradients(modules)


@scenario
def train_then_eval(setting: Setting) -> Any:
    """Train, evaluate twice, train again."""
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    found = []
    for function in ("step", "eval", "eval", "step"):
        if function == "step":
            setting.whole.zero_grad()
            _forget(modules)
        found.append(setting.step(schedule, function=function))
        setting.expect_step(found[-1], backward=function == "step")
    setting.expect_gradients(modules)
    return {"steps": [_only(each) for each in found], "gradients": setting.gradients(modules)}


@scenario
def without_gradients(setting: Setting) -> Any:
    """Evaluate under no_grad and under inference_mode, then train; a step under no_grad is refused."""
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    found = []
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found.append(setting.step(schedule, function="eval"))
            setting.expect_step(found[-1], backward=False)
    found.append(setting.step(schedule))
    setting.expect_step(found[-1])
    setting.expect_gradients(modules)
    with torch.no_grad():
        refused = setting.attempt(lambda: setting.step(schedule)) if setting.case.schedule != FORWARD_ONLY else None
    return {"steps": [_only(each) for each in found], "refused": refused}


def _forget(modules: dict[int, Any]) -> None:
    """The gradients."""
    for module in modules.values():
        module.zero_grad()


def _only(found: dict[str, Any]) -> dict[str, Any]:
    """Values without history: what is left of it after an evaluation is nobody's business."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), found)


@scenario
def dw_builder(setting: Setting) -> Any:
    """Stages that make their weight gradients themselves."""
    modules = setting.use(Direct)
    modules = setting.modules(Deferring)
    builders = {index: module.dw_builder for index, module in modules.items()}
    schedule = setting.schedule(setting.pipeline_stages(modules, dw_builder=builders))
    # Metadata is inferred with a backward of its own, which leaves something in the lists: not of this step.
    found = []
    for _ in range(2):
        setting.whole.zero_grad()
        for module in modules.values():
            module.zero_grad()
            module.left.clear()
        found.append(setting.step(schedule))
        setting.expect_step(found[-1])
    counts = {index: (module.builds, module.runs) for index, module in modules.items()}
    setting.expect_gradients(modules)
    return {"steps": found, "gradients": setting.gradients(modules), "counts": counts}


@scenario
def return_outputs_off(setting: Setting) -> Any:
    """Nothing is returned, nothing is kept."""
    modules = setting.use(Layer)
    stages = setting.pipeline_stages(modules)
    schedule = setting.schedule(stages)
    found = setting.step(schedule, return_outputs=False)
    kept = {stage.stage_index: len(stage.output_chunks) for stage in stages}
    setting.expect("output", found["output"], None)
    _forget(modules)
    found_again = setting.step(schedule)
    return {"off": found, "on": found_again, "kept": kept, "gradients": setting.gradients(modules)}


@scenario
def sum_of_losses(setting: Setting) -> Any:
    """A loss that is a sum: gradients are not scaled."""
    modules = setting.use(Layer)
    loss_fn = torch.nn.MSELoss(reduction="sum")
    schedule = setting.schedule(setting.pipeline_stages(modules), loss_fn=loss_fn, scale_grads=False)
    found = setting.step(schedule)
    setting.expect_step(found, loss_fn=loss_fn, scale_grads=False)
    setting.expect_gradients(modules)
    return found | {"gradients": setting.gradients(modules)}


@scenario
def loss_kwargs(setting: Setting) -> Any:
    """Keyword arguments of the loss function."""
    modules = setting.use(Layer)

    def loss_fn(output: torch.Tensor, target: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        return weight * functional.mse_loss(output, target)

    schedule = setting.schedule(setting.pipeline_stages(modules), loss_fn=loss_fn)
    found = setting.step(schedule, loss_kwargs={"weight": 3.0})
    setting.expect_step(found, loss_fn=lambda output, target: loss_fn(output, target, 3.0))
    setting.expect_gradients(modules)
    _forget(modules)
    again = setting.step(schedule)
    return {"with": found, "without": again, "gradients": setting.gradients(modules)}


@scenario
def input_with_gradient(setting: Setting) -> Any:
    """The batch itself wants a gradient."""
    modules = setting.use(Plain)
    x, target = setting.batch
    x = x.clone().requires_grad_()
    schedule = setting.schedule(setting.pipeline_stages(modules))
    found = setting.step(schedule, batch=(x, target))
    other = x.detach().clone().requires_grad_()
    setting.expect_step(found, batch=(other, target))
    setting.expect_gradients(modules)
    if 0 in setting.mine:
        scale = 1 if x.grad is None else setting.microbatches
        setting.expect("gradient of the input", x.grad, None if other.grad is None else other.grad * scale)
    return found | {"gradients": setting.gradients(modules), "of the input": x.grad}


@scenario
def uneven_microbatches(setting: Setting) -> Any:
    """A batch that cannot be split evenly: the first microbatches have a row more."""
    setting.rows += setting.microbatches // 2  # before the batch is made
    modules = setting.use(Layer)
    loss_fn = torch.nn.MSELoss(reduction="sum")
    schedule = setting.schedule(setting.pipeline_stages(modules), loss_fn=loss_fn, scale_grads=False)
    found = setting.step(schedule)
    setting.expect_step(found, loss_fn=loss_fn, scale_grads=False)
    setting.expect_gradients(modules)
    return found | {"gradients": setting.gradients(modules)}


@scenario
def tuple_of_outputs(setting: Setting) -> Any:
    """The last stage returns a tuple, which goes to the loss as it is and is merged by a spec."""
    modules = setting.use(Forked)
    spec = setting.pp.microbatch.TensorChunkSpec
    schedule = setting.schedule(
        setting.pipeline_stages(modules),
        loss_fn=lambda output, target: functional.mse_loss(output[0] * output[1], target),
        output_merge_spec=(spec(0), spec(1)),
    )
    found = setting.step(schedule)
    if setting.has_last:
        first, second = setting.whole(setting.batch[0])
        wanted = (first, torch.cat(torch.tensor_split(second, setting.microbatches), 1))
        setting.expect("output", tuple(each.detach() for each in found["output"]), tuple(e.detach() for e in wanted))
    return found | {"gradients": setting.gradients(modules)}


@scenario
def merged_along_columns(setting: Setting) -> Any:
    """Outputs that are merged along another dimension."""
    modules = setting.use(Layer)
    spec = setting.pp.microbatch.TensorChunkSpec(1)
    schedule = setting.schedule(setting.pipeline_stages(modules), output_merge_spec=spec)
    found = setting.step(schedule)
    if setting.has_last:
        parts = torch.tensor_split(setting.whole(setting.batch[0]), setting.microbatches)
        setting.expect("output", found["output"].detach(), torch.cat(parts, 1).detach())
    return found


@scenario
def chunk_specs(setting: Setting) -> Any:
    """Arguments that are split along another dimension, or not at all; single-stage schedules take specs for them."""
    modules = setting.use(Scaled, scale=torch.ones(1, WIDTH, dtype=torch.float64) * 2)
    x, target = setting.batch
    scale = torch.full((1, WIDTH * setting.microbatches), 2.0, dtype=torch.float64)
    pp = setting.pp
    named: dict[str, Any] = {
        "args_chunk_spec": (pp.microbatch.TensorChunkSpec(1),),
        "kwargs_chunk_spec": pp.microbatch.TensorChunkSpec.from_dict({"scale": 1}),
    }
    stages = setting.pipeline_stages(modules)
    schedule = setting.schedule(stages, kind=pp.schedules.ScheduleGPipe, **named)
    columns = torch.cat(torch.tensor_split(x, setting.microbatches), 1)
    found = setting.step(schedule, batch=(columns, target), scale=scale)
    setting.expect_step(found, named={"scale": scale[:, :WIDTH]})
    setting.expect_gradients(modules)
    return found | {"gradients": setting.gradients(modules)}


@scenario
def random_numbers(setting: Setting) -> Any:
    """Random numbers in the stages are drawn in the same order, and none by the schedule."""
    modules = setting.modules(Random)
    setting.use(Layer)  # whose shapes are the same, for static metadata
    schedule = setting.schedule(setting.pipeline_stages(modules))
    found = []
    for _ in range(2):
        _forget(modules)
        found.append(setting.step(schedule))
    return {"steps": found, "gradients": setting.gradients(modules), "next": torch.rand(3)}


@scenario
def buffers(setting: Setting) -> Any:
    """Running statistics have seen every microbatch once."""
    modules = setting.use(Counting)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    setting.step(schedule)
    counts = {index: module.norm.num_batches_tracked.item() for index, module in modules.items()}
    setting.expect("forwards", counts, dict.fromkeys(counts, setting.microbatches))
    return counts


@scenario
def state_after_a_step(setting: Setting) -> Any:
    """What programs read of stages and schedule."""
    modules = setting.use(Layer)
    stages = setting.pipeline_stages(modules)
    schedule = setting.schedule(stages)
    before = [_state(setting, stage) for stage in stages]
    setting.step(schedule)
    after = [_state(setting, stage) for stage in stages]
    mapping = dict(stages[0].stage_index_to_group_rank)
    return {"before": before, "after": after, "mapping": mapping, "name": type(schedule).__name__}


@scenario
def orders(setting: Setting) -> Any:
    """The order of all ranks, without and with communication."""
    schedule = setting.schedule(setting.pipeline_stages(setting.use(Layer)))
    return {name: _text(getattr(schedule, name, None)) for name in ("pipeline_order", "pipeline_order_with_comms")}


def _state(setting: Setting, stage: Any) -> dict[str, Any]:
    names = ("stage_index", "num_stages", "group_rank", "group_size", "is_first", "is_last", "has_backward")
    return {name: getattr(stage, name) for name in names} | {
        "outputs": len(stage.output_chunks),
        "cached": sorted(stage.fwd_cache) if setting.case.schedule not in (FORWARD_ONLY,) else None,
    }


def _text(rows: Any) -> Any:
    if rows is None:
        return None
    return {rank: [None if action is None else str(action) for action in row] for rank, row in rows.items()}


@scenario
def deferred_receives(setting: Setting) -> Any:
    """Receives as late as possible."""
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules), defer_pp_recv=True)
    found = setting.step(schedule)
    setting.expect_step(found)
    setting.expect_gradients(modules)
    order = _text(schedule.pipeline_order_with_comms)
    return found | {"gradients": setting.gradients(modules), "order": order}


@scenario
def microbatches_already_split(setting: Setting) -> Any:
    """Lists of microbatches in place of a batch."""
    modules = setting.use(Scaled, scale=torch.ones(1, 1, dtype=torch.float64))
    schedule = setting.schedule(setting.pipeline_stages(modules))
    x, target = setting.batch
    scale = torch.linspace(0.5, 1.5, setting.rows, dtype=torch.float64).unsqueeze(1)
    count = setting.microbatches
    named: dict[str, Any] = {"kwarg_mbs": [{"scale": part} for part in scale.tensor_split(count)]}
    if 0 in setting.mine:
        named["arg_mbs"] = [(part,) for part in x.tensor_split(count)]
    losses: list[Any] = []
    if setting.has_last and setting.case.schedule != FORWARD_ONLY:
        named |= {"target_mbs": list(target.tensor_split(count)), "losses": losses}
    found = {"output": schedule.step(**named), "losses": list(losses)}
    setting.expect_step(found, named={"scale": scale})
    setting.expect_gradients(modules)
    evaluated = {"output": schedule.eval(**named), "losses": list(losses)}
    setting.expect_step(evaluated, named={"scale": scale}, backward=False)
    return found
