"""Guesses a small configuration for any text model of the installed transformers; nothing is downloaded."""

import contextlib

import torch

SMALL = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "ffn_dim", "ffn_hidden_size", "hidden_dim", "n_inner", "d_inner"), 64
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "block_ff_dim"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "dense_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv", "attention_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(
        ("qk_rope_head_dim", "rotary_dim", "q_lora_rank", "kv_lora_rank", "mamba_d_state", "state_size"), 8
    ),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 99),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(
        ("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), 1
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention", "attention_window_size"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "lru_width", "rwkv_head_size", "attention_hidden_size"), 32),
    **dict.fromkeys(("relative_attention_num_buckets", "num_buckets", "relative_attention_max_distance"), 8),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


#: Attributes that some configurations derive from others (None), or need otherwise: tried until a model runs.
VARIANTS = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"head_dim": None, "num_key_value_heads": 4},
    {"head_dim": None, "mamba_d_head": None, "mamba_n_heads": None, "mamba_head_dim": None, "mamba_num_heads": None},
    {"layer_types": None, "sliding_window": None},
    {"layer_types": None, "head_dim": None, "num_hidden_layers": None},
    {"attention_types": [[["global", "local"], 2]]},
    {"hidden_size_per_layer_input": 0},
)
LARGEST = 8_000_000
COMPOSITE = "the configuration is composite"
PER_LAYER = "is a per-layer attribute"
SINGLE = "dtype"
TOO_LARGE = "parameters"
#: Classes for which no guess gives a small model that runs in float64, with a part of the reason.
WITHOUT = {
    **dict.fromkeys(("BltForCausalLM", "DbrxForCausalLM", "FuyuForCausalLM", "GitForCausalLM"), COMPOSITE),
    **dict.fromkeys(("Gemma3ForConditionalGeneration", "Gemma3nForConditionalGeneration"), COMPOSITE),
    **dict.fromkeys(("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"), COMPOSITE),
    **dict.fromkeys(("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), COMPOSITE),
    **dict.fromkeys(("GotOcr2ForConditionalGeneration", "MossTranscribeDiarizeForConditionalGeneration"), COMPOSITE),
    **dict.fromkeys(("MoshiForCausalLM", "MptForCausalLM", "Phi4MultimodalForCausalLM"), COMPOSITE),
    **dict.fromkeys(("EsmForMaskedLM", "ModernVBertForMaskedLM", "UltraVBertForMaskedLM"), COMPOSITE),
    **dict.fromkeys(("Dots3NoteForCausalLM", "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"), PER_LAYER),
    "NeoMMEForMaskedLM": PER_LAYER,
    **dict.fromkeys(("Inkling2ForCausalLM", "MraForMaskedLM"), SINGLE),
    **dict.fromkeys(("RoCBertForCausalLM", "RoCBertForMaskedLM", "LukeForMaskedLM", "PerceiverForMaskedLM"), TOO_LARGE),
    **dict.fromkeys(("MusicgenForCausalLM", "MusicgenMelodyForCausalLM"), "is invalid for input of size"),
    **dict.fromkeys(("ReformerModelWithLMHead", "ReformerForMaskedLM"), "axial_pos_embds"),
    **dict.fromkeys(("XmodForCausalLM", "XmodForMaskedLM"), "Input language unknown"),
    **dict.fromkeys(("Mamba2ForCausalLM", "ZayaForCausalLM"), "validate_architecture"),
    "CohereCompassForCausalLM": "full_attention",
    "Lfm2MoeForCausalLM": "'NoneType' object is not subscriptable",
    "MPNetForMaskedLM": "index out of range",
    "Qwen4ExpForCausalLM": "unsupported operand",
    "XGLMForCausalLM": "without overflow",
    "Zamba2ForCausalLM": "validate_layer_type",
    "ZambaForCausalLM": "tie_weights_keys",
}


def build(name, kind):
    """Build the model of a class with a small configuration, in float64, with every random choice off.

    Raises ``LookupError`` with the last reason if no guess gives a small model that runs.
    """
    import transformers

    model_class = getattr(transformers, name)
    if model_class.config_class.sub_configs:
        raise LookupError(COMPOSITE)
    reason = "no guess"
    for variant in VARIANTS:
        try:
            config = _guess(model_class.config_class, kind, variant)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
            if size > LARGEST:
                raise LookupError(f"{size:,} parameters")
            torch.manual_seed(0)
            model = model_class(config).double().train()
            with contextlib.suppress(Exception):
                model.set_experts_implementation("eager")  # the other kernels take no float64
            _run(model)
        except Exception as error:  # whatever it is, this guess does not do
            reason = f"{type(error).__name__}: {error}"
        else:
            return model
    raise LookupError(reason)


def _run(model):
    """Run a model twice, with the sizes of the probe and others."""
    for samples, tokens in ((2, 7), (3, 16)):
        ids = torch.arange(samples * tokens).view(samples, tokens) % 90 + 3
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if loss is None or not torch.isfinite(loss):
            raise LookupError(f"the loss of the unsplit model is {loss}")


def _guess(config_class, kind, variant):
    default = config_class()
    arguments = {key: value for key, value in SMALL.items() if hasattr(default, key)}
    if kind == "causal" and hasattr(default, "is_decoder"):
        arguments["is_decoder"] = True
    layer_types = vars(default).get("layer_types")
    if isinstance(layer_types, list):
        kinds = list(dict.fromkeys(layer_types))
        arguments["layer_types"] = [kinds[number % len(kinds)] for number in range(4)]
    arguments |= {key: value for key, value in variant.items() if hasattr(default, key)}
    arguments = {
        key: value
        for key, value in arguments.items()
        if value is not None and not isinstance(getattr(config_class, key, None), property)
    }
    config = config_class(**arguments)
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def class_names(kind):
    """Return the names of the classes of a kind, ``"causal"`` or ``"masked"``."""
    from transformers.models.auto import modeling_auto

    names = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }[kind]
    return sorted({name for value in names.values() for name in ([value] if isinstance(value, str) else value)})
