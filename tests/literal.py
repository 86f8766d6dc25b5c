"""An independent slow oracle for the verifier: runs a schedule literally, with programs, lanes, queues and blocking.

It knows no graph and shares no code with penstock: actions are text, and the rules are written down here once more, as
a machine that executes them. Ranks run their programs; posting a transfer never blocks; a compute action blocks until
what it needs is there; lanes are queues whose heads complete when the model lets them. What cannot happen, or what is
left at the end, is the verdict.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)(\d*)(@\d+)?")

Leaf = tuple[int, str, int]
Message = tuple[str, int, int, int]  # F or B, the stage that sends it, the one that receives it, microbatch


class WrongError(Exception):
    """The schedule does something that cannot be, or cannot go on."""


def leaves(cell: str) -> list[Leaf]:
    """Stage, type and microbatch; the type of a transfer that names the other stage ends in ``@`` and that stage."""
    return [(int(stage), kind + peer, int(number or -1)) for stage, kind, number, peer in _ACTION.findall(cell)]


def chain_links(stages: int) -> list[tuple[int, int, bool]]:
    return [(stage, stage + 1, True) for stage in range(stages - 1)]


@dataclass
class Operation:
    """A posted send or receive."""

    rank: int
    peer: int
    sends: bool
    message: Message

    def __str__(self) -> str:
        label, source, target, microbatch = self.message
        stage, kind, other = (source, "SEND", target) if self.sends else (target, "RECV", source)
        return f"{stage}{kind}_{label}{microbatch}{'' if abs(stage - other) == 1 else f'@{other}'}"


@dataclass
class Machine:
    rows: list[list[str]]
    rank_of: list[int]
    microbatches: int
    buffering: str
    lanes: str
    links: list[tuple[int, int, bool]]  # source, target, whether there is a gradient
    counters: list[int] = field(default_factory=list)
    done: dict[Leaf, int] = field(default_factory=dict)
    posted: set[tuple[bool, Message]] = field(default_factory=set)
    queues: dict[object, deque[Operation]] = field(default_factory=dict)
    in_flight: dict[tuple[int, int], int] = field(default_factory=dict)
    sent: set[Message] = field(default_factory=set)
    received: set[Message] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)

    def verdict(self) -> str | None:
        """None if the schedule is right, else what is wrong first."""
        text = " ".join(cell for row in self.rows for cell in row)
        self.communicates = "SEND" in text or "RECV" in text
        self.shards = "UNSHARD" in text or "RESHARD" in text
        self.counters = [0] * len(self.rows)
        try:
            self.run()
            self.check_end()
        except WrongError as reason:
            return str(reason)
        return None

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                while self.counters[rank] < len(row) and self.step(rank, leaves(row[self.counters[rank]])):
                    self.counters[rank] += 1
                    moved = True
            while self.complete_some():
                moved = True
        for rank, row in enumerate(self.rows):
            if self.counters[rank] < len(row):
                raise WrongError(f"rank {rank} is stuck at {row[self.counters[rank]]}")
        if any(self.queues.values()):
            raise WrongError("a transfer never completes")

    # Programs -------------------------------------------------------------------------------------------------------

    def step(self, rank: int, cell: list[Leaf]) -> bool:
        """Run the next cell of a rank if it can run."""
        for stage, kind, microbatch in cell:
            if stage >= len(self.rank_of) or self.rank_of[stage] != rank:
                raise WrongError(f"{stage}{kind} on rank {rank}")
            if microbatch >= self.microbatches:
                raise WrongError(f"microbatch {microbatch}")
        if cell and cell[0][1] in ("F", "B", "I", "W"):
            return self.compute(rank, cell)
        for leaf in cell:
            self.manage(rank, *leaf)
        return True

    def compute(self, rank: int, cell: list[Leaf]) -> bool:
        for stage, kind, microbatch in cell:
            if self.shards and stage not in self.gathered:
                raise WrongError(f"{stage}{kind}{microbatch} on a resharded stage")
        if not all(self.has_inputs(rank, leaf) for leaf in cell):
            return False
        for stage, kind, microbatch in cell:
            if (stage, kind, microbatch) in self.done:
                raise WrongError(f"{stage}{kind}{microbatch} twice")
            self.done[stage, kind, microbatch] = 1
        return True

    def has_inputs(self, rank: int, leaf: Leaf) -> bool:
        stage, kind, microbatch = leaf

        def made(kinds: str, where: int) -> bool:
            found = [(where, letter, microbatch) for letter in kinds]
            return any(one in self.done for one in found)

        def arrived(kinds: str, where: int, label: str) -> bool:
            if self.rank_of[where] == rank or not self.communicates:
                return made(kinds, where)
            return (label, where, stage, microbatch) in self.received

        if kind == "F":
            return all(arrived("F", source, "F") for source, target, _ in self.links if target == stage)
        if kind == "W":
            return made("I", stage)
        consumers = [target for source, target, gradient in self.links if source == stage and gradient]
        return made("F", stage) and all(arrived("BI", target, "B") for target in consumers)

    def manage(self, rank: int, stage: int, kind: str, microbatch: int) -> None:
        """Actions that never block."""
        if kind == "UNSHARD":
            if stage in self.gathered:
                raise WrongError(f"{stage}UNSHARD twice")
            self.gathered.add(stage)
        elif kind == "RESHARD":
            if stage not in self.gathered:
                raise WrongError(f"{stage}RESHARD of nothing")
            self.gathered.remove(stage)
        elif kind == "REDUCE_GRAD":
            if stage in self.reduced:
                raise WrongError(f"{stage}REDUCE_GRAD twice")
            self.reduced.add(stage)
            self.check_nothing_follows(rank, stage)
        else:
            self.post(rank, stage, kind, microbatch)

    def check_nothing_follows(self, rank: int, stage: int) -> None:
        rest = [leaf for cell in self.rows[rank][self.counters[rank] :] for leaf in leaves(cell)]
        if any(other == stage and kind in ("B", "W") for other, kind, _ in rest):
            raise WrongError(f"{stage}REDUCE_GRAD is early")
        row = [leaf for cell in self.rows[rank] for leaf in leaves(cell)]
        if not any(other == stage and kind in ("B", "W") for other, kind, _ in row):
            raise WrongError(f"{stage}REDUCE_GRAD of nothing")

    def post(self, rank: int, stage: int, kind: str, microbatch: int) -> None:
        plain, _, named = kind.partition("@")
        label = plain[-1]
        sends = plain.startswith("SEND")
        other = int(named) if named else stage + (1 if (label == "F") == sends else -1)
        ends = (min(stage, other), max(stage, other))
        if not any(link[:2] == ends and (label == "F" or link[2]) for link in self.links):
            raise WrongError(f"{stage}{kind} goes nowhere")
        peer = self.rank_of[other]
        if peer == rank:
            raise WrongError(f"{stage}{kind} to itself")
        message = (label, *((stage, other) if sends else (other, stage)), microbatch)
        if (sends, message) in self.posted:
            raise WrongError(f"{stage}{kind}{microbatch} twice")
        self.posted.add((sends, message))
        if sends and not any((stage, letter, microbatch) in self.done for letter in ("F" if label == "F" else "BI")):
            raise WrongError(f"{stage}{kind}{microbatch} of nothing")
        operation = Operation(rank, peer, sends, message)
        self.queues.setdefault(self.lane(operation), deque()).append(operation)

    # Lanes ----------------------------------------------------------------------------------------------------------

    def lane(self, operation: Operation) -> object:
        """The queue that an operation stands in."""
        return {
            "rank": operation.rank,
            "pair": (operation.rank, operation.peer),
            "direction": (operation.rank, operation.peer, operation.sends),
            "message": (operation.sends, operation.message),
        }[self.lanes]

    def complete_some(self) -> bool:
        """Complete one operation, or one pair, at the head of its lane."""
        heads = [queue[0] for queue in self.queues.values() if queue]
        for head in heads:
            channel = (head.rank, head.peer) if head.sends else (head.peer, head.rank)
            if self.buffering == "rendezvous":
                partner = next((o for o in heads if o.sends != head.sends and o.message == head.message), None)
                if partner is None:
                    continue
                self.finish(head)
                self.finish(partner)
                return True
            if head.sends:
                room = self.buffering == "eager" or self.lanes == "message"
                capacity = 0 if room else int(self.buffering.removeprefix("bounded(").removesuffix(")"))
                if room or self.in_flight.get(channel, 0) < capacity:
                    self.in_flight[channel] = self.in_flight.get(channel, 0) + 1
                    self.finish(head)
                    return True
            elif head.message in self.sent:
                self.in_flight[channel] -= 1
                self.finish(head)
                return True
        return False

    def finish(self, operation: Operation) -> None:
        self.queues[self.lane(operation)].popleft()
        (self.sent if operation.sends else self.received).add(operation.message)

    # The end --------------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        trains = any(kind != "F" for _, kind, _ in self.done)
        for stage in range(len(self.rank_of)):
            for microbatch in range(self.microbatches):
                kinds = {kind for kind in "FBIW" if (stage, kind, microbatch) in self.done}
                if kinds not in ([{"F", "B"}, {"F", "I", "W"}] if trains else [{"F"}]):
                    raise WrongError(f"stage {stage}, microbatch {microbatch} has run {sorted(kinds)}")
            if self.reduced and trains and stage not in self.reduced:
                raise WrongError(f"stage {stage} is not reduced")


def verdict(
    rows: list[list[str]],
    rank_of: list[int],
    microbatches: int,
    buffering: str,
    lanes: str,
    links: list[tuple[int, int, bool]] | None = None,
) -> str | None:
    """None if the schedule runs to its end and everything has been done; else what is wrong."""
    links = chain_links(len(rank_of)) if links is None else links
    return Machine(rows, rank_of, microbatches, buffering, lanes, links).verdict()
