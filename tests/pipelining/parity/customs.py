"""Scenarios of those who go further: functions of their own, schedules of their own, stages of their own."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pipelining.parity.models import Layer
from pipelining.parity.setting import Setting, scenario

ZOO = Path(__file__).parents[2] / "fixtures" / "zoo"


def _result(setting: Setting, schedule: Any, modules: dict[int, Any], steps: int = 2) -> dict[str, Any]:
    """Some steps, each compared with the unsplit model."""
    found = []
    for _ in range(steps):
        setting.whole.zero_grad()
        for module in modules.values():
            module.zero_grad()
        found.append(setting.step(schedule))
        setting.expect_step(found[-1])
        setting.expect_gradients(modules)
    return {"steps": found, "gradients": setting.gradients(modules)}


# Functions ------------------------------------------------------------------------------------------------------------


class Hand:
    """What a rank does for an action, written as trainers write it: with the parts of schedule and stage."""

    def __init__(self, setting: Setting) -> None:
        self.schedules = setting.pp.schedules
        self.calls: list[str] = []

    def parts(self, action: Any, ctx: Any) -> tuple[Any, dict[int, Any], Any]:
        schedule = ctx.schedule_ref
        stages = {stage.stage_index: stage for stage in schedule._stages}
        return schedule, stages, stages[action.stage_index]

    def forward(self, action: Any, ctx: Any) -> None:
        self.calls.append(str(action))
        schedule, stages, stage = self.parts(action, ctx)
        index, microbatch = action.stage_index, action.microbatch_index
        if not stage.is_first and index - 1 not in stages:
            self.schedules._wait_batch_p2p(schedule.fwd_recv_ops.pop((index, microbatch)))
        output = stage.forward_one_chunk(microbatch, ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch])
        schedule._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
        if index + 1 in stages:
            stages[index + 1].set_local_fwd_input(output, microbatch)

    def backward(self, action: Any, ctx: Any, *, full: bool = True) -> None:
        self.calls.append(str(action))
        schedule, stages, stage = self.parts(action, ctx)
        index, microbatch = action.stage_index, action.microbatch_index
        if not stage.is_last and index + 1 not in stages:
            self.schedules._wait_batch_p2p(schedule.bwd_recv_ops.pop((index, microbatch)))
        loss = schedule._maybe_get_loss(stage, microbatch)
        last = False
        if full:
            schedule.backward_counter[index] += 1
            last = schedule.backward_counter[index] == schedule._n_microbatches
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=full, last_backward=last)
        if index - 1 in stages:
            stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

    def backward_input(self, action: Any, ctx: Any) -> None:
        self.backward(action, ctx, full=False)

    def backward_weight(self, action: Any, ctx: Any) -> None:
        self.calls.append(str(action))
        schedule, _, stage = self.parts(action, ctx)
        schedule.backward_counter[action.stage_index] += 1
        last = schedule.backward_counter[action.stage_index] == schedule._n_microbatches
        stage.backward_weight_one_chunk(action.microbatch_index, last_backward=last)

    def overlap(self, action: Any, ctx: Any) -> None:
        """The forward and the backward of an overlap, one after the other."""
        self.calls.append(str(action))
        for part in action.sub_actions:
            kind = part.computation_type
            if kind == self.schedules.FORWARD:
                self.forward(part, ctx)
            elif kind == self.schedules.FULL_BACKWARD:
                self.backward(part, ctx)
            else:
                self.backward_input(part, ctx)

    def reduce(self, action: Any, ctx: Any) -> None:
        self.calls.append(str(action))
        schedule, _, stage = self.parts(action, ctx)
        stage.perform_reduce_grad(schedule._n_microbatches if schedule.scale_grads else 1)


def _by_hand(setting: Setting, register: Callable[[Any, Hand, Any], None]) -> dict[str, Any]:
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    hand = Hand(setting)
    register(schedule, hand, setting.pp.schedules)
    return _result(setting, schedule, modules) | {"calls": hand.calls}


@scenario
def custom_forward(setting: Setting) -> Any:
    """Forwards by a function of the user's."""
    return _by_hand(setting, lambda schedule, hand, s: schedule.register_custom_function(s.FORWARD, hand.forward))


