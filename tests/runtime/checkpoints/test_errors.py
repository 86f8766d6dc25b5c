"""What cannot be saved or loaded is one clear error on every rank, and nothing is lost by it."""

import json
import os
import re
import resource
import shutil
import subprocess
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.errors import CheckpointError
from penstock.runtime import Pipeline, run_in_threads
from runtime.checkpoints.runs import LAYOUTS, pipeline, train

WIDTH = 64


def two_ranks(work, *, widths=(WIDTH, WIDTH), timeout=60):
    """What `work` returns on each rank of a small pipeline, or the error that it raises."""
    schedule = ps.build("1F1B", ranks=2, microbatches=2)

    def worker(transport):
        modules = nn.Sequential(*(nn.Linear(WIDTH, width) for width in widths)).double()
        module = nn.ModuleDict({f"layer{transport.rank}": modules[transport.rank]})
        module.forward = module[f"layer{transport.rank}"].forward
        with Pipeline({transport.rank: module}, schedule, loss_fn=mse_loss, transport=transport) as pipe:
            try:
                return work(pipe)
            except CheckpointError as error:
                return error

    return run_in_threads(worker, 2, timeout=timeout)


def mark(pipe, value):
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(value)


def values(pipe):
    return {parameter.flatten()[0].item() for parameter in pipe.parameters()}


def the_error(results):
    """The one error of all ranks."""
    messages = {str(result) for result in results}
    assert all(isinstance(result, CheckpointError) for result in results), results
    assert len(messages) == 1, messages
    return messages.pop()


def save(pipe, folder, step, **options):
    mark(pipe, step)
    ps.save(pipe, folder, step=step, **options).wait()


def saved(folder, *steps):
    for step in steps:
        assert two_ranks(partial(save, folder=folder, step=step)) == [None, None]


def load(pipe, folder, **options):
    mark(pipe, -1)
    step = ps.load(pipe, folder, **options)
    assert values(pipe) == {float(step)}
    return step


def refused(folder, **options):
    """The error of loading, after which the pipelines are as they were."""

    def work(pipe):
        mark(pipe, -1)
        try:
            ps.load(pipe, folder, **options)
        except CheckpointError as error:
            assert values(pipe) == {-1.0}
            return error

    return the_error(two_ranks(work))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# Saving ---------------------------------------------------------------------------------------------------------------


@contextmanager
def mounted(folder, *arguments):
    """Mounts something on a folder; only root may."""
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.processes
@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk(tmp_path, wait):
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=300k", "tmpfs"):
        saved(tmp_path, 1)

        def fill(pipe):
            with pytest.raises(CheckpointError) as raised:
                save(pipe, tmp_path, 2, extra={"more": "x" * 200_000}, wait=wait)
            pipe.transport.exchange(b"")  # rank 0 has removed what was written
            saved_names = names(tmp_path)
            save(pipe, tmp_path, 3)  # there is room for a smaller one
            return str(raised.value), saved_names

        (message, left), other = two_ranks(fill)
        assert (message, left) == other
        assert re.search(r"cannot write .*/.step-2.part/rank-\d.\w+: No space left on device; earlier", message)
        assert left == ["step-1"]
        assert two_ranks(partial(load, folder=tmp_path)) == [3, 3]
        assert two_ranks(partial(load, folder=tmp_path, step=1)) == [1, 1]


@pytest.mark.processes
def test_a_folder_that_is_read_only(tmp_path):
    saved(tmp_path, 1)
    with mounted(tmp_path, "--bind", str(tmp_path)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path)], check=True)
        message = the_error(two_ranks(partial(save, folder=tmp_path, step=2)))
        assert message == f"cannot write {tmp_path}: Read-only file system; earlier checkpoints are as they were"
        assert two_ranks(partial(load, folder=tmp_path)) == [1, 1]


