"""Small random models of transformers, by family; nothing is downloaded."""

import functools

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
DECODER = {**SMALL, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 32}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

#: Class, configuration class, and its arguments.
FAMILIES = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_head": 2, "n_layer": 3, "vocab_size": 96, "n_positions": 32},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": 96,
            "decoder_start_token_id": 0,
        },
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 96, "state_size": 4},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**SMALL, "vocab_size": 96}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SMALL, "image_size": 16, "patch_size": 8}),
}


def build(family):
    """Build the model of a family."""
    import transformers

    model, config, arguments = FAMILIES[family]
    return getattr(transformers, model)(getattr(transformers, config)(**TOKENS, **arguments))


def builder(family):
    """A callable that builds the model of a family."""
    return functools.partial(build, family)
