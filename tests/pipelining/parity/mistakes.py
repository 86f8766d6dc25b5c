"""Mistakes, and the types of the errors that they get. Each ends where it is made, so that no rank waits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipelining.parity.models import WIDTH, Scaled
from pipelining.parity.setting import Setting, scenario

X = torch.ones(8, WIDTH, dtype=torch.float64)


class _Failing(nn.Module):
    """Raises in its forward, but not the first time."""

    def __init__(self, after: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.left = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.left:
            raise KeyError("reported by the module")
        self.left -= 1
        return self.linear(x)


class _Naming(nn.Module):
    """Returns something that cannot be sent."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"x": x}


class _Broken:
    """A single rank: every stage is on it, nothing is sent."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.pp = setting.pp
        self.schedules = setting.pp.schedules

    def stage(self, module: Any = None, index: int = 0, stages: int = 1, **named: Any) -> Any:
        device = torch.device("cpu")
        return self.pp.PipelineStage(
            module or nn.Linear(WIDTH, WIDTH).double(), index, stages, device, group=self.setting.group, **named
        )

    def gpipe(self, module: Any = None, microbatches: int = 2, stage: Any = None, **named: Any) -> Any:
        named = {"loss_fn": functional.mse_loss, **named}
        return self.pp.ScheduleGPipe(stage or self.stage(module), microbatches, **named)

    def looped(
        self, name: str = "Interleaved1F1B", stages: int = 2, microbatches: int = 2, module: Any = None, **named: Any
    ) -> Any:
        kind = self.schedules.get_schedule_class(name)
        made = [self.stage(module, index=index, stages=stages) for index in range(stages)]
        return kind(made, microbatches, loss_fn=functional.mse_loss, **named)

    def runtime(self, rows: dict[int, list[str | None]], *, form: str = "compute_only", microbatches: int = 1) -> Any:
        made = [self.stage(index=index, stages=2) for index in range(2)]
        schedule = self.schedules._PipelineScheduleRuntime(made, microbatches, loss_fn=functional.mse_loss)
        schedule._prepare_schedule_with_comms(self.actions(rows), format=form)
        return schedule

    def actions(self, rows: dict[int, list[str | None]]) -> dict[int, list[Any]]:
        read = self.schedules._Action.from_str
        return {rank: [None if cell is None else read(cell) for cell in row] for rank, row in rows.items()}

    def validated(self, rows: dict[int, list[str | None]], ranks: int = 1, stages: int = 2, count: int = 1) -> Any:
        return self.schedules._validate_schedule(self.actions(rows), ranks, stages, count)

    def read(self, text: str, form: str = "compute_only") -> Any:
        made = [self.stage(index=index, stages=2) for index in range(2)]
        schedule = self.schedules._PipelineScheduleRuntime(made, 1, loss_fn=functional.mse_loss)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "it.csv"
            path.write_text(text)
            schedule._load_csv(str(path), format=form)
        return schedule


@scenario
def mistakes_of_sizes(setting: Setting) -> Any:
    """Numbers that do not go together, when stages and schedules are made."""
    b = _Broken(setting)
    stages = b.stage
    return _attempts(
        setting,
        stage_out_of_range=lambda: stages(index=3, stages=2),
        too_few_microbatches=lambda: b.pp.Schedule1F1B(stages(index=0, stages=4), 2, loss_fn=functional.mse_loss),
        interleaved_not_a_multiple=lambda: _four_ranks(b, "Interleaved1F1B", 2, 9, 4),
        zero_bubble_not_a_multiple=lambda: _four_ranks(b, "InterleavedZeroBubble", 2, 9, 4),
        looped_any_number=lambda: _four_ranks(b, "LoopedBFS", 2, 9, 4),
        v_with_three_stages=lambda: b.looped("ZBVZeroBubble", stages=3),
        dual_with_one_stage=lambda: b.looped("DualPipeV", stages=1),
        dual_with_few_microbatches=lambda: b.looped("DualPipeV", stages=2, microbatches=1),
        unknown_schedule=lambda: b.schedules.get_schedule_class("Interleaved2F1B"),
        schedule_by_any_case=lambda: b.schedules.get_schedule_class("interleavedzerobubble").__name__,
        unknown_argument=lambda: b.looped("LoopedBFS", no_such_argument=1),
        argument_of_another_class=lambda: b.looped("Interleaved1F1B", args_chunk_spec=3, no_such_argument=1),
    )


def _four_ranks(b: _Broken, name: str, local: int, microbatches: int, ranks: int) -> str:
    """A schedule of stand-in stages: only counted, never run."""

    class Counted:
        submod, group, group_rank, group_size, num_stages = None, None, 0, ranks, ranks * local

    return type(b.schedules.get_schedule_class(name)([Counted() for _ in range(local)], microbatches)).__name__


@scenario
def mistakes_of_groups(setting: Setting) -> Any:
    """More ranks than stages."""
    b = _Broken(setting)
    return _attempts(setting, more_ranks_than_stages=lambda: b.stage(stages=1))


@scenario
def mistakes_of_calls(setting: Setting) -> Any:
    """Wrong arguments of step and eval."""
    b = _Broken(setting)
    forward = b.schedules._ScheduleForwardOnly

    def under_no_grad(schedule: Any) -> Any:
        with torch.no_grad():
            return schedule.step(X, target=X)

    return _attempts(
        setting,
        no_gradients=lambda: under_no_grad(b.gpipe()),
        no_gradients_many=lambda: under_no_grad(b.looped()),
        target_of_forward_only=lambda: forward(b.stage(), 2).step(X, target=X),
        losses_of_forward_only=lambda: forward(b.stage(), 2).step(X, losses=[]),
        losses_not_a_list=lambda: b.gpipe().step(X, target=X, losses=()),
        too_few_rows=lambda: b.gpipe(microbatches=4).step(X[:3], target=X[:3]),
        too_few_targets=lambda: b.gpipe(microbatches=4).step(X, target=X[:3]),
        no_target=lambda: b.gpipe().step(X),
        no_target_many=lambda: b.looped().step(X),
        no_target_static=lambda: b.gpipe(stage=b.stage(input_args=X[:4], output_args=X[:4])).step(X),
        no_target_in_eval=lambda: b.gpipe().eval(X),
        no_input=lambda: b.gpipe().step(target=X),
        too_many_inputs=lambda: b.gpipe().step(X, X, target=X),
        too_many_inputs_static=lambda: b.gpipe(stage=b.stage(input_args=X[:4], output_args=X[:4])).step(X, X, target=X),
        unknown_keyword=lambda: b.gpipe().step(X, target=X, nothing=3),
        wrong_width=lambda: b.gpipe().step(X[:, :2], target=X),
        wrong_target_width=lambda: b.gpipe(loss_fn=lambda y, t: (y - t).square().mean()).step(X, target=X[:, :3]),
        loss_that_raises=lambda: b.gpipe(loss_fn=lambda y, t: {}["reported by the loss"]).step(X, target=X),
        module_that_raises=lambda: b.gpipe(_Failing()).step(X, target=X),
        module_that_raises_at_once=lambda: b.gpipe(_Failing(0)).step(X, target=X),
        module_that_names=lambda: b.looped(module=_Naming()).step(X, target=X),
        keyword_spec_missing=lambda: b.gpipe(Scaled(0, 1).double(), kwargs_chunk_spec={}).step(X, target=X, power=2.0),
        arguments_spec_too_short=lambda: b.gpipe(args_chunk_spec=()).step(X, target=X),
        microbatches_not_a_list=lambda: b.gpipe()._step_microbatches(((X,), (X,)), target_mbs=[X, X]),
        microbatches_too_few=lambda: b.gpipe()._step_microbatches([(X,)], target_mbs=[X, X]),
        keywords_too_few=lambda: b.gpipe()._step_microbatches([(X,), (X,)], [{}], [X, X]),
        targets_too_few=lambda: b.gpipe()._step_microbatches([(X,), (X,)], target_mbs=[X]),
        runtime_without_schedule=lambda: b.schedules._PipelineScheduleRuntime(
            [b.stage()], 2, loss_fn=functional.mse_loss
        ).step(X, target=X),
    )


@scenario
def mistakes_of_stages(setting: Setting) -> Any:
    """Stages that are driven by hand, in a wrong way."""
    b = _Broken(setting)

    def prepared(**named: Any) -> Any:
        stage = b.stage(**named)
        stage.has_backward = True
        return stage

    def validating() -> Any:
        stage = b.stage(input_args=X[:2], output_args=X[:2])
        stage._runtime_validate = True
        return b.gpipe(stage=stage).step(X, target=X)

    def validating_outputs() -> Any:
        stages = [b.stage(index=index, stages=2, input_args=X[:4], output_args=X[:2]) for index in range(2)]
        stages[0]._runtime_validate = True
        kind = b.schedules.ScheduleInterleaved1F1B
        return kind(stages, 2, loss_fn=functional.mse_loss).step(X, target=X)

    def given(sample: torch.Tensor) -> list[str]:
        """What is given for the inputs alone is compared with what is inferred."""
        with setting.warnings_of() as reported:
            b.gpipe(stage=b.stage(input_args=sample)).step(X, target=X)
        return sorted(set(reported))

    return _attempts(
        setting,
        given_shape=lambda: given(X),
        given_type=lambda: given(X[:4].float()),
        given_strides=lambda: given(X[:4].t().contiguous().t()),
        given_gradient=lambda: given(X[:4].clone().requires_grad_()),
        given_right=lambda: given(X[:4]),
        weight_before_input=lambda: prepared().backward_weight_one_chunk(0),
        chunk_before_chunks=lambda: prepared().backward_one_chunk(0),
        backward_of_nothing=lambda: b.stage().backward_one_chunk(0),
        local_gradient_of_the_first=lambda: prepared().get_local_bwd_output(0),
        local_gradient_without_backward=lambda: b.stage(index=1, stages=2).get_local_bwd_output(0),
        local_gradient_not_a_tuple=lambda: prepared(stages=2).set_local_bwd_input(X, 0),
        local_gradient_of_the_last=lambda: prepared().set_local_bwd_input((X,), 0),
        input_is_validated=validating,
        output_is_validated=validating_outputs,
        static_input_not_a_tensor=lambda: b.stage(input_args="X"),
        static_tuple_not_of_tensors=lambda: b.stage(input_args=(X, 3)),
        infra_before_a_mode=lambda: b.stage()._prepare_forward_infra(2, (X,)),
    )


@scenario
def mistakes_of_schedules(setting: Setting) -> Any:
    """Orders that cannot be run, files that cannot be read."""
    b = _Broken(setting)
    good = ["0F0", "1F0", "1B0", "0B0"]
    kinds = b.schedules._ComputationType
    return _attempts(
        setting,
        good=lambda: b.validated({0: good}),
        good_in_halves=lambda: b.validated({0: ["0F0", "1F0", "1I0", "0I0", None, "1W0", "0W0"]}),
        backward_before_forward=lambda: b.validated({0: ["0F0", "1B0", "1F0", "0B0"]}),
        input_before_forward=lambda: b.validated({0: ["0F0", "1I0", "1F0", "1W0", "0B0"]}),
        weight_before_input=lambda: b.validated({0: ["0F0", "1F0", "1W0", "1I0", "0B0"]}),
        weight_missing=lambda: b.validated({0: ["0F0", "1F0", "1I0", "0B0"]}),
        backward_missing=lambda: b.validated({0: ["0F0", "1F0", "1B0"]}),
        forward_missing=lambda: b.validated({0: good}, count=2),
        stage_on_two_ranks=lambda: b.validated({0: good, 1: good}, ranks=2),
        too_few_ranks=lambda: b.validated({0: good}, ranks=2),
        other_ranks=lambda: b.validated({1: good}),
        not_an_action=lambda: b.schedules._validate_schedule({0: ["0F0"]}, 1, 1, 1),
        unknown_stage=lambda: b.validated({0: [*good, "2F0"]}),
        communication_in_compute=lambda: b.runtime({0: ["0F0", "0SEND_F0", "1RECV_F0", "1F0", "1B0", "0B0"]}),
        idle_in_communication=lambda: b.runtime({0: [*good, None]}, form="compute_comms"),
        unknown_form=lambda: b.runtime({0: good}, form="no_such_form"),
        unknown_form_of_a_file=lambda: b.read("0F0,1F0,1B0,0B0\n", "no_such_form"),
        garbage_in_a_file=lambda: b.read("0F0,1Q0,1B0,0B0\n"),
        incomplete_file=lambda: b.read("0F0,1F0,1B0\n"),
        missing_file=lambda: b.schedules._PipelineScheduleRuntime([b.stage()], 1)._load_csv("/no/such/file.csv"),
        form_of_the_plain_class=lambda: b.schedules.PipelineScheduleMulti([b.stage()], 1)._load_csv(
            "/no/such/file.csv", format="compute_comms"
        ),
        no_action=lambda: b.schedules._Action.from_str("Q3"),
        empty_action=lambda: b.schedules._Action.from_str(""),
        no_type=lambda: kinds.from_str("Q"),
        custom_send=lambda: b.looped().register_custom_function(kinds.SEND_F, lambda action, ctx: None),
        never_in_order=lambda: b.schedules._add_send_recv(
            b.actions({0: ["0B0", "0F0"], 1: ["1F0", "1B0"]}), stage_to_rank=lambda stage: stage, num_stages=2
        ),
        receive_for_nothing=lambda: b.schedules._defer_recv_ops(b.actions({0: ["0RECV_B0"]}), lambda stage: stage),
        not_progressing=lambda: b.schedules._simulate_comms_compute(
            b.actions({0: ["0F0", "0SEND_F0"], 1: ["1F0"]}), lambda stage: stage, 2
        ),
        loss_out_of_range=lambda: _lossless(b),
    )


def _lossless(b: _Broken) -> Any:
    schedule = b.gpipe()
    schedule._internal_losses.append(X.sum())
    return schedule._maybe_get_loss(schedule._stage, 3)


@scenario
def mistakes_of_microbatches(setting: Setting) -> Any:
    """Values that cannot be split or merged."""
    m = setting.pp.microbatch
    return _attempts(
        setting,
        merge_of_other_structure=lambda: m.merge_chunks([(X, X), (X, X)], (m.TensorChunkSpec(0),)),
        merge_of_unequal=lambda: m.merge_chunks([(X, 1), (X, 2)], (m.TensorChunkSpec(0), None)),
        replicate_by_spec=lambda: [
            len(each[0]) for each in m.split_args_kwargs_into_chunks((X, 3), {}, 2, (m._Replicate(), m._Replicate()))[0]
        ],
        spec_of_a_number=lambda: m.split_args_kwargs_into_chunks((3,), {}, 2, (m.TensorChunkSpec(0),)),
        spec_that_is_none=lambda: m.split_args_kwargs_into_chunks((X,), {}, 2, (None,)),
        fewer_rows_than_chunks=lambda: m.split_args_kwargs_into_chunks((X[:1],), {}, 2),
        no_such_dimension=lambda: m.split_args_kwargs_into_chunks((X,), {}, 2, (m.TensorChunkSpec(4),)),
    )


def _attempts(setting: Setting, **named: Any) -> dict[str, Any]:
    """The result or the error of each, by name; of results only what is plain."""
    found = {}
    for name, function in named.items():
        torch.manual_seed(3)
        result = setting.attempt(function)
        plain = isinstance(result, int | str | list | dict | torch.Tensor) or type(result).__name__ == "Raised"
        found[name] = result if plain else None
    return found
