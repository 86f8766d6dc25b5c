import json

import pytest

import penstock as ps
from models.hugging_face import FAMILIES, batch, build
from models.in_turn import assert_complete, assert_equal
from penstock.models.split import Split

pytestmark = pytest.mark.filterwarnings("ignore")


def loss_of(output):
    return output.loss


def example(family):
    return ((), batch(family, 2, 9)) if family == "llava" else None


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_equal_to_the_unsplit_model(family, stages):
    model = build(family)
    split = ps.split(model, stages=stages, example=example(family))
    assert_complete(split, model)
    microbatches = [((), batch(family, 3, 11, seed=1)), ((), batch(family, 1, 8, seed=2))]
    assert_equal(split, split.model, microbatches, loss_of)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_description_is_enough(family):
    model = build(family)
    split = ps.split(model, stages=3, example=example(family))
    again = Split.from_json(model, json.loads(json.dumps(split.to_json())))
    assert again.digest == split.digest
    assert_equal(again, again.model, [((), batch(family, 2, 10, seed=3))], loss_of)
