"""Trains a transformer that is split by hand, with one stage per rank.

    penstock run --ranks 2 examples/one_stage_per_rank.py
    torchrun --nproc-per-node 2 examples/one_stage_per_rank.py --schedule 1F1B

Every rank builds the whole model and keeps the parts of its stage. The number of ranks can be up to the number of
layers. Only the import below selects the package: with ``torch.distributed.pipelining`` the losses are the same.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from penstock.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

VOCABULARY, WIDTH, LAYERS, LENGTH = 64, 32, 4, 16


class Transformer(nn.Module):
    """A model whose parts may be None; the rest is then a stage, and parameters keep their names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict(
            {
                str(layer): nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
                for layer in range(LAYERS)
            }
        )
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run on tokens, or on the output of the previous stage."""
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if self.output is not None else x


def stage_of(model: Transformer, stage: int, stages: int) -> Transformer:
    """Remove everything from the model that does not belong to a stage."""
    first, after = stage * LAYERS // stages, (stage + 1) * LAYERS // stages
    for layer in range(LAYERS):
        if not first <= layer < after:
            del model.layers[str(layer)]
    if stage > 0:
        model.embedding = None
    if stage < stages - 1:
        model.norm = model.output = None
    return model


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    """Train for some steps; the rank of the last stage prints the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=("GPipe", "1F1B"), default="GPipe")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank builds the same model, and keeps only its stage
    module = stage_of(Transformer(), rank, stages)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[arguments.schedule]
    schedule = kind(stage, arguments.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4 * arguments.microbatches, LENGTH + 1))
    for step in range(arguments.steps):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens[:, :-1], **({"target": tokens[:, 1:], "losses": losses} if stages == 1 else {}))
        elif rank == stages - 1:
            schedule.step(target=tokens[:, 1:], losses=losses)
        else:
            schedule.step()
        optimizer.step()
        if losses:
            print(f"step {step} loss {torch.stack(losses).mean():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
