"""Small random models of many kinds that a split has to keep equal, with the batches to train them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

WIDTH, LAYERS, LENGTH, WORDS, IMAGE = 8, 8, 6, 40, 35


class Batch(NamedTuple):
    """What a step is called with, on every rank."""

    args: tuple[torch.Tensor, ...] = ()
    kwargs: dict[str, torch.Tensor] = {}  # noqa: RUF012 - a field of a tuple, which is not changed
    target: torch.Tensor | None = None


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


class UNet(nn.Module):
    """Layers down and up again; the output of each on the way down is used on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // 2)])
        self.up = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS // 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).tanh()
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1)).tanh()
        return x


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        # Without a bias: that of the keys has a gradient of nothing but rounding errors, which AdamW would enlarge.
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(self.norm(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))
        return x + self.mlp(x)


class Tied(nn.Module):
    """A transformer whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) + self.positions
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))


class SeededDropout(nn.Module):
    """A layer with dropout; the seed comes with the batch, so the order in which microbatches run does not matter."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seeds[0]) * LAYERS + self.number)
            return x + self.dropout(self.linear(x).tanh())


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SeededDropout(number) for number in range(LAYERS)])

    def forward(self, x: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, seeds)
        return x


class Several(nn.Module):
    """Two inputs and two keyword arguments that the layers use in turn; three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // 2)])
        self.right = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // 2)])

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, *, scale: torch.Tensor, mask: torch.Tensor | None = None
    ) -> dict[str, Any]:
        for left, right in zip(self.left, self.right, strict=True):
            x, y = x + left(y).tanh() * scale, y * right(x).sigmoid()
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return {"sum": x + y, "parts": (x, y.mean(1, keepdim=True))}


def several_loss(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    """A loss of all three outputs."""
    x, y = output["parts"]
    return functional.mse_loss(output["sum"], target) + (x * x).mean() + y.sin().mean()


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The cross entropy of every token."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Own(NamedTuple):
    """A model of this file."""

    build: Callable[[], nn.Module]
    loss_fn: Callable[..., torch.Tensor] = functional.mse_loss


def _mlp() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


OWN = {
    "mlp": Own(_mlp),
    "residual": Own(Residual),
    "unet": Own(UNet),
    "tied": Own(Tied, token_loss),
    "dropout": Own(Dropping),
    "several": Own(Several, several_loss),
}

TOKENS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"n_embd": 8, "n_head": 2, "n_layer": LAYERS, "n_positions": 16}
WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
DECODER = {
    **TOKENS,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": LAYERS // 2, "num_heads": 2}
EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "experts_implementation": "eager"}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": LAYERS // 2,
    "num_attention_heads": 2,
    "image_size": 4,
    "patch_size": 2,
}
#: Class of transformers, and the arguments of its configuration.
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**GPT2, **TOKENS, **WITHOUT_DROPOUT}),
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen2": ("Qwen2ForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 4}),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 3}),
    "gemma2": ("Gemma2ForCausalLM", {**DECODER, "head_dim": 4, "sliding_window": 3}),
    "mixtral": ("MixtralForCausalLM", {**DECODER, **EXPERTS}),
    "t5": ("T5ForConditionalGeneration", {**T5, **TOKENS, "decoder_start_token_id": 0, "dropout_rate": 0.0}),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **DECODER},
            "vision_config": VISION,
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
    ),
}
FAMILIES = [*OWN, *HUGGING_FACE]


def build(family: str) -> nn.Module:
    """The model; the same in every process."""
    torch.manual_seed(1)
    if family in OWN:
        return OWN[family].build()
    import transformers

    name, arguments = HUGGING_FACE[family]
    kind = getattr(transformers, name)
    return kind(kind.config_class(**arguments))


def draw_batch(family: str, samples: int, step: int) -> Batch:
    """The batch of a step."""
    random = torch.Generator().manual_seed(step)
    if family in HUGGING_FACE:
        return Batch(kwargs=_text(family, samples, random))
    first, second, target = (torch.randn(samples, WIDTH, generator=random) for _ in range(3))
    if family == "tied":
        ids = torch.randint(WORDS, (samples, LENGTH), generator=random)
        return Batch((ids,), target=ids.roll(-1, 1))
    if family == "several":
        mask = torch.rand(samples, WIDTH, generator=random) < 0.2
        return Batch((first, second), {"scale": torch.rand(samples, 1, generator=random), "mask": mask}, target)
    if family == "dropout":
        return Batch((first,), {"seeds": torch.arange(samples) + 100 * step}, target)
    return Batch((first,), target=target[:, :3] if family == "residual" else target)


def _text(family: str, samples: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """With padding, and labels that do not count."""
    ids = torch.randint(3, IMAGE, (samples, LENGTH), generator=random)
    mask = torch.ones_like(ids)
    mask[::2, -1] = 0
    labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=random) < 0.3), -100)
    if family != "llava":
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    ids[:, :4] = IMAGE
    pixels = torch.randn(samples, 3, 4, 4, generator=random)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "labels": labels}
