"""Notes what a rank sends and receives in a step: bytes by stage, and when messages were sent and waited for."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from penstock.ir.schedule import Schedule


@dataclass
class StepMessages:
    """The messages of one step on one rank; a tag says which link a message goes over, and in which direction.

    Attributes:
        tags: how many tags each link has.
        size: the bytes sent, by sending and receiving stage.
        sent: when each message had been posted, by tag.
        awaited: when the rank began to wait for each message, and when it had it, by tag.
    """

    tags: int
    size: Counter[tuple[int, int]] = field(default_factory=Counter)
    sent: dict[int, float] = field(default_factory=dict)
    awaited: dict[int, tuple[float, float]] = field(default_factory=dict)


class SentMessages:
    """Notes messages, step by step.

    Attributes:
        steps: those of each step.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.steps: list[StepMessages] = []
        self._is_open = False
        self.use(schedule)

    def use(self, schedule: Schedule) -> None:
        """Expect the messages of this schedule from now on."""
        self._links = schedule.links
        self._tags = 2 * schedule.microbatches

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the actions of a step: what is sent outside of them does not count."""
        self.steps.append(StepMessages(self._tags))
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def note_sent(self, tensor: torch.Tensor, tag: int, posted: float) -> None:
        """Count a tensor that was sent; several with one tag are one message."""
        if self._is_open:
            source, target, *_ = self._links[tag // self._tags]
            self.steps[-1].size[(target, source) if tag % 2 else (source, target)] += tensor.nbytes
            self.steps[-1].sent[tag] = posted

    def note_awaited(self, tag: int, begin: float, end: float) -> None:
        """Note how long a tensor was waited for."""
        if self._is_open:
            first, _ = self.steps[-1].awaited.get(tag, (begin, end))
            self.steps[-1].awaited[tag] = first, end
