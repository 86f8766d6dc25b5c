"""Lets stages vote on whether they find shapes by a dry run: either all are run or none.

If each stage has examples enough, none is. The votes go from stage to stage, and the outcome back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from penstock.execution.microbatch_kinds import find_kinds
from penstock.pipelining._stage.base import _PipelineStageBase
from penstock.pipelining._stage.sharded_batch import NOT_KNOWN, Samples
from penstock.pipelining._utils import InferenceMode, _StageMeta


class StageVotes(_PipelineStageBase):
    """A stage that votes with the others."""

    _user_meta: _StageMeta
    _inference_mode: InferenceMode | None = None
    _next_microbatches: tuple[list[Any], list[Any]] = ([], [])
    #: The samples of the batch in all, and on this rank of the first stage; None if they are not known.
    _batch_samples: Samples | None = None

    def _set_microbatches(self, arg_mbs: list[Any], kwarg_mbs: list[Any], batch: Samples | None) -> None:
        """Take, before stages are prepared, what all microbatches are called with: they may differ in shapes."""
        self._next_microbatches = arg_mbs, kwarg_mbs
        self._batch_samples = batch if self.is_first else None

    def _is_same_rank(self, other_stage: int) -> bool:
        return self.stage_index_to_group_rank[other_stage] == self.group_rank

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        """Vote, and send the next stage whether all up to here have examples enough: 1 if so, else 0.

        Beside the vote go whether a stage up to here has something to train, and the samples of the batch in all, and
        on this rank of the first stage.

        Args:
            has_backward: whether gradients are needed.
            received_acc: what the stage before has returned, on the same rank.
        """
        uneven = self.is_first and len(set(find_kinds(*self._next_microbatches)[0])) > 1
        vote = int(not uneven and not InferenceMode.needs_dynamic(self._user_meta, has_backward))
        trained_before = False
        samples = self._batch_samples or NOT_KNOWN
        if not self.is_first:
            received = self._receive_numbers(received_acc, self.stage_index - 1, 2 + len(samples)).tolist()
            vote, trained_before, samples = vote * received[0], bool(received[1]), Samples(*received[2:])
            self._batch_samples = None if samples == NOT_KNOWN else samples
        trained = self._note_training(trained_before, self._next_microbatches)
        votes = torch.tensor([vote, trained, *samples], dtype=torch.int32, device=self.device)
        if not self.is_last and not self._is_same_rank(self.stage_index + 1):
            dist.send(votes, dst=self._resolve_peer_global_rank(self.stage_index + 1), group=self.group)
        return votes

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        """Take the outcome of the vote, and send it to the stage before."""
        following = self.stage_index if self.is_last else self.stage_index + 1
        result = self._receive_numbers(received_result, following, 1)[:1]
        if not self.is_first and not self._is_same_rank(self.stage_index - 1):
            dist.send(result, dst=self._resolve_peer_global_rank(self.stage_index - 1), group=self.group)
        return result

    def _receive_numbers(self, here: torch.Tensor | None, stage: int, count: int) -> torch.Tensor:
        """Receive numbers from another stage."""
        if not self._is_same_rank(stage):
            numbers = torch.zeros(count, dtype=torch.int32, device=self.device)
            dist.recv(numbers, src=self._resolve_peer_global_rank(stage), group=self.group)
            return numbers
        if here is None:
            raise AssertionError(f"stage {self.stage_index}: the vote of stage {stage}, on the same rank, is missing")
        return here
