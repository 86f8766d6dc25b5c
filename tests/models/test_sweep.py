"""Sweeps every causal and masked language model of transformers for which a small configuration can be guessed."""

import pytest
import torch

import penstock as ps
from models.in_turn import assert_complete, assert_equal
from models.small_configs import build, class_names
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


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind in ("causal", "masked") for name in class_names(kind)]
)
def test_a_class_is_equal_or_refused(name, kind):
    try:
        model = build(name, kind)
    except LookupError as error:
        pytest.skip(f"no small configuration: {error}")
    if name in REFUSED:
        with pytest.raises(SplitError, match=REFUSED[name]):
            ps.split(model, stages=3)
        return
    split = ps.split(model, stages=3)
    assert_complete(split, model)
    generator = torch.Generator().manual_seed(3)
    batch = {key: torch.randint(3, 90, (3, 16), generator=generator) for key in ("input_ids", "labels")}
    assert_equal(split, split.model, [((), batch)], lambda output: output.loss, tolerance=1e-9)
