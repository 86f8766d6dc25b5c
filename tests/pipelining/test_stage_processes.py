"""Our stages on two ranks, driven by torch's own schedules: gradients are those of the unsplit model."""

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules

import penstock.pipelining.stage as our_stage
from penstock.pipelining._utils import generate_stage_to_rank_mapping
from pipelining.driving import known_to_torch
from runtime.models import KINDS, Model

CPU = torch.device("cpu")
MICROBATCHES = 4
STYLES = {
    "GPipe": (1, "loop"),
    "1F1B": (1, "loop"),
    "Interleaved1F1B": (2, "loop"),
    "InterleavedZeroBubble": (2, "loop"),
    "ZBVZeroBubble": (2, "v"),
    "DualPipeV": (2, "v"),
}
# A dict on an edge, and one graph of the user's behind all microbatches, are beyond what torch's schedules take.
KINDS_HERE = [kind for kind in KINDS if kind not in ("nested", "language", "input behind", "keywords behind")]


def cut(rank: int, ranks: int, name: str, model: Model, group: Any, **options: Any) -> Any:
    """A schedule of torch with our stages."""
    per_rank, style = STYLES[name]
    places = generate_stage_to_rank_mapping(ranks, per_rank * ranks, style)
    made = [
        our_stage.PipelineStage(model.modules[index], index, len(places), CPU, group=group)
        for index, place in places.items()
        if place == rank
    ]
    made_by = torch_schedules.get_schedule_class(name)
    return made_by(made[0] if per_rank == 1 else made, MICROBATCHES, loss_fn=model.loss_fn, **options), made


def expected_of(model: Model, step: int, ranks: int, places: dict[int, int]) -> tuple[Any, torch.Tensor, Any]:
    """Output, loss and gradients of the unsplit model, and of what else needs one."""
    modules, batch = copy.deepcopy(model.modules), model.batch(step)
    value: Any = batch.args
    for index, module in enumerate(modules):
        value = module(*(value if isinstance(value, tuple) else (value,)), **batch.kwargs(places[index]))
    loss = model.loss_fn(value, batch.target)
    if loss.requires_grad:
        loss.backward()
    gradients = [[p.grad for p in module.parameters()] for module in modules]
    return value, loss.detach(), (gradients, {name: leaf.grad for name, leaf in batch.leaves.items()})


def specs(model: Model) -> dict[str, Any]:
    if "kwargs_spec" not in model.options:
        return {}
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    return {"kwargs_chunk_spec": {"shift": TensorChunkSpec(0), "scale": _Replicate, "power": _Replicate}}


@contextmanager
def in_float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def train(rank: int, ranks: int, name: str, kind: str, *, group: Any) -> None:
    with in_float64(), known_to_torch():
        compare(rank, ranks, name, kind, group)


def compare(rank: int, ranks: int, name: str, kind: str, group: Any) -> None:
    torch.manual_seed(7)
    per_rank, style = STYLES[name]
    stages = per_rank * ranks
    places = generate_stage_to_rank_mapping(ranks, stages, style)
    model = KINDS[kind](stages, 2 * MICROBATCHES)
    scaled = {"scale_grads": False} if "sum" in str(model.options) else {}
    schedule, mine = cut(rank, ranks, name, model, group, **specs(model), **scaled)
    for step in range(2):
        for module in model.modules:
            module.zero_grad()
        output, loss, (gradients, leaves) = expected_of(model, step, ranks, places)
        batch, losses = model.batch(step), []
        args = batch.args if 0 in [stage.stage_index for stage in mine] else ()
        last = any(stage.is_last for stage in mine)
        ending = {"target": batch.target, "losses": losses} if last else {}
        found = schedule.step(*args, **ending, **batch.kwargs(rank))
        if last:
            torch.testing.assert_close(found, output.detach() if isinstance(output, torch.Tensor) else output)
            total = sum(losses) if scaled else sum(losses) / MICROBATCHES
            torch.testing.assert_close(total.detach(), loss)
        for key, leaf in batch.leaves.items():
            factor = 1 if scaled else MICROBATCHES  # only gradients of parameters are scaled
            if key != "x" or args:
                torch.testing.assert_close(leaf.grad / factor, leaves[key], msg=key)
        for stage in mine:
            got = [p.grad for p in stage.submod.parameters()]
            for one, other in zip(got, gradients[stage.stage_index], strict=True):
                assert (one is None) == (other is None) or not other.any(), (stage, one, other)
                if other is not None and one is not None:
                    torch.testing.assert_close(one, other)
            assert not stage.fwd_cache
            assert not stage.backward_state
            assert all(info.buffer is None for infos in stage.args_recv_info.values() for info in infos)
            assert all(info.buffer is None for infos in stage.grad_recv_info.values() for info in infos)


@pytest.mark.parametrize("name", STYLES)
def test_gradients_are_those_of_the_unsplit_model(workers, name):
    workers.run(train, name, "plain", ranks=2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS_HERE if kind != "plain"])
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble", "InterleavedZeroBubble"])
def test_all_sorts_of_stages(workers, name, kind):
    workers.run(train, name, kind, ranks=2)