def write_too_much(rank, ranks, folder, *, group):
    """Have files no larger than what one rank needs; returns the error of each rank."""
    with pipeline(LAYOUTS["2x1"], group=group) as (pipe, optimizer, _):
        ps.save(pipe, folder, step=1)
        if rank == 1:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            ps.save(pipe, folder, step=2, optimizer=optimizer)
        except CheckpointError as error:
            found = str(error)
        finally:
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        train(pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), range(1))  # the pipeline still works
        ps.save(pipe, folder, step=3, optimizer=optimizer)
        return found


def test_one_rank_cannot_write(workers, tmp_path):
    first, second = workers.run(write_too_much, tmp_path, ranks=2)
    assert first == second
    assert re.search(r"cannot write .*rank-1.safetensors: File too large; earlier checkpoints are as they were", first)
    assert names(tmp_path) == ["step-1", "step-3"]


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("")
    message = the_error(two_ranks(partial(save, folder=tmp_path / "run", step=2)))
    assert message.startswith(f"cannot write {tmp_path / 'run'}: File exists")
    assert refused(tmp_path / "run") == f"cannot read {tmp_path / 'run'}: Not a directory"


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, caplog):
    def work(pipe):
        saving = ps.save(pipe, tmp_path, step=1, extra={"more": "x"}, wait=False)
        saving.wait()
        shutil.rmtree(tmp_path, ignore_errors=True)
        pipe.transport.exchange(b"")
        saving = ps.save(pipe, tmp_path, step=2, wait=False)
        spoil()
        while not saving.done:
            pass
        with pytest.raises(CheckpointError, match="cannot write") as raised:
            ps.save(pipe, tmp_path, step=3)
        assert saving.done
        ps.save(pipe, tmp_path, step=4)
        return raised.value

    def spoil():
        shutil.rmtree(tmp_path / ".step-2.part", ignore_errors=True)

    spoiled = two_ranks(work)
    assert "No such file or directory (every rank must see the same folder)" in the_error(spoiled)
    assert "could not be saved: cannot write" in caplog.text
    assert names(tmp_path) == ["step-4"]


def test_the_end_of_a_pipeline_waits_for_a_save_and_raises_its_error(tmp_path, monkeypatch):
    def fail(*_):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr("penstock.runtime.checkpoints.save.write_pieces", fail)
    with pytest.raises(CheckpointError, match="the disk is full"):
        two_ranks(lambda pipe: ps.save(pipe, tmp_path, step=1, wait=False))


class Sampler:
    pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, r"step must be the number of steps trained, 0 or more, not -1"),
        ({"step": 1, "keep": 0}, r"keep must be at least 1, or None to keep all checkpoints, not 0"),
        (
            {"step": 1, "extra": {"sampler": [Sampler()]}},
            r"extra\['sampler'\]\[0\] is a .*Sampler, which cannot be saved; use numbers, texts, tensors",
        ),
    ],
)
def test_what_cannot_be_saved(tmp_path, options, message):
    assert re.match(message, the_error(two_ranks(lambda pipe: ps.save(pipe, tmp_path, **options))))
    assert names(tmp_path) == []


def test_ranks_that_save_different_steps(tmp_path):
    message = the_error(two_ranks(lambda pipe: ps.save(pipe, tmp_path, step=pipe.rank)))
    assert message == "rank 1 saves with step=1, rank 0 with step=0; pass the same on all ranks"


# Loading --------------------------------------------------------------------------------------------------------------


def test_no_checkpoint(tmp_path):
    assert two_ranks(lambda pipe: ps.load(pipe, tmp_path)) == [0, 0]
    assert two_ranks(lambda pipe: ps.load(pipe, tmp_path / "none", default=7)) == [7, 7]
    assert refused(tmp_path, step=3) == f"{tmp_path} has no complete checkpoint of step 3; there is none at all"
    saved(tmp_path, 1, 2)
    assert refused(tmp_path, step=3).endswith("of step 3; there are those of steps 1, 2")


