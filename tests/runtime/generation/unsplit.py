"""What the unsplit model generates, with its own ``generate`` or by a rule written out here."""

from __future__ import annotations

from typing import Any

import torch

from models.hugging_face import build

NEW = 9
PADDING = 0


def decoder(family: str) -> Any:
    """A small model with four layers, in float64 and in training mode; the same in every process.

    Its weights are larger than at the start of a training, so that it does not repeat one token forever.
    """
    model = build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith(("wte.weight", "embed_tokens.weight")):
                parameter.mul_(8.0)
    model.generation_config.pad_token_id = PADDING
    return model.train()


def draw_prompts(sequences: int = 5, tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, padded on the left, and their mask."""
    ids = torch.randint(3, 90, (sequences, tokens), generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor([tokens - number % 4 for number in range(sequences)])
    mask = torch.arange(tokens) >= tokens - lengths[:, None]
    return ids.masked_fill(~mask, PADDING), mask.long()


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the model itself generates, choosing the most probable tokens."""
    model.eval()
    if hasattr(model.config, "output_router_logits"):
        options["output_router_logits"] = False
    return model.generate(ids, attention_mask=mask, do_sample=False, **{"max_new_tokens": NEW, **options})


def sample(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    *,
    seed: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1,
) -> torch.Tensor:
    """Draw tokens without a cache: the number of a sequence picks a place on the line of all probabilities."""
    chance = torch.Generator().manual_seed(seed)
    model.eval()
    for _ in range(NEW):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, -1].float()
        numbers = torch.rand(len(ids), dtype=torch.float64, generator=chance)
        drawn = [
            _draw((row.double() / temperature).softmax(0), float(number), top_k, top_p)
            for row, number in zip(logits, numbers, strict=True)
        ]
        ids = torch.cat([ids, torch.tensor(drawn)[:, None]], 1)
        mask = torch.cat([mask, torch.ones(len(ids), 1, dtype=torch.long)], 1)
    return ids


def _draw(probabilities: torch.Tensor, number: float, top_k: int, top_p: float) -> int:
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    kept = ranked[: top_k or None]
    total = sum(float(probabilities[token]) for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        if reached < top_p:
            nucleus.append(token)
            reached += float(probabilities[token]) / total
    place = number * sum(float(probabilities[token]) for token in nucleus)
    for token in sorted(nucleus):
        place -= float(probabilities[token])
        if place < 0:
            break
    return token
