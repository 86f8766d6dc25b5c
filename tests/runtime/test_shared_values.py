"""``pipe.broadcast`` and ``pipe.gather``: numbers of one rank, or of each, on all."""

import math

import pytest
import torch

from penstock.errors import StageError
from penstock.runtime import run_in_threads
from runtime.optimizers.trained import layers, pipeline


def with_pipe(function, ranks=2):
    def run(transport):
        with pipeline(layers(), transport, "1F1B" if ranks == 4 else "ZBVZeroBubble") as pipe:
            return function(pipe)

    return run_in_threads(run, ranks)


def test_metrics_of_the_last_stage_are_on_all_ranks():
    def share(pipe):
        metrics = {"accuracy": torch.tensor(0.1, dtype=torch.float64), "worst": math.inf, "note": "warm-up"}
        return pipe.broadcast(metrics if pipe.has_last else object())

    assert with_pipe(share, 4) == [{"accuracy": 0.1, "worst": math.inf, "note": "warm-up"}] * 4


def test_another_rank_can_be_the_source():
    assert with_pipe(lambda pipe: pipe.broadcast([pipe.rank], rank=1)) == [[1]] * 2


def test_every_rank_gets_what_each_has():
    assert with_pipe(lambda pipe: pipe.gather(pipe.rank + 0.5), 4) == [[0.5, 1.5, 2.5, 3.5]] * 4


def test_what_cannot_be_shared():
    def share(pipe):
        pipe.broadcast({"loss": object()}, rank=0)

    with pytest.raises(StageError, match=r"only numbers, text, tensors, .* can be shared, not object"):
        with_pipe(share)


def test_a_rank_that_does_not_exist():
    with pytest.raises(StageError, match=r"unknown rank 2; there are 2 ranks \(0 to 1\)"):
        with_pipe(lambda pipe: pipe.broadcast(1, rank=2))