def test_what_is_not_complete_does_not_count(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-2" / "checkpoint.json").unlink()
    shutil.copytree(tmp_path / "step-1", tmp_path / ".step-3.part")
    assert two_ranks(partial(load, folder=tmp_path)) == [1, 1]
    saved(tmp_path, 4)
    assert names(tmp_path) == ["step-1", "step-2", "step-4"]


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a bit of a tensor": (
        lambda path: flip(path / "rank-1.safetensors", -5),
        r"rank-1.safetensors is damaged: checksum mismatch in model.layer1.\w+$",
    ),
    "a truncated tensor": (
        lambda path: os.truncate(path / "rank-0.safetensors", 5000),
        r"rank-0.safetensors is truncated: model.layer0.\w+ should end at byte \d+$",
    ),
    "a missing file": (
        lambda path: (path / "rank-0.safetensors").unlink(),
        r"cannot read .*rank-0.safetensors: No such file or directory$",
    ),
    "a bit of an index": (lambda path: flip(path / "rank-1.json", 30), r"rank-1.json is damaged: checksum mismatch$"),
    "a bit of the list": (
        lambda path: flip(path / "checkpoint.json", 20),
        r"checkpoint.json is damaged: checksum mismatch$",
    ),
    "a later version": (
        lambda path: (path / "checkpoint.json").write_text(json.dumps({"version": 9, "penstock": "9.0"})),
        r"has version 9, but this penstock reads 1; load it with penstock 9.0 or later$",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint(tmp_path, kind):
    saved(tmp_path, 1, 2)
    damage, message = DAMAGE[kind]
    damage(tmp_path / "step-2")
    assert re.search(message, refused(tmp_path))
    assert two_ranks(partial(load, folder=tmp_path, step=1)) == [1, 1]


def of_model(**modules):
    """Save a model of one stage, or load it."""
    stage = nn.Sequential()
    for name, module in modules.items():
        stage.add_module(name, module)
    return Pipeline({0: stage}, ps.build("GPipe", ranks=1, microbatches=1), loss_fn=mse_loss)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            {"frist": nn.Linear(2, 2), "second": nn.Linear(2, 3)},
            "it has first.bias, and 1 more, which this pipeline does not have; it lacks frist.weight, and 1 more; did "
            "you mean first.weight?",
        ),
        ({"first": nn.Linear(2, 2)}, "it has second.bias, and 1 more, which this pipeline does not have"),
        (
            {"first": nn.Linear(2, 2), "second": nn.Linear(2, 4)},
            "second.weight has shape [4, 2] in this pipeline, but [3, 2] in the checkpoint, and 1 more",
        ),
    ],
)
def test_a_checkpoint_of_another_model(tmp_path, modules, message):
    with of_model(first=nn.Linear(2, 2), second=nn.Linear(2, 3)) as pipe:
        ps.save(pipe, tmp_path, step=1)
    with of_model(**modules) as pipe:
        before = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
        with pytest.raises(CheckpointError) as raised:
            ps.load(pipe, tmp_path)
        assert str(raised.value) == f"{tmp_path / 'step-1'} was saved from a different model: {message}"
        assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict()["model"].items())


def test_what_was_not_saved_is_named(tmp_path):
    saved(tmp_path, 1)
    with_optimizer = partial(ps.Optimizer, kind=torch.optim.SGD, lr=0.1)
    results = two_ranks(lambda pipe: ps.load(pipe, tmp_path, optimizer=with_optimizer(pipe)))
    assert the_error(results).endswith("was saved without an optimizer; load it without optimizer=")
    scaler = torch.amp.GradScaler("cpu")
    assert refused(tmp_path, scaler=scaler).endswith("was saved without a scaler; load it without scaler=")
    message = refused(tmp_path, extra={"sampler": 3})
    assert message.endswith("has no extra['sampler'], nor anything else as extra; load it without that")


def test_a_parameter_that_had_no_optimizer_is_named(tmp_path):
    with of_model(first=nn.Linear(2, 2)) as pipe:
        weight, bias = pipe.parameters()
        ps.save(pipe, tmp_path, step=1, optimizer=torch.optim.SGD([weight]))
        with pytest.raises(CheckpointError, match=r"first\.bias was in no optimizer when the checkpoint was saved"):
            ps.load(pipe, tmp_path, optimizer=torch.optim.SGD([weight, bias]))
