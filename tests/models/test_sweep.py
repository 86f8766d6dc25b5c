"""Sweeps every causal and masked language model of transformers for which a small configuration can be guessed.

Each is equal to the unsplit model, refused, or listed with the reason why no small model of it can be made.
"""

import re

import pytest
import torch

import penstock as ps
from models.in_turn import assert_complete, assert_equal
from models.small_configs import WITHOUT, build, class_names
from penstock.errors import SplitError

# One of them starts a compiler.
pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

#: Models that cannot be split in this way, with a part of the reason that the error gives.
REFUSED = {
    "AlbertForMaskedLM": "is called 4 times, in a loop",
    "Gemma3nForCausalLM": "has stored instead of returning it",  # keys and values that layers share
    "HrmTextForCausalLM": "times, in a loop",
    "RecurrentGemmaForCausalLM": "has state that cannot be copied",  # after a first forward
}


CLASSES = [(name, kind) for kind in ("causal", "masked") for name in class_names(kind)]


def test_most_classes_are_compared():
    compared = {name for name, _ in CLASSES} - {*REFUSED, *WITHOUT}
    assert len(compared) >= 180


@pytest.mark.parametrize(("name", "kind"), CLASSES)
def test_a_class_is_equal_or_refused(name, kind):
    if name in WITHOUT:
        with pytest.raises(LookupError, match=re.escape(WITHOUT[name])):
            build(name, kind)
        return
    model = build(name, kind)
    if name in REFUSED:
        with pytest.raises(SplitError, match=REFUSED[name]):
            ps.split(model, stages=3)
        return
    split = ps.split(model, stages=3)
    assert_complete(split, model)
    generator = torch.Generator().manual_seed(3)
    batch = {key: torch.randint(3, 90, (3, 16), generator=generator) for key in ("input_ids", "labels")}
    assert_equal(split, model, [((), batch)], lambda output: output.loss, use_cache=False)
