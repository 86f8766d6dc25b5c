"""Splits the masks of flex attention into microbatches."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch.nn.attention.flex_attention import BlockMask

from penstock.execution.microbatches.specs import register_splitter
from penstock.execution.microbatches.split import sizes


def split_mask(mask: BlockMask, microbatches: int) -> list[BlockMask]:
    """Take the rows of a mask for each microbatch, which counts its samples from 0."""
    batch = mask.shape[0]
    if batch == 1:
        return [mask] * microbatches
    lengths = sizes(batch, microbatches)
    starts = accumulate(lengths[:-1], initial=0)
    return [_rows(mask, start, length) for start, length in zip(starts, lengths, strict=True)]


def _rows(mask: BlockMask, start: int, length: int) -> BlockMask:
    rows = mask[start : start + length]
    # A tensor: a number would recompile the attention for each microbatch.
    offset = torch.tensor(start, device=mask.kv_num_blocks.device)
    whole = mask.mask_mod

    def rows_mod(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return whole(batch + offset, head, query, key)

    rows.mask_mod = rows_mod
    return rows


register_splitter(BlockMask, split_mask, size=lambda mask: None if mask.shape[0] == 1 else int(mask.shape[0]))
