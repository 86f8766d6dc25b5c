"""Frames what ranks send each other: every message begins with the same header and is checked before it is decoded.

A frame, little endian:

    magic "PENS" · version u16 · length of all u32 · crc32 of all but itself u32 · body
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

from penstock.errors import MetadataError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC: Final = b"PENS"
#: Of all that is sent in frames. Raise it with any change of a format.
VERSION: Final = 3
MAX_BYTES: Final = 1 << 24

START: Final = struct.Struct("<4sHI")
CHECKSUM: Final = struct.Struct("<I")
START_BYTES: Final = START.size + CHECKSUM.size
_COUNT: Final = struct.Struct("<I")


def frame(body: bytes | bytearray) -> bytes:
    """Put a body into a frame.

    >>> unframe(frame(b"body"))
    b'body'
    """
    length = START_BYTES + len(body)
    if length > MAX_BYTES:
        raise MetadataError(f"a message of {length} bytes is too long to send; the limit is {MAX_BYTES}")
    start = START.pack(MAGIC, VERSION, length)
    return start + CHECKSUM.pack(zlib.crc32(body, zlib.crc32(start))) + body


def unframe(data: bytes) -> bytes:
    """Get the body out of a frame. Anything that is not a whole frame raises a ``MetadataError``."""
    length = read_length(data)
    if length != len(data):
        raise MetadataError(f"the message should have {length} bytes, but has {len(data)}")
    body = data[START_BYTES:]
    (checksum,) = CHECKSUM.unpack_from(data, START.size)
    if checksum != zlib.crc32(body, zlib.crc32(data[: START.size])):
        raise MetadataError("checksum mismatch in the message")
    return body


def read_length(data: bytes) -> int:
    """Read from its first bytes how long a frame is."""
    if len(data) < START_BYTES:
        raise MetadataError(f"{len(data)} bytes are too few for a message")
    magic, version, length = START.unpack_from(data)
    if magic != MAGIC:
        raise MetadataError(f"a message starts with {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        raise MetadataError(
            f"the message has version {version}, but this penstock reads {VERSION}; use one version on all ranks"
        )
    if not START_BYTES < length <= MAX_BYTES:
        raise MetadataError(f"a message cannot have {length} bytes")
    return int(length)


def join_parts(parts: Sequence[bytes]) -> bytes:
    """Send several parts in one frame: how many there are, then each after its length.

    >>> split_parts(join_parts([b"one", b"", b"three"]))
    [b'one', b'', b'three']
    """
    return frame(_COUNT.pack(len(parts)) + b"".join(_COUNT.pack(len(part)) + part for part in parts))


def split_parts(data: bytes) -> list[bytes]:
    """Get the parts out of a frame."""
    body = unframe(data)
    count, at = _read_count(body, 0)
    parts = []
    for _ in range(count):
        length, at = _read_count(body, at)
        if length > len(body) - at:
            raise MetadataError("the message ends too early")
        parts.append(body[at : at + length])
        at += length
    if at != len(body):
        raise MetadataError(f"{len(body) - at} bytes follow the end of the message")
    return parts


def encode_numbers(numbers: Sequence[int]) -> bytes:
    """Send numbers in one frame: how many there are, then each as an i64.

    >>> decode_numbers(encode_numbers([3, -1]))
    (3, -1)
    """
    return frame(struct.pack(f"<I{len(numbers)}q", len(numbers), *numbers))


def decode_numbers(data: bytes) -> tuple[int, ...]:
    """Get the numbers out of a frame."""
    body = unframe(data)
    count, at = _read_count(body, 0)
    if len(body) - at != 8 * count:
        raise MetadataError(f"{count} numbers need {8 * count} bytes; the message has {len(body) - at}")
    return struct.unpack_from(f"<{count}q", body, at)


def _read_count(body: bytes, at: int) -> tuple[int, int]:
    if len(body) - at < _COUNT.size:
        raise MetadataError("the message ends too early")
    return int(_COUNT.unpack_from(body, at)[0]), at + _COUNT.size
