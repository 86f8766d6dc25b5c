"""Trains with all that a run needs around its steps: checkpoints, a learning rate, progress, a stop on SIGTERM.

    penstock run --ranks 2 examples/training.py run
    torchrun --nproc-per-node 2 examples/training.py run

Stop it at any time, with SIGTERM or Ctrl-C: all ranks save after the same step. The same command goes on from there,
and the losses in run/losses.txt are those of a run that was never stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.runtime import Pipeline

VOCABULARY, CONTEXT, BATCH = 64, 16, 16


class Block(nn.Module):
    """Mixes each token with those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the mixed tokens."""
        return x + self.dropout(self.mix(self.norm(x))[0])


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute the loss of a microbatch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the batch of a step: it depends on nothing else, so a run that is resumed gets the same ones."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + 3 * torch.arange(CONTEXT + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    """Train, from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints and losses are kept")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--schedule", default="ZBVZeroBubble")
    options = parser.parse_args()

    options.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every rank builds the same model, and keeps only its stages
    blocks = [Block(32) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), *blocks, nn.Linear(32, VOCABULARY))
    schedule = ps.build(options.schedule, ranks=dist.get_world_size(), microbatches=4)

    with Pipeline(ps.split(model, stages=schedule.stages), schedule, loss_fn=loss_of) as pipe:
        optimizer = ps.Optimizer(pipe, torch.optim.AdamW, lr=3e-3, max_norm=1.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        run = {"optimizer": optimizer, "scheduler": scheduler}
        done = saved = ps.load(pipe, options.folder, **run)

        with (
            ps.stop_on_signal(pipe) as stop,
            ps.ProgressLine(pipe, options.steps) as line,
            Path(options.folder, "losses.txt").open("a") as losses,
        ):
            while done < options.steps and not stop.requested():
                tokens, target = batch(done)
                pipe.step(tokens, target=target, return_outputs=False)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                done += 1
                line.update(done, loss=pipe.loss, norm=optimizer.grad_norm, tokens=tokens.numel())
                if pipe.loss is not None:  # on the rank of the last stage
                    losses.write(f"{done} {pipe.loss:.9g}\n")
                    losses.flush()
                if done % options.save_every == 0:
                    ps.save(pipe, options.folder, step=done, keep=2, wait=False, **run)
                    saved = done
            if saved != done:
                ps.save(pipe, options.folder, step=done, keep=2, **run)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
