"""``pipe.statistics``: how many steps there were, how long they took, and how long a rank waited in them."""

import time

import pytest
import torch

import penstock as ps
from penstock.runtime import Pipeline, run_in_threads
from runtime.optimizers.trained import MSE, batches, layers, pipeline


def test_a_rank_counts_its_steps_and_not_its_evaluations():
    def train(transport):
        with pipeline(layers(), transport) as pipe:
            assert pipe.statistics == (0, 0.0, 0.0)
            assert pipe.statistics.bubble == 0
            optimizer = ps.Optimizer(pipe, torch.optim.SGD, lr=0.1, max_norm=1.0)
            for x, y in batches(3):
                pipe.step(x, target=y)
                before = pipe.statistics
                optimizer.step()
                after = pipe.statistics
                assert (after.steps, after.waited > before.waited) == (before.steps, True)  # for the norm
                assert after.seconds > before.seconds
                pipe.eval(x)
                assert pipe.statistics == after
            return after

    for found in run_in_threads(train, 2):
        assert found.steps == 3
        assert 0 < found.bubble < 1


def slow_last_stage(shapes):
    """Train a step in which the last stage begins to compute when the first waits; returns both sides of it."""
    transports, taken = {}, []

    class Slow(torch.nn.Linear):
        def forward(self, x):
            if self.training and torch.is_grad_enabled() and 0 in transports:
                while not transports[0].progress.waiting:
                    time.sleep(0.001)
                begin = time.perf_counter()
                time.sleep(0.02)
                taken.append(time.perf_counter() - begin)
            return super().forward(x)

    def train(transport):
        stages = {transport.rank: (torch.nn.Linear, Slow)[transport.rank](4, 4)}
        schedule = ps.build("GPipe", ranks=2, microbatches=1)
        with Pipeline(stages, schedule, loss_fn=MSE, transport=transport, shapes=shapes) as pipe:
            x, y = torch.ones(2, 4), torch.ones(2, 4)
            pipe.step(x, target=y)
            before = pipe.statistics
            transports[transport.rank] = transport
            transport.exchange(b"")
            pipe.step(x, target=y)
            return pipe.statistics.since(before)

    return run_in_threads(train, 2), taken


@pytest.mark.parametrize("shapes", ["inferred", "per_microbatch"])
def test_a_rank_waits_for_as_long_as_its_peer_computes(shapes):
    (first, _), (computed,) = slow_last_stage(shapes)
    assert computed <= first.waited <= first.seconds
    assert first.steps == 1
