"""What cannot be generated is one clear error, the same on every rank, and the pipeline can be used afterwards."""

import re

import pytest
import torch
from torch import nn

import penstock as ps
from models.hugging_face import build
from penstock.errors import GenerationError, StepError
from penstock.runtime import Pipeline, run_in_threads
from runtime.generation.unsplit import decoder, draw_prompts, generate

SCHEDULE = ps.build("1F1B", ranks=2, microbatches=2)
IDS = torch.tensor([[5, 6, 7], [0, 8, 9]])


@pytest.fixture(scope="module")
def llama():
    return ps.split(decoder("llama"), stages=2)


def errors(split, *args, **options):
    """What each of two ranks raises; what is a tuple differs between them."""

    def call(transport):
        mine = {name: one[transport.rank] if isinstance(one, tuple) else one for name, one in options.items()}
        with Pipeline(split, SCHEDULE, transport=transport) as pipe:
            with pytest.raises(GenerationError) as raised:
                pipe.generate(*(one[transport.rank] if isinstance(one, tuple) else one for one in args), **mine)
            pipe.generate(IDS, max_new_tokens=1)
            return str(raised.value)

    return run_in_threads(call, 2, timeout=60)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.tensor([1, 2]), {}, "must be whole numbers of the shape [sequences, tokens], not a tensor of int64"),
        (torch.ones(1, 2), {}, "not a tensor of float32 of the shape [1, 2]"),
        ([[1, 2]], {}, "not a list"),
        (torch.ones(0, 2, dtype=torch.long), {}, "of the shape [0, 2]"),
        (IDS + 90, {}, "input_ids has the token 96, but the model knows 0 to 95"),
        (IDS, {"attention_mask": torch.ones(2, 4)}, "must have the shape of input_ids, [2, 3], but is a tensor of"),
        (
            IDS,
            {"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
            "the prompt of sequence 1 has no token, by its",
        ),
        (IDS, {"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "sequence 0 has padding between its tokens"),
        (IDS[:, [1, 0, 2]], {"pad_token_id": 5}, "by the tokens that equal pad_token_id=5"),
        (IDS, {"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, not 0"),
        (IDS, {"temperature": -1}, "temperature must be a number of at least 0, not -1"),
        (IDS, {"temperature": float("nan")}, "temperature must be a number of at least 0, not nan"),
        (IDS, {"top_k": 3}, "pass a temperature above 0 as well"),
        (IDS, {"temperature": 1, "top_k": 0}, "top_k must be a whole number of at least 1, not 0"),
        (IDS, {"temperature": 1, "top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        (IDS, {"seed": "a"}, "seed must be a whole number of at least 0, not 'a'"),
        (IDS, {"eos_token_id": 1.5}, "eos_token_id must be a token or a list of tokens, not 1.5"),
        (IDS, {"pad_token_id": -1}, "pad_token_id must be a whole number of at least 0, not -1"),
        (IDS, {"microbatches": 0}, "microbatches must be a whole number of at least 1, not 0"),
    ],
)
def test_arguments(llama, ids, options, message):
    found = errors(llama, ids, **options)
    assert found[0] == found[1]
    assert message in found[0]


def test_ranks_that_differ(llama):
    both = errors(llama, IDS, seed=(1, 2))
    assert both == ["rank 1 called generate() with a different seed from rank 0; pass the same on all ranks"] * 2
    both = errors(llama, (IDS, IDS + 1))
    assert both[0] == both[1]
    assert "a different input_ids from rank 0" in both[0]
    both = errors(llama, IDS, max_new_tokens=(2, -2))
    assert both == ["on rank 1: max_new_tokens must be a whole number of at least 1, not -2"] * 2


def test_more_tokens_than_positions():
    split = ps.split(decoder("gpt2"), stages=2)
    both = errors(split, IDS, max_new_tokens=62)
    assert both[0] == both[1]
    assert both[0].startswith("prompts of 3 tokens and max_new_tokens=62 need more than the 64 positions")
    assert both[0].endswith("generate at most 61")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("t5", "a T5ForConditionalGeneration is an encoder with a decoder; only decoders can generate"),
        ("bert", "a BertForMaskedLM has no head that generates tokens"),
        ("llava", "the model was split with pixel_values=; tokens are generated from input_ids alone"),
    ],
)
def test_models(family, message):
    from models.hugging_face import batch

    split = ps.split(build(family), stages=2, example=((), batch(family, 2, 9)))
    with pytest.raises(GenerationError, match=re.escape(message)):
        run_in_threads(lambda transport: _one(split, transport), 2, timeout=60)


def _one(split, transport, **options):
    with Pipeline(split, SCHEDULE, transport=transport, **options) as pipe:
        return pipe.generate(IDS, max_new_tokens=2)


def test_other_models():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    loss = nn.functional.mse_loss
    split = ps.split(Recurrent(), stages=2, example=torch.ones(2, 3))
    with pytest.raises(GenerationError, match="a Recurrent is not a model of transformers"):
        run_in_threads(lambda transport: _one(split, transport, loss_fn=loss), 2, timeout=60)

    def by_hand(transport):
        return _one({transport.rank: nn.Linear(3, 3)}, transport, loss_fn=loss)

    with pytest.raises(GenerationError, match="made by hand, so it is not known how they generate"):
        run_in_threads(by_hand, 2, timeout=60)


def test_linear_attention():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_experts": 2, "head_dim": 8}
    sizes |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    config = Qwen3NextConfig(
        **sizes,
        linear_value_head_dim=8,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        num_experts_per_tok=1,
        shared_expert_intermediate_size=8,
    )
    split = ps.split(Qwen3NextForCausalLM(config), stages=2, check=False)
    with pytest.raises(GenerationError, match="layer 0 of a Qwen3NextConfig keeps a LinearAttentionLayer"):
        run_in_threads(lambda transport: _one(split, transport), 2, timeout=60)


def test_settings_of_the_model_that_are_not_followed(llama):
    model = decoder("llama")
    model.generation_config.repetition_penalty = 1.3
    split = ps.split(model, stages=2)
    with pytest.warns(UserWarning, match=r"sets repetition_penalty=1.3, which generate\(\) does not follow"):
        run_in_threads(lambda transport: _one(split, transport), 2, timeout=60)
    run_in_threads(lambda transport: _one(llama, transport), 2, timeout=60)  # whose settings are all followed


def test_a_cache_of_your_own_is_refused(llama):
    from transformers import DynamicCache

    stage = llama.stages()[0]
    with pytest.raises(ps.SplitError, match="past_key_values= holds all layers, but"):
        stage(input_ids=IDS, past_key_values=DynamicCache(config=stage.config), use_cache=True)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_stage_that_fails_ends_the_call_on_every_rank(kind):
    """Ctrl-C stays what it is, on the rank that it reaches; the others are informed."""
    split, raised, modes = ps.split(decoder("llama"), stages=2), {}, {}

    def call(transport):
        with Pipeline(split, SCHEDULE, transport=transport) as pipe:
            module = pipe.stages[transport.rank].module
            if transport.rank == 1:
                calls = []
                module.model.layers[3].register_forward_pre_hook(lambda *_: calls.append(0) or _fail(calls, kind))
            try:
                pipe.generate(IDS, max_new_tokens=20)
            except BaseException as error:
                raised[transport.rank], modes[transport.rank] = error, module.training
            with pytest.raises(StepError, match="the pipeline has failed"):
                pipe.generate(IDS, max_new_tokens=2)

    run_in_threads(call, 2, timeout=60)
    assert modes == {0: True, 1: True}
    assert isinstance(raised[0], StepError)
    assert f"rank 1 failed in 1F0 (stage 1, microbatch 0): {kind.__name__}: no more" in str(raised[0])
    assert isinstance(raised[1], StepError if kind is ValueError else KeyboardInterrupt)


def _fail(calls, kind):
    if len(calls) == 7:
        raise kind("no more")


def test_the_pipeline_goes_on_after_a_mistake(llama):
    ids, mask = draw_prompts()
    wanted = generate(decoder("llama"), ids, mask)

    def call(transport):
        with Pipeline(llama, SCHEDULE, transport=transport) as pipe:
            with pytest.raises(GenerationError):
                pipe.generate(ids, max_new_tokens=0)
            return pipe.generate(ids, attention_mask=mask, max_new_tokens=9)

    assert all(torch.equal(tokens, wanted) for tokens in run_in_threads(call, 2, timeout=60))
