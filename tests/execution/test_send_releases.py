"""When a rank may wait for its sends: figures, an independent slow oracle, and rows that say too little."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.execution.messages import received_by, sent_by, used_by
from penstock.execution.send_releases import find_releases, release_at_end
from penstock.ir.actions import Action
from penstock.ir.schedule import Schedule
from penstock.lowering.forwards import forwards_of

NAMES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "V-Min",
]


def lowered(name, ranks, microbatches):
    return ps.lower(ps.build(name, ranks=ranks, microbatches=microbatches), unshard=False, reduce=False)


def most_in_flight(schedule, *, by_level):
    """The largest number of sends that any rank keeps at once."""
    peak = 0
    for rank, row in enumerate(schedule.actions):
        after, _ = find_releases(schedule, rank, by_level=by_level)
        in_flight = 0
        for position, action in enumerate(row):
            in_flight += sent_by(action) is not None
            peak = max(peak, in_flight)
            in_flight -= sum(map(len, after.get(position, {}).values()))
    return peak


@pytest.mark.parametrize(
    ("name", "proven", "both"),
    [
        ("GPipe", 32, 7),
        ("1F1B", 4, 4),
        ("Interleaved1F1B", 11, 6),
        ("LoopedBFS", 64, 7),
        ("InterleavedZeroBubble", 8, 6),
        ("ZBVZeroBubble", 7, 6),
        ("DualPipeV", 7, 6),
        ("V-Min", 3, 3),
    ],
)
def test_how_many_sends_are_in_flight_at_most(name, proven, both):
    schedule = lowered(name, ranks=4, microbatches=32)
    assert most_in_flight(schedule, by_level=False) == proven
    assert most_in_flight(schedule, by_level=True) == both


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_keeps_few_sends(name):
    """Where nothing comes back nothing is proven, and an evaluation holds no other activations."""
    evaluation = ps.lower(forwards_of(lowered(name, ranks=4, microbatches=32)), reduce=False)
    assert most_in_flight(evaluation, by_level=True) <= 7


class Machine:
    """Runs a schedule in a random order of ranks: a send is done when its receive is posted, or, in the harshest case
    that a proof must stand, when its message is used. Shares no code with the analysis."""

    def __init__(self, schedule, releases, rng, *, until_used):
        self.rows, self.releases, self.rng, self.until_used = schedule.actions, releases, rng, until_used
        self.microbatches = schedule.microbatches
        self.place = [0] * len(self.rows)
        messages = [message for row in self.rows for message in map(sent_by, row) if message]
        self.remote = {message.key(self.microbatches) for message in messages}
        self.sent, self.posted, self.used = set(), set(), set()

    def is_done(self, key):
        return key in (self.used if self.until_used else self.posted)

    def releases_of(self, rank, position):
        return [key for keys in self.releases[rank].after.get(position, {}).values() for key in keys]

    def can_run(self, rank):
        position, row = self.place[rank], self.rows[rank]
        if position > 0 and not all(map(self.is_done, self.releases_of(rank, position - 1))):
            return False
        if position == len(row):
            return False
        wanted = {message.key(self.microbatches) for message in used_by(row[position])}
        return wanted & self.remote <= self.sent

    def run_next(self, rank):
        action = self.rows[rank][self.place[rank]]
        self.place[rank] += 1
        if message := sent_by(action):
            self.sent.add(message.key(self.microbatches))
        if message := received_by(action):
            self.posted.add(message.key(self.microbatches))
        self.used |= {message.key(self.microbatches) for message in used_by(action)}

    def run(self):
        while runnable := [rank for rank in range(len(self.rows)) if self.can_run(rank)]:
            self.run_next(self.rng.choice(runnable))
        return self.has_ended()

    def has_ended(self):
        return all(place == len(row) for place, row in zip(self.place, self.rows, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_sends_in_flight_does_not_grow_with_microbatches(name):
    few, many = (most_in_flight(lowered(name, ranks=4, microbatches=count), by_level=True) for count in (24, 48))
    assert few == many


@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.randoms(),
)
def test_no_wait_for_a_send_blocks_for_ever(name, ranks, microbatches, defer, by_level, with_headers, rng):
    schedule = ps.lower(ps.build(name, ranks=ranks, microbatches=microbatches), defer_receives=defer)
    releases = [find_releases(schedule, rank, by_level=by_level, with_headers=with_headers) for rank in range(ranks)]
    # A proof holds for the use of a message; a level only for its receive, unless it has a header.
    assert Machine(schedule, releases, rng, until_used=with_headers or not by_level).run()


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"), [("V-Half", 3, 3), ("V-Min", 4, 3), ("ZBVZeroBubble", 4, 8)]
)
def test_what_a_header_announces_is_received_when_it_is_used(name, ranks, microbatches):
    schedule = lowered(name, ranks, microbatches)
    for with_headers in (True, False):
        releases = [find_releases(schedule, rank, by_level=True, with_headers=with_headers) for rank in range(ranks)]
        assert Machine(schedule, releases, random.Random(0), until_used=True).run() is with_headers


@pytest.mark.parametrize("name", NAMES)
def test_a_proven_wait_never_blocks(name):
    """At the moment of the wait, the message has been used, in whatever order ranks run."""
    schedule = lowered(name, ranks=3, microbatches=6)
    releases = [find_releases(schedule, rank, by_level=False) for rank in range(3)]
    rng = random.Random(name)
    for _ in range(5):
        machine = Machine(schedule, releases, rng, until_used=True)
        while not machine.has_ended():
            rank = rng.choice([rank for rank in range(3) if machine.can_run(rank)])
            machine.run_next(rank)
            assert all(map(machine.is_done, machine.releases_of(rank, machine.place[rank] - 1)))


def test_what_nobody_uses_is_waited_for_at_the_end():
    schedule = Schedule([["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1F0"]])
    assert find_releases(schedule, 0, by_level=True) == ({}, {1: [0, 2]})


def test_a_row_alone_releases_at_its_end():
    row = [Action.from_str(text) for text in ("1F0", "1SEND_F0", "1B0", "1SEND_B0")]
    assert release_at_end(row, microbatches=4, rank_of={0: 0, 2: 2}.get) == ({}, {2: [8], 0: [1]})


def test_idle_steps_do_not_count():
    rows = [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]
    idle = [["0F0", None, "0SEND_F0", None, "0RECV_B0", "0B0"], [None, *rows[1]]]
    assert find_releases(Schedule(idle), 0, by_level=True) == find_releases(Schedule(rows), 0, by_level=True)
    assert find_releases(Schedule(rows), 0, by_level=True).after == {3: {1: [0]}}


def test_a_schedule_that_deadlocks_releases_at_the_end():
    rows = [["0F0", "0B0", "0SEND_F0", "0RECV_B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]
    assert find_releases(Schedule(rows), 0, by_level=True) == ({}, {1: [0]})
    assert find_releases(Schedule(rows), 1, by_level=True) == ({}, {0: [1]})
