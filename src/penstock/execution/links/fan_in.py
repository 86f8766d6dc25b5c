"""The end of a stage that several links enter: its arguments are the values of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from penstock.execution.channel import Progress
    from penstock.execution.links import GiveGradients, LinkEnds, Take, Taken, Tensors, Watched
    from penstock.execution.shared_memory import Kin
    from penstock.execution.step import Step


class FanIn:
    """Takes from all links of a stage, by source, and passes each the gradients of its own values.

    Args:
        links: the links, by source.
        stage: the stage that they lead to.
        microbatches: how many microbatches there are.
        returning: for each link, whether gradients go back over it.
        progress: shows what is waited for.
    """

    def __init__(
        self, links: Sequence[LinkEnds], stage: int, microbatches: int, returning: Sequence[bool], progress: Progress
    ) -> None:
        self._links = links
        self._progress = progress
        self._base = stage * microbatches
        self._returning = returning

    def take(self, microbatch: int) -> Take:
        """Get what the stage is called with."""
        slot, progress = self._base + microbatch, self._progress
        takes = [(link.take(microbatch), link.awaits(microbatch, gradients=False)) for link in self._links]

        def take(step: Step) -> Taken:
            found = []
            for take_one, progress.awaited in takes:
                found.append(take_one(step))
            progress.awaited = None
            taken = [one for one in found if one is not None]
            if len(taken) < len(found):
                return None
            step.input_counts[slot] = [len(inputs) for _, inputs, _ in taken]
            args = tuple([arg for args, _, _ in taken for arg in args])
            inputs = [tensor for _, inputs, _ in taken for tensor in inputs]
            return args, inputs, _watch_all([watched for _, _, watched in taken if watched is not None])

        return take

    def give_gradients(self, microbatch: int) -> GiveGradients:
        """Keep the gradients of the inputs for the stages that they came from."""
        slot = self._base + microbatch
        gives = [
            link.give_gradients(microbatch) if returning else None
            for link, returning in zip(self._links, self._returning, strict=True)
        ]

        def give(step: Step, gradients: Sequence[torch.Tensor | None], inputs: Tensors) -> None:
            begin = 0
            for count, give_one in zip(step.input_counts.pop(slot), gives, strict=True):
                end = begin + count
                if give_one is not None:
                    give_one(step, gradients[begin:end], inputs[begin:end])
                begin = end

        return give


class _WatchedLinks:
    """Checks, when a stage has run, the inputs that came over several links.

    Attributes:
        tensors: those that share memory, in groups.
    """

    __slots__ = ("_watched", "tensors")

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        self.tensors: Kin = [group for one in watched for group in one.tensors]

    def check(self) -> None:
        """Refuse a stage that has modified one of them in place."""
        for one in self._watched:
            one.check()


def _watch_all(watched: Sequence[Watched]) -> Watched | None:
    if len(watched) > 1:
        return _WatchedLinks(watched)
    return watched[0] if watched else None
