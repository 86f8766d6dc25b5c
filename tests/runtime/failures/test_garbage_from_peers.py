"""Garbage from a peer: an error that says what cannot be decoded, never a wrong value."""

import itertools
import random
import resource
import struct
import zlib
from functools import partial

import torch

import penstock as ps
from penstock.errors import PenstockError, StepError
from penstock.execution import wire_format
from penstock.execution.framing import VERSION, decode_numbers, encode_numbers, join_parts, split_parts
from penstock.execution.trees import TENSOR
from penstock.execution.value_spec import TensorSpec, ValueSpec
from penstock.runtime import Pipeline, run_in_threads
from runtime.faults import (
    MICROBATCHES,
    SOON,
    Faulty,
    Wide,
    batch,
    call,
    error_of,
    mse,
)


def sealed(begin):
    """A header with a right checksum of its own."""
    begin = begin[:508].ljust(508, b"\0")
    return begin + struct.pack("<I", zlib.crc32(begin))


def started(version, length):
    return struct.pack("<4sHI", b"PENS", version, length)


def header_of(meta):
    return bytes(wire_format.header_tensor(meta)[0].tolist())


GARBAGE = {
    "random": lambda data: random.Random(1).randbytes(len(data)),
    "zeros": lambda data: bytes(len(data)),
    "truncated": lambda data: data[:20].ljust(len(data), b"\0"),
    "short": lambda data: data[:20],
    "a flipped bit": lambda data: data[:30] + bytes([byte ^ 4 for byte in data[30:31]]) + data[31:],
    "another version": lambda data: sealed(started(9, 60) + data[10:]),
    "a longer length": lambda data: started(VERSION, 5000) + data[10:],
    "a huge length": lambda data: sealed(started(VERSION, 2**32 - 1) + data[10:]),
    "another length": lambda data: sealed(started(VERSION, 30) + data[10:]),
    "a huge tensor": lambda _: header_of(
        ValueSpec(TENSOR, (TensorSpec((2**31, 2**28), torch.float32, True, (2**28, 1)),))
    ),
}


def garbage_headers(rank, make, kinds):
    schedule = ps.build("1F1B", ranks=2, microbatches=MICROBATCHES)
    x, y = batch()
    found = []
    for kind in kinds:
        module = Wide(rank)
        pipe = make({rank: module}, schedule)
        step = partial(pipe.step, *([x] if rank == 0 else []), target=y if rank else None)
        step()
        if rank == 0:
            send = pipe.transport.send

            def damaged(tensor, peer, tag, send=send, kind=kind):
                if tensor.dtype is torch.uint8:
                    data = bytearray(GARBAGE[kind](bytes(tensor.tolist())))
                    tensor = torch.frombuffer(data, dtype=torch.uint8)
                return send(tensor, peer, tag)

            pipe.transport.send = damaged
            pipe._engine.programs.clear()
        found.append(error_of(step))
        assert all(parameter.grad is None for parameter in module.parameters())
        pipe.close()
    return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def garbage_headers_in_processes(rank, ranks, *, group):
    return garbage_headers(
        rank,
        lambda modules, schedule: Pipeline(
            modules, schedule, loss_fn=mse, group=group, shapes="per_microbatch", timeout=20
        ),
        GARBAGE,
    )


def test_garbage_in_place_of_a_header(workers):
    results = workers.run(garbage_headers_in_processes, ranks=2)
    for errors, kind in zip(zip(*[found for found, _ in results], strict=True), GARBAGE, strict=True):
        assert len({str(error) for error in errors}) == 1
        assert isinstance(errors[0], StepError)
        assert (errors[0].rank, errors[0].action) == (1, "1F0")
        if kind != "a huge tensor":
            assert "could not decode the header that stage 0 sent to stage 1: " in str(errors[0]), kind
        assert max(error.seconds for error in errors) < SOON
    assert max(memory for _, memory in results) < 4_000_000  # kB; a hundred times that was announced


