"""Trains a Hugging Face model, as it is, on several ranks.

    penstock run --ranks 2 examples/huggingface.py
    torchrun --nproc-per-node 2 examples/huggingface.py

Every rank calls the same code with the same batch. The split finds out what goes from stage to stage and that the head
shares the embedding's weight; each rank makes only its own parameters real. The loss is the model's own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps
from penstock.runtime import Pipeline

dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank builds the same model
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    vocab_size=128,
    tie_word_embeddings=True,
)

schedule = ps.build("ZBVZeroBubble", ranks=dist.get_world_size(), microbatches=4)
split = ps.split(lambda: LlamaForCausalLM(config), stages=schedule.stages)
pipe = Pipeline(split, schedule)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

tokens = torch.randint(128, (8, 32), generator=torch.Generator().manual_seed(0))
for step in range(8):
    pipe.step(input_ids=tokens, labels=tokens, return_outputs=False)
    optimizer.step()
    optimizer.zero_grad()
    if pipe.loss is not None:  # on the rank of the last stage
        print(f"step {step} loss {pipe.loss:.4f}")

pipe.close()
dist.destroy_process_group()
