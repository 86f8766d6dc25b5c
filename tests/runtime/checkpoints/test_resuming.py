"""What a run is beside its model: random numbers, schedulers, scalers, positions; and which checkpoints are kept."""

import random
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import penstock as ps
from penstock.errors import CheckpointError
from penstock.runtime import run_in_threads
from runtime.checkpoints.runs import LAYOUTS, Tied, pipeline, train

STEPS, SAVED = 6, 3


def build_with_dropout():
    return Tied(dropout=0.3).double()


def resume_with_dropout(rank, ranks, layout, folder, *, group):
    """Losses after a checkpoint, of the run that has saved it in the background, and of one that loads it."""
    with pipeline(LAYOUTS[layout], make=build_with_dropout, group=group) as (pipe, optimizer, scheduler):
        random.seed(rank)
        torch.manual_seed(rank)
        train(pipe, optimizer, scheduler, range(SAVED))
        kept = {"optimizer": optimizer, "scheduler": scheduler}
        ps.save(pipe, folder, step=SAVED, **kept, wait=False)
        went_on = train(pipe, optimizer, scheduler, range(SAVED, STEPS)), draws()
    with pipeline(LAYOUTS[layout], make=build_with_dropout, seed=5, group=group) as (pipe, optimizer, scheduler):
        step = ps.load(pipe, folder, optimizer=optimizer, scheduler=scheduler)
        resumed = train(pipe, optimizer, scheduler, range(step, STEPS)), draws()
    return went_on, resumed


def draws():
    return random.random(), np.random.random(), torch.rand(()).item()


@pytest.mark.parametrize("layout", ["2V", "4x1"])
def test_the_same_layout_goes_on_with_the_same_random_numbers(workers, layout, tmp_path):
    results = workers.run(resume_with_dropout, layout, tmp_path, ranks=LAYOUTS[layout].ranks)
    for went_on, resumed in results:
        assert resumed == went_on
    assert sum(len(losses) for (losses, _), _ in results) == STEPS - SAVED


def seed_and_save(rank, ranks, folder, *, group):
    random.seed(7)
    torch.manual_seed(rank)
    with pipeline(LAYOUTS["2x1"], group=group) as (pipe, _, _):
        ps.save(pipe, folder, step=1)
    return draws()


def load_and_draw(rank, ranks, layout, folder, *, group):
    with pipeline(LAYOUTS[layout], group=group) as (pipe, _, _):
        ps.load(pipe, folder)
    return draws()


def test_another_layout_keeps_what_ranks_had_in_common_and_seeds_the_rest(workers, tmp_path):
    before = workers.run(seed_and_save, tmp_path, ranks=2)
    same = workers.run(load_and_draw, "2x1", tmp_path, ranks=2)
    assert same == before
    first = workers.run(load_and_draw, "4x1", tmp_path, ranks=4)
    assert {python for python, _, _ in first} == {before[0][0]}
    assert len({numbers for _, _, numbers in first}) == 4
    assert workers.run(load_and_draw, "4x1", tmp_path, ranks=4) == first