@scenario
def custom_backward(setting: Setting) -> Any:
    """Backwards, whole and in halves, by functions of the user's."""

    def register(schedule: Any, hand: Hand, schedules: Any) -> None:
        schedule.register_custom_function(schedules.FULL_BACKWARD, hand.backward)
        schedule.register_custom_function(schedules.BACKWARD_INPUT, hand.backward_input)
        schedule.register_custom_function(schedules.BACKWARD_WEIGHT, hand.backward_weight)

    return _by_hand(setting, register)


@scenario
def custom_overlap(setting: Setting) -> Any:
    """What overlaps, by a function of the user's that does all of it."""
    return _by_hand(setting, lambda schedule, hand, s: schedule.register_custom_function(s.OVERLAP_F_B, hand.overlap))


@scenario
def custom_everything(setting: Setting) -> Any:
    """Nothing is left to the schedule but sending and receiving."""

    def register(schedule: Any, hand: Hand, schedules: Any) -> None:
        schedule.register_custom_function(schedules.FORWARD, hand.forward)
        schedule.register_custom_function(schedules.FULL_BACKWARD, hand.backward)
        schedule.register_custom_function(schedules.BACKWARD_INPUT, hand.backward_input)
        schedule.register_custom_function(schedules.BACKWARD_WEIGHT, hand.backward_weight)
        schedule.register_custom_function(schedules.OVERLAP_F_B, hand.overlap)
        schedule.register_custom_function(schedules.REDUCE_GRAD, hand.reduce)
        for kind in (schedules.UNSHARD, schedules.RESHARD):
            schedule.register_custom_function(kind, lambda action, ctx: hand.calls.append(str(action)))

    return _by_hand(setting, register)


@scenario
def custom_context(setting: Setting) -> Any:
    """What a function of the user's finds in its context."""
    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules))
    seen: list[Any] = []

    def look(action: Any, ctx: Any) -> None:
        stage = next(stage for stage in ctx.schedule_ref._stages if stage.stage_index == action.stage_index)
        targets = None if ctx.target_mbs is None else [len(part) for part in ctx.target_mbs]
        rows = [[len(value) for value in values] for values in ctx.arg_mbs]
        seen.append(
            (str(action), rows, ctx.kwarg_mbs, targets, type(ctx.losses).__name__, ctx.schedule_ref is schedule)
        )
        stage.perform_reduce_grad(setting.microbatches)

    schedule.register_custom_function(setting.pp.schedules.REDUCE_GRAD, look)
    return _result(setting, schedule, modules) | {"seen": seen}


# Files ----------------------------------------------------------------------------------------------------------------


def _through_a_file(setting: Setting, form: str) -> Any:
    """A schedule that is written, read by the runtime class, and run."""
    modules = setting.use(Layer)
    stages = setting.pipeline_stages(modules)
    runtime = setting.pp.schedules._PipelineScheduleRuntime
    written = setting.schedule(stages)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "schedule.csv")
        written._dump_csv(path, format=form)
        text = Path(path).read_text()
        schedule = setting.schedule(stages, kind=runtime)
        schedule._load_csv(path, format=form)
        again = str(Path(folder) / "again.csv")
        schedule._dump_csv(again)
        lowered = Path(again).read_text()
    return _result(setting, schedule, modules) | {"text": text, "lowered": lowered}


@scenario
def csv_of_compute(setting: Setting) -> Any:
    """A file without communication."""
    return _through_a_file(setting, "compute_only")


@scenario
def csv_with_communication(setting: Setting) -> Any:
    """A file with communication."""
    return _through_a_file(setting, "compute_comms")


@scenario
def csv_by_hand(setting: Setting) -> Any:
    """A file that nobody has generated: 2 ranks, 4 stages in a V, weight gradients at the end."""
    setting.stages, setting.microbatches = 4, 2
    setting.rows = 4
    lines = [
        "0F0,0F1,,3F0,3I0,3F1,3I1,,0I0,3W0,0W0,0I1,3W1,0W1",
        ",1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1,",
    ]
    mine = [[0, 3], [1, 2]][setting.rank]
    return _in_the_runtime(setting, mine, lines)


def _in_the_runtime(setting: Setting, mine: list[int], lines: list[str]) -> Any:
    setting.use(Layer)
    modules = setting.modules(Layer, mine)
    stages = setting.pipeline_stages(modules)
    schedule = setting.schedule(stages, kind=setting.pp.schedules._PipelineScheduleRuntime)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text("\n".join(lines) + "\n")
        schedule._load_csv(str(path))
    return _placed(setting, schedule, modules)


