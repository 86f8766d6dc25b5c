"""Models with rotary embeddings, masks, soft caps and experts: outputs and gradients are those of the unsplit model."""

import pytest
import torch
import transformers
from torch import fx

from penstock.pipelining import SplitPoint, pipeline

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
FALCON = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}

FAMILIES = {
    "Llama": (SMALL, "model.layers"),
    "Gemma2": (SMALL | {"head_dim": 8, "sliding_window": 4}, "model.layers"),
    # Experts that are looped over depend on data, which cannot be traced.
    "Mixtral": (SMALL | {"num_local_experts": 4, "experts_implementation": "batched_mm"}, "model.layers"),
    "Falcon": (FALCON | {"use_cache": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}, "transformer.h"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_what_the_model_computes(family):
    settings, layers = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    example, ids = torch.randint(0, 64, (2, 2, 8))
    spec = {f"{layers}.{index}": SplitPoint.BEGINNING for index in (1, 3)}
    pipe = pipeline(model, (example,), {"labels": example}, split_spec=spec)
    assert pipe.num_stages == 3

    expected = model(ids, labels=ids)
    expected.loss.backward()
    whole = {id(parameter): parameter.grad.clone() for parameter in model.parameters()}
    aliases = dict(model.named_parameters(remove_duplicate=False))
    model.zero_grad(set_to_none=True)

    loss, logits = fx.Interpreter(pipe.split_gm).run(ids, ids)[:2]
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=0)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=0)
    loss.backward()
    found = {}
    for stage in pipe.split_gm.children():
        for name, parameter in stage.named_parameters():
            key = id(aliases[name])
            found[key] = found.get(key, 0) + parameter.grad
    assert found.keys() == whole.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, whole[key], rtol=0, atol=1e-10)
