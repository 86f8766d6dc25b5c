"""Parameters that several stages of a traced model use: each has a copy, and the gradients of the copies are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.execution.ties import Tie


def sum_gradients(ties: Sequence[Tie], stages: Iterable[Any]) -> None:
    """Give every copy of a parameter the sum of all copies' gradients, added in the order of their stages.

    Args:
        ties: the parameters.
        stages: the stages of this rank; all ranks that have a copy call this.
    """
    here = {stage.stage_index: stage for stage in stages}
    found = [(tie, gradients) for tie in ties if (gradients := _gradients(tie, here))]
    messages = [message for tie, gradients in found for message in _messages(tie, here, gradients)]
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    for tie, gradients in found:
        total = _sum([gradients[stage] for stage, _ in tie.members])
        for copy in _copies(tie, here).values():
            copy.grad = total.clone()


def _copies(tie: Tie, here: dict[int, Any]) -> dict[int, torch.nn.Parameter]:
    """The copies that are on this rank, by stage."""
    return {stage: here[stage].submod.get_parameter(name) for stage, name in tie.members if stage in here}


def _gradients(tie: Tie, here: dict[int, Any]) -> dict[int, torch.Tensor]:
    """The gradients of all copies, by stage: those of this rank, and memory for the others; none if not needed here."""
    copies = _copies(tie, here)
    if not any(copy.requires_grad for copy in copies.values()):
        return {}
    some = next(iter(copies.values()))
    found = {stage: torch.empty_like(some) for stage, _ in tie.members}
    for stage, copy in copies.items():
        found[stage] = torch.zeros_like(copy) if copy.grad is None else copy.grad.contiguous()
    return found


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _messages(tie: Tie, here: dict[int, Any], gradients: dict[int, torch.Tensor]) -> list[dist.P2POp]:
    """What goes between the ranks of a tie, in the order of stages: each gradient once to every other rank."""
    some = next(iter(here.values()))
    rank_of, mine = some.stage_index_to_group_rank, some.group_rank
    ranks = sorted({rank_of[stage] for stage, _ in tie.members})
    return [
        dist.P2POp(dist.isend if owner == mine else dist.irecv, gradients[stage], group=some.group, group_peer=peer)
        for stage, _ in tie.members
        for owner in [rank_of[stage]]
        for peer in ([rank for rank in ranks if rank != mine] if owner == mine else [owner])
    ]
