"""Random models, split at random places, train under random schedules as they do in one piece.

Chains, skips, ties, parameters of the root, several inputs and outputs; stages anywhere, in any order, with whole and
split backwards. A seed that fails is named.
"""

import copy
from random import Random

import pytest
import torch
from torch.utils._pytree import tree_leaves

import penstock as ps
from models.random_models import random_case
from penstock.runtime import Pipeline, run_in_threads
from runtime.wired import random_schedule

CLOSE = 1e-10
AT_ONCE = 50


@pytest.fixture(autouse=True)
def _exact():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def squares(output, _target=None):
    return sum((one * one).mean() for one in tree_leaves(output))


def differences(seed: int) -> list[str]:
    """Everything in which two steps of a pipeline differ from those of the unsplit model."""
    random = Random(seed)
    model, layout, (args, kwargs) = random_case(seed)
    ranks, microbatches = random.randint(1, 4), random.randint(1, 2)
    schedule = random_schedule(random, ranks, len(layout), microbatches, split=random.random() < 0.5)
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    splits = [ps.split(each, layout=layout, example=(args, kwargs), check=False) for each in copies]
    shapes = random.choice(["inferred", "per_microbatch"])

    def worker(transport):
        options = {"loss_fn": squares, "transport": transport, "shapes": shapes}
        with Pipeline(splits[transport.rank], schedule, **options) as pipe:
            mine = {name: one for stage in pipe.stages.values() for name, one in stage.module.named_parameters()}
            optimizer = torch.optim.AdamW(set(mine.values()) or [torch.zeros(1)], lr=1e-2)
            for _ in range(2):
                optimizer.zero_grad()
                pipe.step(*args, target=torch.zeros(len(args[0])), return_outputs=False, **kwargs)
                optimizer.step()
            return [(name, one, one.grad) for name, one in mine.items()]

    results = run_in_threads(worker, ranks, timeout=60)
    _train_whole(model, args, kwargs, microbatches)
    expected = dict(model.named_parameters(remove_duplicate=False))
    found, seen = [], set()
    for name, one, gradient in (each for rank in results for each in rank):
        seen.add(name)
        gaps = {"gradient": _gap(gradient, expected[name].grad), "value": _gap(one, expected[name])}
        found += [f"seed {seed}: the {what} of {name} is off by {gap:.3g}" for what, gap in gaps.items() if gap > CLOSE]
    missing = {id(one) for one in model.parameters()} - {id(expected[name]) for name in seen}
    return [*found, *([f"seed {seed}: {len(missing)} parameters are in no stage"] if missing else [])]


def _train_whole(model, args, kwargs, microbatches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = len(args[0])
    least, more = divmod(samples, microbatches)
    sizes = [least + 1] * more + [least] * (microbatches - more)
    for _ in range(2):
        optimizer.zero_grad()
        for part, size in enumerate(sizes):
            given = [tensor.split(sizes)[part] for tensor in args]
            keywords = {name: tensor.split(sizes)[part] for name, tensor in kwargs.items()}
            (squares(model(*given, **keywords)) * size / samples).backward()
        optimizer.step()


def _gap(one, other):
    one, other = (torch.zeros(1) if each is None else each.detach() for each in (one, other))
    return (one - other).abs().max().item()


@pytest.mark.parametrize("first", [0, *(pytest.param(AT_ONCE * n, marks=pytest.mark.full) for n in range(1, 10))])
@pytest.mark.filterwarnings("ignore:.*loss_reduction:UserWarning")  # some outputs are sums over the batch
def test_random_models_under_random_schedules(first):
    assert [each for seed in range(first, first + AT_ONCE) for each in differences(seed)] == []