def _placed(setting: Setting, schedule: Any, modules: dict[int, Any]) -> dict[str, Any]:
    """Run with stages that are not where a loop or a V has them."""
    placed = _Placed(setting, sorted(modules))
    result = _result(placed, schedule, modules)
    setting.problems += placed.problems
    return result | {"mapping": dict(schedule.stage_index_to_group_rank)}


class _Placed(Setting):
    """The same setting with other stages on this rank."""

    def __init__(self, setting: Setting, mine: list[int]) -> None:
        super().__init__(setting.pp, setting.case, setting.rank, setting.group, setting.microbatches, setting.rows)
        self.whole, self.stages, self._mine = setting.whole, setting.stages, mine

    @property
    def mine(self) -> list[int]:
        return self._mine


# Classes --------------------------------------------------------------------------------------------------------------


def _zoo(name: str) -> dict[int, list[str]]:
    """The rows of a schedule in the zoo, as text; a dot is an idle step."""
    lines = [line for line in (ZOO / f"{name}.txt").read_text().splitlines() if line.startswith("rank")]
    return {rank: line.split(":")[1].split() for rank, line in enumerate(lines)}


def _actions(schedules: Any, cells: Iterable[str]) -> list[Any]:
    return [None if cell == "." else schedules._Action.from_str(cell) for cell in cells]


def _of_class(setting: Setting, name: str, kind: Any, stages: int, microbatches: int) -> Any:
    rows = _zoo(name)
    setting.stages, setting.microbatches, setting.rows = stages, microbatches, 2 * microbatches
    mine = sorted({int(cell[0]) for cell in rows[setting.rank] if cell != "."})
    setting.use(Layer)
    modules = setting.modules(Layer, mine)
    schedule = setting.schedule(setting.pipeline_stages(modules), kind=kind)
    return _placed(setting, schedule, modules)


def _filling(setting: Setting, name: str) -> Any:
    """A class that fills ``pipeline_order`` in its constructor."""
    schedules = setting.pp.schedules
    rows = _zoo(name)

    class Mine(schedules.PipelineScheduleMulti):
        def __init__(self, stages: list[Any], n_microbatches: int, loss_fn: Any = None) -> None:
            super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn)
            self.use_full_backward = False
            self.pipeline_order = {rank: _actions(schedules, row) for rank, row in rows.items()}
            self._validate_and_set_stage_mapping(self.pipeline_order)

    return Mine


def _lowering(setting: Setting, name: str) -> Any:
    """A class that has the runtime lower what it fills in."""
    schedules = setting.pp.schedules
    rows = _zoo(name)

    class Mine(schedules._PipelineScheduleRuntime):
        def __init__(self, stages: list[Any], n_microbatches: int, loss_fn: Any = None) -> None:
            super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn)
            self.pipeline_order = {rank: _actions(schedules, row) for rank, row in rows.items()}
            self._prepare_schedule_with_comms(self.pipeline_order)

    return Mine


def _lowered(setting: Setting, name: str) -> Any:
    """A class that says itself what is sent and received when."""
    schedules = setting.pp.schedules
    rows = _zoo(name)

    class Mine(schedules._PipelineScheduleRuntime):
        def __init__(self, stages: list[Any], n_microbatches: int, loss_fn: Any = None) -> None:
            super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=False)
            self.pipeline_order_with_comms = {rank: _actions(schedules, row) for rank, row in rows.items()}

    return Mine


@scenario
def zoo_v_shaped(setting: Setting) -> Any:
    """Neighbouring stages on one rank."""
    return _of_class(setting, "v_shaped", _filling(setting, "v_shaped"), 4, 1)


@scenario
def zoo_unbalanced(setting: Setting) -> Any:
    """More stages on one rank than on the other."""
    return _of_class(setting, "unbalanced", _filling(setting, "unbalanced"), 5, 1)


@scenario
def zoo_with_w(setting: Setting) -> Any:
    """Input and weight gradients apart."""
    return _of_class(setting, "with_w", _filling(setting, "with_w"), 4, 2)


