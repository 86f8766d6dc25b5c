import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import penstock as ps
from models.in_turn import assert_complete, assert_equal
from models.random_models import random_case


def squares(output):
    return sum((one * one).mean() for one in tree_leaves(output))


def compare(seed):
    model, layout, example = random_case(seed)
    split = ps.split(model, layout=layout, example=example)
    assert_complete(split, model)
    other = tree_map_only(torch.Tensor, lambda tensor: torch.cat([tensor, tensor.flip(0) + 1]), example)
    assert_equal(split, model, [example, other], squares, tolerance=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_random_models_at_random_places(seed):
    compare(seed)


@pytest.mark.full
def test_many_random_models_at_random_places():
    for seed in range(60, 560):
        try:
            compare(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
