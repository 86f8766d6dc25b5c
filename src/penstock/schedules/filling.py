"""Microbatches that are not there: a pattern for more of them than asked for is cut to size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.ir import packed

if TYPE_CHECKING:
    from penstock.ir.packed import Codes


def only_real(codes: Codes, microbatches: int) -> Codes:
    """Drop the microbatches that only filled up a schedule to a size with a pattern.

    No action waits for one of another microbatch, so what is left of an order that runs still runs.
    """
    wanted = packed.microbatches(codes) < microbatches
    return codes if wanted.all() else packed.select(codes, wanted)
