"""Sweeps every decoder of transformers for which a small configuration can be guessed: equal tokens, or an error.

The models and why some cannot be made are those of the sweep over splits.
"""

import warnings

import pytest
import torch

import penstock as ps
from models.small_configs import build, class_names
from penstock.errors import PenstockError
from penstock.runtime import Pipeline, run_in_threads

# One of them starts a compiler.
pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

NEW, PADDING = 14, 0
#: Why a decoder is refused, with at least one that is.
REASONS = {
    "keeps a LinearAttention": "Qwen3NextForCausalLM",
    "takes no past_key_values=": "MambaForCausalLM",
    "which a split model cannot generate with": "FalconH1ForCausalLM",
    "to whom it is not sent, expect": "GlmMoeDsaForCausalLM",  # what its layers return grows with the cache
    "has stored in": "Gemma3nForCausalLM",
    "in a loop": "HrmTextForCausalLM",
    "has state that cannot be copied": "RecurrentGemmaForCausalLM",
    "Expected query, key, and value to have the same dtype": "MllamaForCausalLM",  # layers that only images call
}


def outcome(name):
    """None if the tokens are those of the unsplit model, else the error."""
    model = build(name, "causal")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 and parameter.shape[0] != 99 else 1.0)
    ids = torch.randint(3, 90, (4, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :1] = 0
    ids[mask == 0] = PADDING
    schedule = ps.build("Interleaved1F1B", ranks=2, microbatches=2)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": PADDING}

    def generate(transport):
        with Pipeline(split, schedule, transport=transport) as pipe:
            return pipe.generate(ids, eos_token_id=(), **options)

    try:
        split = ps.split(model, stages=schedule.stages)
        tokens = run_in_threads(generate, 2, timeout=120)
    except PenstockError as error:
        return str(error)
    model.eval()
    model.generation_config.forced_eos_token_id = None  # not followed, as a warning says
    if hasattr(model.config, "output_router_logits"):
        options["output_router_logits"] = False
    expected = model.generate(ids, do_sample=False, eos_token_id=None, **options)
    assert all(torch.equal(one, expected) for one in tokens), name
    return None


@pytest.fixture(scope="module")
def outcomes():
    """What came of each class that can be built."""
    found = {}
    for name in class_names("causal"):
        with warnings.catch_warnings(action="ignore"):
            try:
                found[name] = outcome(name)
            except LookupError:
                continue
    return found


def test_decoders_generate_or_are_refused(outcomes):
    unknown = {name: text for name, text in outcomes.items() if text and not any(reason in text for reason in REASONS)}
    assert unknown == {}
    assert sum(text is None for text in outcomes.values()) >= 110


@pytest.mark.parametrize(("reason", "name"), REASONS.items())
def test_refused(outcomes, reason, name):
    assert reason in outcomes[name]
