"""Small random Hugging Face models with batches to train them on; nothing is downloaded."""

import torch

DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
#: Class of the model, and arguments of its configuration.
FAMILIES = {
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "n_layer": 4,
            "n_head": 2,
            "n_embd": 16,
            "vocab_size": 96,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen2": ("Qwen2ForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 4}),
    "gemma2": ("Gemma2ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 4}),
    "mixtral": (
        "MixtralForCausalLM",
        {**DECODER, "num_local_experts": 4, "output_router_logits": True, "experts_implementation": "eager"},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 3,
            "num_heads": 4,
            "vocab_size": 96,
            "decoder_start_token_id": 0,
        },
    ),
    "llava": ("LlavaForConditionalGeneration", None),
    "bert": (
        "BertForMaskedLM",
        {
            name: DECODER[name]
            for name in DECODER
            if name not in ("num_key_value_heads", "bos_token_id", "eos_token_id")
        },
    ),
}


def build(family):
    """Build the model of a family, in float64."""
    import transformers

    name, arguments = FAMILIES[family]
    kind = getattr(transformers, name)
    if arguments is None:
        text = {"model_type": "llama", **DECODER}
        vision = {"model_type": "clip_vision_model", **VISION}
        config = kind.config_class(text_config=text, vision_config=vision, image_token_index=90)
    else:
        config = kind.config_class(**arguments)
    torch.manual_seed(0)
    return kind(config).double()


def batch(family, samples, tokens, seed=0):
    """Return the keyword arguments of a microbatch."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 80, (samples, tokens), generator=generator)
    labels = torch.randint(3, 80, (samples, tokens), generator=generator)
    labels[0, : tokens // 2] = -100
    if family == "llava":
        patches = (VISION["image_size"] // VISION["patch_size"]) ** 2
        ids[:, 1 : 1 + patches] = 90
        pixels = torch.randn(samples, 3, 16, 16, dtype=torch.float64, generator=generator)
        return {"input_ids": ids, "labels": labels, "pixel_values": pixels}
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}