class Sampler:
    """Has a state, as samplers and data loaders do."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_scheduler_scaler_and_extra(tmp_path):
    def first(transport):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with pipeline(LAYOUTS["2x1"], transport=transport) as (pipe, optimizer, _):
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
            train(pipe, optimizer, scheduler, range(2))
            sampler = Sampler()
            sampler.position = 48
            extra = {"sampler": sampler, "epoch": (2, {"seed": None}), "own": transport.rank}
            ps.save(pipe, tmp_path, step=2, optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=extra)

    def second(transport):
        scaler, sampler = torch.amp.GradScaler("cpu"), Sampler()
        with pipeline(LAYOUTS["2x1"], transport=transport) as (pipe, optimizer, _):
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
            extra = {"sampler": sampler, "epoch": None}
            ps.load(pipe, tmp_path, optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=extra)
            assert extra == {"sampler": sampler, "epoch": (2, {"seed": None}), "own": transport.rank}
            return (
                sampler.position,
                scaler.get_scale(),
                scheduler.last_epoch,
                scheduler.milestones,
                optimizer.param_groups[0]["lr"],
            )

    def elsewhere(transport):
        with pipeline(LAYOUTS["1x1"], transport=transport) as (pipe, _, _):
            with pytest.raises(
                CheckpointError, match=r"extra\['own'\] was not the same on all ranks when .* was saved"
            ):
                ps.load(pipe, tmp_path, extra={})
            return ps.load(pipe, tmp_path)

    run_in_threads(first, 2, timeout=60)
    expected = (48, 8.0, 2, {1: 1, 3: 1}, 0.05 * 0.5)
    assert run_in_threads(second, 2, timeout=60) == [expected, expected]
    assert run_in_threads(elsewhere, 1, timeout=60) == [2]


def kept_names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_older_checkpoints_are_removed(tmp_path):
    with pipeline_alone() as (pipe, _, _):
        for step in (1, 2, 10):
            ps.save(pipe, tmp_path, step=step)
        ps.save(pipe, tmp_path, step=11, keep=3)
        assert kept_names(tmp_path) == ["step-10", "step-11", "step-2"]
        ps.save(pipe, tmp_path, step=10, keep=1)  # gone back to an earlier one
        assert kept_names(tmp_path) == ["step-10", "step-11"]


def pipeline_alone():
    from penstock.runtime.transport.threads import thread_transports

    return pipeline(LAYOUTS["1x4"], transport=thread_transports(1)[0])


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    with pipeline_alone() as (pipe, _, _):
        for epoch in (1, 2):
            ps.save(pipe, tmp_path, step=5, extra={"epoch": epoch})
        assert kept_names(tmp_path) == ["step-5"]
        extra = {}
        assert ps.load(pipe, tmp_path, extra=extra) == 5
        assert extra == {"epoch": 2}
        # The process has ended after the first of two renames.
        (tmp_path / "step-5").rename(tmp_path / ".step-5.replaced")
        (tmp_path / ".step-5.part").mkdir()
        assert ps.load(pipe, tmp_path) == 5
        ps.save(pipe, tmp_path, step=6)
        assert kept_names(tmp_path) == ["step-5", "step-6"]


def test_a_save_in_the_background_is_of_when_it_was_called(tmp_path):
    with pipeline_alone() as (pipe, optimizer, scheduler):
        train(pipe, optimizer, scheduler, range(1))
        before = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
        savings = [ps.save(pipe, tmp_path, step=step, wait=False) for step in (1, 2)]
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.zero_()
        assert savings[0].done  # the next save waits for the last one
        savings[1].wait()
        assert savings[1].path == tmp_path / "step-2"
        for thread in [one for one in threading.enumerate() if one.name.startswith("penstock saves")]:
            thread.join(20)  # it ends right after it has saved
            assert not thread.is_alive()
        ps.load(pipe, tmp_path)
        assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict()["model"].items())


def test_data_files_are_safetensors(tmp_path):
    with pipeline_alone() as (pipe, _, _):
        ps.save(pipe, tmp_path, step=1)
        tensors = load_file(tmp_path / "step-1" / "rank-0.safetensors")
        for name, tensor in pipe.state_dict()["model"].items():
            assert torch.equal(tensors[f"model.{name}"], tensor)


def test_ranks_have_extras_of_other_names(tmp_path):
    def run(transport):
        with pipeline(LAYOUTS["4x1"], transport=transport) as (pipe, _, _):
            given = {} if transport.rank == 0 else {f"own {transport.rank % 2}": transport.rank}
            ps.save(pipe, tmp_path, step=1, extra=given)
            extra = {}
            ps.load(pipe, tmp_path, extra=extra)
            assert extra == given

    run_in_threads(run, 4)
