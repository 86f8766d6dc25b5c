"""What one layout has saved, another one loads: its losses are those of the run that was not interrupted."""

from functools import cache

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.runtime.checkpoints.reading import CheckpointReader
from runtime.checkpoints.runs import LAYOUTS, Tied, batch, build, loss_fn, pipeline, train

pytestmark = pytest.mark.processes
STEPS, SAVED = 5, 3


@cache
def mesh(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("first", "second")[: len(sizes)])


def sharded_twice():
    """One rank of the pipeline, four shards."""
    return {"group": one_rank(), "wrap": lambda module: fully_shard(module, mesh=mesh(4))}


@cache
def one_rank():
    groups = [dist.new_group([rank]) for rank in range(4)]
    return groups[dist.get_rank()]


def sharded():
    """Two ranks of the pipeline, with two shards each."""
    here = mesh(2, 2)

    def wrap(module):
        for layer in module.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=here["first"])
        return fully_shard(module, mesh=here["first"])

    return {"group": here.get_group("second"), "wrap": wrap}


def sharded_and_replicated():
    return {"group": one_rank(), "wrap": lambda module: fully_shard(module, mesh=mesh(2, 2))}


def replicated():
    here = mesh(2, 2)
    group = here.get_group("first")
    return {
        "group": here.get_group("second"),
        "wrap": lambda module: DistributedDataParallel(module, process_group=group),
    }


#: Worlds of data parallelism: their layout, and what it takes. All replicas get the same data, so the average of their
#: gradients is the gradient of one, bit for bit.
WORLDS = {
    "2x1 fsdp 2": ("2x1", sharded),
    "2V fsdp 2": ("2V", sharded),
    "2x2 ddp 2": ("2x2", replicated),
    "1x4 fsdp 4": ("1x4", sharded_twice),
    "1x1 hsdp 2x2": ("1x1", sharded_and_replicated),
}


def options_of(world, group):
    return (LAYOUTS[world], {"group": group}) if world in LAYOUTS else (LAYOUTS[WORLDS[world][0]], WORLDS[world][1]())


def ranks_of(world):
    return LAYOUTS[world].ranks if world in LAYOUTS else 4


def save_and_go_on(rank, ranks, world, folder, *, group):
    layout, options = options_of(world, group)
    with pipeline(layout, **options) as (pipe, optimizer, scheduler):
        train(pipe, optimizer, scheduler, range(SAVED))
        kept = {"optimizer": optimizer, "scheduler": scheduler, "extra": {"position": 8 * SAVED}}
        ps.save(pipe, folder, step=SAVED, **kept, wait=len(world) % 2 == 0).wait()
        return train(pipe, optimizer, scheduler, range(SAVED, STEPS))


def load_and_go_on(rank, ranks, world, folder, *, group):
    layout, options = options_of(world, group)
    with pipeline(layout, seed=9, **options) as (pipe, optimizer, scheduler):
        extra = {"position": 0}
        step = ps.load(pipe, folder, optimizer=optimizer, scheduler=scheduler, extra=extra)
        assert extra == {"position": 8 * SAVED}
        return train(pipe, optimizer, scheduler, range(step, STEPS))


@pytest.fixture(scope="module")
def runs(workers, tmp_path_factory):
    """Saves on each layout when it is first needed; returns the folder, and the losses afterwards."""

    @cache
    def run(world):
        folder = tmp_path_factory.mktemp("run")
        found = workers.run(save_and_go_on, world, folder, ranks=ranks_of(world))
        return folder, [loss for losses in found for loss in losses]

    return run


PAIRS = [
    ("1x1", "4x1"),
    ("4x1", "2x2"),
    ("2x2", "4V"),
    ("4V", "1x4"),
    ("1x4", "2V"),
    ("2V", "4x2"),
    ("4x2", "2x1"),
    ("2x1", "3 without stages on 1"),
    ("3 without stages on 1", "2x1 fsdp 2"),
    ("2x1 fsdp 2", "1x4 fsdp 4"),
    ("1x4 fsdp 4", "2V fsdp 2"),
    ("2V fsdp 2", "2x2 ddp 2"),
    ("2x2 ddp 2", "1x1 hsdp 2x2"),
    ("1x1 hsdp 2x2", "1x1"),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_another_layout_goes_on_bit_for_bit(workers, runs, first, second):
    folder, expected = runs(first)
    resumed = workers.run(load_and_go_on, second, folder, ranks=ranks_of(second))
    losses = next(losses for losses in resumed if losses)
    assert len(losses) == STEPS - SAVED
    assert losses[0] == expected[0]
    if "fsdp 4" in first + second:  # the sum of three equal gradients has to be rounded
        assert losses == pytest.approx(expected[: len(losses)], rel=1e-14)
    else:
        assert losses == expected[: len(losses)]


def data_bytes(path):
    """How many bytes follow the header."""
    data = path.read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def test_every_tensor_is_written_once(runs):
    for world in ("2x1", "2x1 fsdp 2", "2x2 ddp 2", "1x1 hsdp 2x2"):
        folder, _ = runs(world)
        data = sum(map(data_bytes, (folder / "step-3").glob("*.safetensors")))
        model = build()
        elements = sum(parameter.numel() for parameter in model.parameters())
        buffers = sum(buffer.numel() for buffer in model.buffers())
        assert 0 < data - 8 * (3 * elements + buffers) < 1000  # the steps of AdamW


def test_torch_reads_the_files_and_needs_no_process_group(runs):
    folder, _ = runs("2V fsdp 2")
    model = Tied().double()
    state = {"model": {name: value for name, value in model.state_dict().items() if name != "head.weight"}}
    with pytest.warns(UserWarning, match="torch.distributed"):
        load_with_torch(state, storage_reader=CheckpointReader(folder / "step-3"))
    words, target = batch(SAVED)
    assert abs(loss_fn(model(words), target).item() - runs("2V fsdp 2")[1][0]) < 1e-12