def test_garbage_in_place_of_a_header_in_threads():
    for kind in GARBAGE:
        if kind == "short":
            continue  # a receive of another size is refused here: see the tests of the transport

        def worker(transport, kind=kind):
            return garbage_headers(
                transport.rank,
                lambda modules, schedule: Pipeline(
                    modules, schedule, loss_fn=mse, transport=transport, shapes="per_microbatch"
                ),
                [kind],
            )[0][0]

        errors = run_in_threads(worker, 2, timeout=60)
        assert all(isinstance(error, StepError) for error in errors)
        assert "1F0" in str(errors[0]) or "1RECV_F0" in str(errors[0])


def with_numbers(data, change):
    """An announcement whose first part, numbers, is changed."""
    first, *rest = split_parts(data)
    return join_parts([encode_numbers(change(decode_numbers(first))), *rest])


ANNOUNCEMENTS = {
    "random": lambda data: random.Random(1).randbytes(50),
    "nothing": lambda data: b"",
    "cut off": lambda data: data[:-3],
    "a huge length": lambda data: data[:6] + b"\xff\xff\xff\x7f" + data[10:],
    "a flipped bit": lambda data: data[:30] + bytes([byte ^ 4 for byte in data[30:31]]) + data[31:],
    "another magic": lambda data: b"SNEP" + data[4:],
    "another version": lambda data: data[:4] + b"\2\0" + data[6:],
    "no parts": lambda data: join_parts([]),
    "fewer microbatches": lambda data: with_numbers(data, lambda numbers: numbers[1:]),
    "an unknown kind or stage": lambda data: with_numbers(data, lambda numbers: (7, *numbers[1:])),
}


EXAMPLES = dict.fromkeys(range(2), torch.empty(2, 3))


def garbage_announcements(rank, make, kinds, modes=("inferred", EXAMPLES)):
    """Damage what ranks announce when they agree on shapes, by a dry run or by examples."""
    schedule = ps.build("1F1B", ranks=3, microbatches=MICROBATCHES)
    found = []
    for kind in kinds:
        for shapes in modes:
            pipe = make({rank: Faulty(rank)}, schedule, shapes)
            if rank == 0 and shapes == "inferred":
                send = pipe.transport.send_bytes
                pipe.transport.send_bytes = lambda peer, data, send=send, kind=kind: send(
                    peer, ANNOUNCEMENTS[kind](data)
                )
            elif rank == 0:
                exchange = pipe.transport.exchange
                pipe.transport.exchange = lambda data, exchange=exchange, kind=kind: exchange(ANNOUNCEMENTS[kind](data))
            found.append(error_of(lambda pipe=pipe: call(pipe)))
            pipe.close()
    return found


def garbage_announcements_in_processes(rank, ranks, *, group):
    return garbage_announcements(
        rank,
        lambda modules, schedule, shapes: Pipeline(
            modules, schedule, loss_fn=mse, group=group, shapes=shapes, timeout=20
        ),
        ANNOUNCEMENTS,
    )


def check_garbage_announcements(results, kinds):
    for number, (kind, inferred) in enumerate(itertools.product(kinds, [True, False])):
        errors = [found[number] for found in results]
        text = "stage 1 cannot use the shapes that stage 0 announced: " if inferred else "'s example shapes: "
        assert all(isinstance(error, PenstockError) and text in str(error) for error in errors), (kind, errors)
        assert max(error.seconds for error in errors) < SOON


def test_garbage_where_shapes_are_agreed(workers):
    check_garbage_announcements(workers.run(garbage_announcements_in_processes, ranks=3), list(ANNOUNCEMENTS))


def test_garbage_where_shapes_are_agreed_in_threads():
    for kind in ANNOUNCEMENTS:

        def worker(transport, kind=kind):
            return garbage_announcements(
                transport.rank,
                lambda modules, schedule, shapes: Pipeline(
                    modules, schedule, loss_fn=mse, transport=transport, shapes=shapes
                ),
                [kind],
                ["inferred"],
            )

        results = run_in_threads(worker, 3, timeout=60)
        assert all("stage 1 cannot use the shapes that stage 0 announced: " in str(error) for (error,) in results)