@scenario
def zoo_v_shaped_lowered(setting: Setting) -> Any:
    """The V in the runtime class."""
    return _of_class(setting, "v_shaped", _lowering(setting, "v_shaped"), 4, 1)


@scenario
def zoo_unbalanced_lowered(setting: Setting) -> Any:
    """The unbalanced one in the runtime class."""
    return _of_class(setting, "unbalanced", _lowering(setting, "unbalanced"), 5, 1)


@scenario
def zoo_with_w_lowered(setting: Setting) -> Any:
    """Gradients apart, in the runtime class."""
    return _of_class(setting, "with_w", _lowering(setting, "with_w"), 4, 2)


@scenario
def zoo_reordered_b(setting: Setting) -> Any:
    """Communication as written; there is no REDUCE_GRAD in it, so nothing is scaled."""
    rows = _zoo("reordered_b")
    assert setting.rank in rows
    setting.stages, setting.microbatches, setting.rows = 2, 2, 4
    modules = setting.use(Layer)
    modules = setting.modules(Layer, [setting.rank])
    schedule = setting.schedule(setting.pipeline_stages(modules), kind=_lowered(setting, "reordered_b"))
    placed = _Placed(setting, [setting.rank])
    found = placed.step(schedule)
    placed.expect_step(found, scale_grads=False)
    placed.expect_gradients(modules)
    setting.problems += placed.problems
    return found | {"gradients": setting.gradients(modules)}


@scenario
def own_step(setting: Setting) -> Any:
    """A schedule of one stage a rank that says itself what a step is."""
    schedules = setting.pp.schedules

    class Mine(schedules.PipelineScheduleSingle):
        def _step_microbatches(
            self,
            arg_mbs: Any = None,
            kwarg_mbs: Any = None,
            target_mbs: Any = None,
            losses: Any = None,
            return_outputs: bool = True,
            loss_kwargs: Any = None,
        ) -> None:
            arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            first = None if target_mbs is None else target_mbs[0]
            self._initialize_stage(arg_mbs[0], kwarg_mbs[0], first, loss_kwargs)
            stage, count = self._stage, self._n_microbatches
            sent = []
            for each in range(count):
                for works in schedules._sorted_batch_p2p(stage.get_fwd_recv_ops(each)).values():
                    schedules._wait_batch_p2p(works)
                output = stage.forward_one_chunk(each, arg_mbs[each], kwarg_mbs[each], return_outputs)
                sent += schedules._sorted_batch_p2p(stage.get_fwd_send_ops(each)).values()
                self._maybe_compute_loss(stage, output, target_mbs, each, loss_kwargs)
            for each in reversed(range(count)):
                schedules._wait_batch_p2p(schedules._batch_p2p(stage.get_bwd_recv_ops(each)))
                stage.backward_one_chunk(each, loss=self._maybe_get_loss(stage, each), last_backward=each == 0)
                sent.append(schedules._batch_p2p(stage.get_bwd_send_ops(each)))
            for works in sent:
                schedules._wait_batch_p2p(works)
            self._update_losses(stage, losses)
            stage.perform_reduce_grad(count if self.scale_grads else 1)

    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules), kind=Mine)
    return _result(setting, schedule, modules)


@scenario
def own_stage(setting: Setting) -> Any:
    """A subclass of the stage that sees every call of the schedule, in order."""
    calls: list[Any] = []

    class Mine(setting.pp.PipelineStage):
        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            calls.append(("F", self.stage_index, fwd_chunk_id))
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            given = {name: kwargs[name] for name in sorted(kwargs) if name != "loss"}
            calls.append(("B", self.stage_index, bwd_chunk_id, given, kwargs.get("loss") is None))
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

        def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            calls.append(("W", self.stage_index, bwd_chunk_id, dict(sorted(kwargs.items()))))
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

        def perform_reduce_grad(self, grad_scale_factor: int) -> Any:
            calls.append(("REDUCE", self.stage_index, grad_scale_factor))
            return super().perform_reduce_grad(grad_scale_factor)

        def clear_runtime_states(self) -> None:
            calls.append(("CLEAR", self.stage_index))
            super().clear_runtime_states()

    modules = setting.use(Layer)
    schedule = setting.schedule(setting.pipeline_stages(modules, kind=Mine))
    return _result(setting, schedule, modules) | {"calls": calls, "kinds": sorted(Counter(c[0] for c in calls))}
