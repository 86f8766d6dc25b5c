"""An independent slow oracle for the simulator: events on a heap, programs, and lanes that are queues.

It knows no graph and shares no code with penstock: actions are text, times are fractions, and the rules are written
down here once more, as a machine that runs them.

A rank takes ``dispatch`` to get to each of its actions. Sends and receives it posts, and goes on; anything else runs
when what it needs from other ranks has arrived. A posted operation stands in the queue of its lane. Under rendezvous a
transfer sets out when both sides are at the heads of their queues, and holds both until it has arrived. Otherwise a
send at the head sets out at once (if bounded: when few enough are under way to that rank) and holds its queue until it
has arrived; a receive at the head ends when its message is there.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict, deque
from dataclasses import dataclass, field
from fractions import Fraction

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)(\d*)(@\d+)?")


def leaves(cell):
    """Stage, type and microbatch; the type of a transfer that names the other stage ends in ``@`` and that stage."""
    return [(int(stage), kind + peer, int(number or -1)) for stage, kind, number, peer in _ACTION.findall(cell)]


@dataclass
class Prices:
    """Lists of one per stage; for transfers and waiting values, dicts by the source and the target of a link."""

    forward: list
    backward_input: list
    backward_weight: list
    backward: list
    transfer_forward: dict
    transfer_backward: dict  # of the links that have a gradient
    waiting: dict
    unshard: list
    reduce: list
    activation: list
    input_release: list
    static: list
    dispatch: Fraction = Fraction(0)
    overlap: Fraction = Fraction(1)

    def time(self, cell):
        fields = {"F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weight,
                  "UNSHARD": self.unshard, "REDUCE_GRAD": self.reduce}  # fmt: skip
        parts = [fields[kind][stage] if kind in fields else Fraction(0) for stage, kind, _ in leaves(cell)]
        return sum(parts) * (self.overlap if len(parts) > 1 else 1)

    def transfer(self, message):
        label, sender, receiver, _ = message
        return self.transfer_forward[sender, receiver] if label == "F" else self.transfer_backward[receiver, sender]


@dataclass
class Simulation:
    rows: list
    rank_of: list
    prices: Prices
    buffering: str
    lanes: str
    starts: dict = field(default_factory=dict)  # (rank, place) -> time
    ends: dict = field(default_factory=dict)

    def run(self):
        self.communicates = any("SEND" in cell or "RECV" in cell for row in self.rows for cell in row)
        self.has_backward = any(kind in "BI" for row in self.rows for cell in row for _, kind, _ in leaves(cell))
        self.heap, self.counter = [], 0
        self.place = [0] * len(self.rows)
        self.reached = [None] * len(self.rows)  # whether the rank has got to the action at its place, by now
        self.running = [False] * len(self.rows)
        self.queues = defaultdict(deque)
        self.reached_at, self.posted_at, self.sent_from = {}, {}, {}
        self.received_at, self.held, self.left = {}, {}, {}
        self.moving, self.arrived, self.received, self.made = set(), set(), set(), {}
        self.under_way = defaultdict(int)
        self.level = [sum((self.prices.static[s] for s, r in enumerate(self.rank_of) if r == rank), Fraction(0))
                      for rank in range(len(self.rows))]  # fmt: skip
        self.peaks = list(self.level)
        for rank in range(len(self.rows)):
            self.go_on(rank, Fraction(0))
        while self.heap:
            now = self.heap[0][0]
            while self.heap and self.heap[0][0] == now:
                heapq.heappop(self.heap)[2](now)
            while any([self.try_compute(now), self.try_lanes(now)]):
                pass
            # what was started and takes no time is on the heap for now: it comes next
        assert all(place == len(row) for place, row in zip(self.place, self.rows, strict=True)), "stuck"
        for rank in range(len(self.rows)):
            self.count_waiting(rank)
        return self

    def count_waiting(self, rank):
        """Add values that have arrived to what the rank holds while it runs, and between two actions."""
        runs = [
            (place, cell) for place, cell in enumerate(self.rows[rank]) if "SEND" not in cell and "RECV" not in cell
        ]
        values = [
            (self.arrival(source, stage, microbatch), place, self.prices.waiting[source, stage])
            for place, cell in runs
            for stage, kind, microbatch in leaves(cell)
            if kind == "F"
            for source, target in self.prices.transfer_forward
            if target == stage
        ]
        values = [(when, place, amount) for when, place, amount in values if when < self.starts[rank, place]]
        for number, (place, _) in enumerate(runs):
            start, end = self.starts[rank, place], self.ends[rank, place]
            following = self.starts[rank, runs[number + 1][0]] if number + 1 < len(runs) else end
            later = [(when, amount) for when, user, amount in values if user > place]
            during = sum(amount for when, amount in later if when < end)
            after = sum(amount for when, amount in later if when < following)
            first = sum(amount for when, user, amount in values if when < start) if number == 0 else 0
            static = sum(self.prices.static[s] for s, home in enumerate(self.rank_of) if home == rank)
            levels = [self.held[rank, place] + during, self.left[rank, place] + after, static + first]
            self.peaks[rank] = max(self.peaks[rank], *levels)

    def arrival(self, source, target, microbatch):
        """When a value is on the rank of its target."""
        message = ("F", source, target, microbatch)
        made = self.made["F", source, microbatch]
        if self.rank_of[source] == self.rank_of[target]:
            return made
        return self.received_at[message] if self.communicates else made + self.prices.transfer(message)

    def at(self, time, what):
        self.counter += 1
        heapq.heappush(self.heap, (time, self.counter, what))

    def go_on(self, rank, now):
        """The rank takes its time to get to the next action."""
        if self.place[rank] < len(self.rows[rank]):
            self.at(now + self.prices.dispatch, lambda then: self.get_to(rank, then))

    def get_to(self, rank, now):
        cell = self.rows[rank][self.place[rank]]
        self.reached_at[rank, self.place[rank]] = now
        if "SEND" in cell or "RECV" in cell:
            self.post(rank, cell, self.place[rank])
            self.place[rank] += 1
            self.go_on(rank, now)
        else:
            self.reached[rank] = self.place[rank]

    def post(self, rank, cell, place):
        [(stage, kind, microbatch)] = leaves(cell)
        kind, _, named = kind.partition("@")
        sends = kind.startswith("SEND")
        further = kind in ("SEND_F", "RECV_B")
        other = int(named) if named else stage + (1 if further else -1)
        peer = self.rank_of[other]
        message = (kind[-1], *((stage, other) if sends else (other, stage)), microbatch)
        lane = {"rank": (rank,), "pair": (rank, peer), "direction": (rank, peer, sends), "message": (rank, cell)}
        self.queues[lane[self.lanes]].append((sends, message, rank, peer, place))
        if sends:
            self.sent_from[message] = (rank, place)

    def needs(self, cell, rank):
        """The messages that a compute action needs; without any transfers, the actions that make them."""
        for stage, kind, microbatch in leaves(cell):
            before = [("F", source, "F") for source, target in self.prices.transfer_forward if target == stage]
            after = [("B", target, "BI") for source, target in self.prices.transfer_backward if source == stage]
            for label, other, makers in before if kind == "F" else after if kind in "BI" else ():
                if self.rank_of[other] != rank:
                    yield (label, other, stage, microbatch), makers

    def state(self, message, makers, when):
        """What a message is waiting for at a time, after the run: unmade, unsent, lane, transfer; or there."""
        _, stage, _, microbatch = message
        made = next(self.made[maker, stage, microbatch] for maker in makers if (maker, stage, microbatch) in self.made)
        if when < made:
            return "unmade"
        if not self.communicates:
            return "transfer" if when < made + self.prices.transfer(message) else "there"
        send = self.sent_from[message]
        if when < self.reached_at[send]:
            return "unsent"
        if when < self.starts[send]:
            return "lane"
        return "transfer" if when < self.ends[send] else "lane"

    def is_there(self, message, makers, now):
        if self.communicates:
            return message in self.received
        _, stage, _, microbatch = message
        done = [self.made[maker, stage, microbatch] for maker in makers if (maker, stage, microbatch) in self.made]
        if not done:
            return False
        if now < done[0] + self.prices.transfer(message):
            if ("timer", message) not in self.moving:
                self.moving.add(("timer", message))
                self.at(done[0] + self.prices.transfer(message), lambda then: None)
            return False
        return True

    def try_compute(self, now):
        moved = False
        for rank, row in enumerate(self.rows):
            place = self.place[rank]
            if self.reached[rank] != place or self.running[rank] or place >= len(row):
                continue
            if not all(self.is_there(message, makers, now) for message, makers in self.needs(row[place], rank)):
                continue
            self.running[rank] = True
            self.starts[rank, place] = now
            for stage, kind, _ in leaves(row[place]):
                self.level[rank] += self.prices.activation[stage] if kind == "F" else 0
            self.peaks[rank] = max(self.peaks[rank], self.level[rank])
            self.held[rank, place] = self.level[rank]
            self.at(now + self.prices.time(row[place]), lambda then, rank=rank: self.finish(rank, then))
            moved = True
        return moved

    def finish(self, rank, now):
        place = self.place[rank]
        self.ends[rank, place] = now
        for stage, kind, microbatch in leaves(self.rows[rank][place]):
            self.made[kind, stage, microbatch] = now
            share = self.prices.input_release[stage]
            released = {"B": 1, "I": share, "W": 1 - share}.get(kind, 0)
            if kind == "F" and not self.has_backward:
                released = 1
            self.level[rank] -= released * self.prices.activation[stage]
        self.left[rank, place] = self.level[rank]
        self.running[rank] = False
        self.place[rank] += 1
        self.go_on(rank, now)

    def try_lanes(self, now):
        moved = False
        heads = {(head[0], head[1]): lane for lane, queue in self.queues.items() if queue for head in [queue[0]]}
        for (sends, message), lane in heads.items():
            if not self.queues[lane] or (sends, message) in self.moving:
                continue
            _, _, rank, peer, place = self.queues[lane][0]
            if self.buffering == "rendezvous":
                if sends and (False, message) in heads:
                    moved = self.set_out_together(message, lane, heads[False, message], now)
            elif sends:
                limit = int(self.buffering[8:-1]) if self.buffering.startswith("bounded") else None
                free = limit is None or self.lanes == "message" or self.under_way[rank, peer] < limit
                if free:
                    self.under_way[rank, peer] += 1
                    self.moving.add((True, message))
                    self.starts[rank, place] = now
                    self.at(now + self.prices.transfer(message), lambda then, a=(lane, message): self.arrive(*a, then))
                    moved = True
            elif message in self.arrived:
                self.queues[lane].popleft()
                self.received.add(message)
                self.received_at[message] = now
                self.under_way[peer, rank] -= 1
                self.starts[rank, place] = self.ends[rank, place] = now
                moved = True
        return moved

    def set_out_together(self, message, lane, other, now):
        self.moving |= {(True, message), (False, message)}
        sides = [self.queues[lane][0], self.queues[other][0]]
        for _, _, rank, _, place in sides:
            self.starts[rank, place] = now

        def arrive(then):
            for queue, (_, _, rank, _, place) in zip((lane, other), sides, strict=True):
                self.queues[queue].popleft()
                self.ends[rank, place] = then
            self.received.add(message)
            self.received_at[message] = then

        self.at(now + self.prices.transfer(message), arrive)
        return True

    def arrive(self, lane, message, now):
        _, _, rank, _, place = self.queues[lane].popleft()
        self.ends[rank, place] = now
        self.arrived.add(message)
