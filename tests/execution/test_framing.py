"""Whatever bytes a peer sends are a whole message, or a MetadataError."""

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import MetadataError
from penstock.execution.framing import (
    MAX_BYTES,
    decode_numbers,
    encode_numbers,
    frame,
    join_parts,
    split_parts,
    unframe,
)

numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)
parts = st.lists(st.binary(max_size=30), max_size=5)


def test_the_layout_of_a_frame():
    start = b"PENS" + b"\3\0" + b"\x12\0\0\0"
    assert frame(b"body") == start + struct.pack("<I", zlib.crc32(start + b"body")) + b"body"


@given(parts)
def test_parts_come_back(given_parts):
    assert split_parts(join_parts(given_parts)) == given_parts


@given(numbers)
def test_numbers_come_back(given_numbers):
    assert decode_numbers(encode_numbers(given_numbers)) == tuple(given_numbers)


@settings(deadline=None)
@given(parts, numbers, st.data())
def test_damage_is_always_found(given_parts, given_numbers, data):
    for read, whole in ((split_parts, join_parts(given_parts)), (decode_numbers, encode_numbers(given_numbers))):
        flipped = bytearray(whole)
        at = data.draw(st.integers(0, 8 * len(whole) - 1))
        flipped[at // 8] ^= 1 << at % 8
        for damaged in (bytes(flipped), whole[: data.draw(st.integers(0, len(whole) - 1))], whole + b"\0"):
            with pytest.raises(MetadataError):
                read(damaged)


@settings(deadline=None)
@given(st.binary(max_size=40) | st.lists(st.integers(0, 9), min_size=1, max_size=40).map(bytes))
def test_random_bytes_in_a_right_frame_are_read_or_refused(body):
    for read, write in ((split_parts, join_parts), (decode_numbers, encode_numbers)):
        try:
            found = read(frame(body))
        except MetadataError:
            continue
        assert unframe(write(found)) == body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\0\0\0", r"ends too early"),
        (b"\1\0\0\0\5\0\0\0four", r"ends too early"),
        (b"\0\0\0\0rest", r"4 bytes follow the end of the message"),
    ],
)
def test_parts_that_do_not_fit(body, message):
    with pytest.raises(MetadataError, match=message):
        split_parts(frame(body))


def test_numbers_that_do_not_fit():
    with pytest.raises(MetadataError, match=r"2 numbers need 16 bytes; the message has 8"):
        decode_numbers(frame(struct.pack("<Iq", 2, 7)))


def test_a_message_that_is_too_long():
    with pytest.raises(MetadataError, match=r"too long to send"):
        frame(bytes(MAX_BYTES))
