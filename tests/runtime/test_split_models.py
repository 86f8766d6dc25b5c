"""Models that ``penstock.split`` divides train in a pipeline as they do in one piece, on the same microbatches."""

from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import DistributedTransport, Pipeline
from runtime.wired import random_schedule

NAMES = ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
MICROBATCHES, SAMPLES, LENGTH, WORDS = 3, 7, 6, 40
LAYERS = 8
CLOSE = 1e-10
TOKENS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


class UNet(nn.Module):
    """Layers down and up again; the output of each on the way down is added on the way up."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(width, width) for _ in range(LAYERS // 2)])
        self.up = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(LAYERS // 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).tanh()
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1)).tanh()
        return x


def build(family: str) -> nn.Module:
    """A small random model; the same in every process."""
    torch.manual_seed(1)
    if family == "unet":
        return UNet()
    import transformers

    if family == "gpt2":
        sizes = {"n_embd": 8, "n_head": 2, "n_layer": LAYERS, "n_positions": 16}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **TOKENS, **WITHOUT_DROPOUT))
    if family == "llama":
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **TOKENS))
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": LAYERS // 2, "num_heads": 2}
    options = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **options, **TOKENS))


def draw_batch(family: str, step: int) -> dict[str, torch.Tensor]:
    """What a step is called with, on every rank."""
    random = torch.Generator().manual_seed(step)
    if family == "unet":
        return {"x": torch.randn(SAMPLES, 4, generator=random), "target": torch.randn(SAMPLES, 4, generator=random)}
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=random)
    mask = torch.ones_like(ids)
    mask[::2, -1] = 0
    labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=random) < 0.3), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train_whole(model: nn.Module, family: str, batch: dict[str, torch.Tensor]) -> list[float]:
    """Run the unsplit model on the same microbatches; the loss of each, weighted as its mean is taken."""
    parts = [dict(zip(batch, part, strict=True)) for part in zip(*_chunks(batch), strict=True)]
    if family == "unet":
        weights = [len(part["target"]) for part in parts]
        losses = [functional.mse_loss(model(part["x"]), part["target"]) for part in parts]
    else:
        begin = 0 if family == "t5" else 1
        weights = [int((part["labels"][:, begin:] != -100).sum()) for part in parts]
        losses = [model(**part).loss for part in parts]
    sum(weight / sum(weights) * loss for weight, loss in zip(weights, losses, strict=True)).backward()
    return [loss.item() for loss in losses]


def _chunks(batch: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    least, more = divmod(SAMPLES, MICROBATCHES)
    sizes = [least + 1] * more + [least] * (MICROBATCHES - more)
    return [list(tensor.split(sizes)) for tensor in batch.values()]


def differences(family: str, schedule: ps.Schedule, transport: DistributedTransport) -> list[str]:
    whole, model = build(family), build(family)
    example = {name: value for name, value in draw_batch(family, 0).items() if name != "target"}
    given = {"example": ((), example)} if family == "unet" else {}
    options = {"loss_fn": functional.mse_loss} if family == "unet" else {}
    # The stages are compared with the model below, so the check of the split itself would only take time.
    split = ps.split(model, stages=schedule.stages, check=False, **given)
    pipe = Pipeline(split, schedule, transport=transport, **options)
    mine = {name: one for stage in pipe.stages.values() for name, one in stage.module.named_parameters()}
    ours = torch.optim.AdamW(set(mine.values()), lr=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    # By all names: a tied one has several.
    expected = dict(whole.named_parameters(remove_duplicate=False))
    where, found = f"{family}, {schedule.metadata.get('name', 'custom')}, {schedule.stages} stages", []
    for step in range(3):
        batch = draw_batch(family, step)
        losses: list[torch.Tensor] = []
        pipe.step(**batch, losses=losses)
        wanted = train_whole(whole, family, batch)
        if pipe.has_last and not torch.allclose(torch.tensor([float(one) for one in losses]), torch.tensor(wanted)):
            found.append(f"step {step}: losses {losses}, expected {wanted}")
        for name, one in mine.items():
            gap = _gap(one.grad, expected[name].grad)
            found += [f"step {step}: the gradient of {name} is off by {gap:.3g}"] if gap > CLOSE else []
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    found += [f"{name} is off by {gap:.3g}" for name, one in mine.items() if (gap := _gap(one, expected[name])) > CLOSE]
    if sorted(stage for stage in pipe.stages) != list(schedule.placement.stages_of(transport.rank)):
        found.append(f"stages {sorted(pipe.stages)}")
    return [f"{where}: {each}" for each in found]


def _gap(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    one, other = (torch.zeros(1) if each is None else each.detach() for each in (one, other))
    return (one - other).abs().max().item()


def compared(_rank: int, _ranks: int, family: str, schedules: list[ps.Schedule], *, group) -> list[str]:
    transport = DistributedTransport(group, timeout=60.0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return [each for schedule in schedules for each in differences(family, schedule, transport)]
    finally:
        torch.set_default_dtype(default)
        transport.close()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", ["unet", "gpt2", "llama", "t5"])
def test_models_train_as_in_one_piece(workers, family, ranks):
    """Over three steps of AdamW. Uneven microbatches, padding, and labels that do not count."""
    schedules = [ps.build(name, ranks=ranks, microbatches=MICROBATCHES) for name in NAMES]
    schedules.append(random_schedule(Random(7), ranks, 5, MICROBATCHES, split=True))
    found = workers.run(compared, family, schedules, ranks=ranks, limit=120)
    assert [each for rank in found for each in rank] == []
