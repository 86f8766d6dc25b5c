"""Encodes specs of what crosses a link as bytes, for the stage at the other end.

They go in frames (``framing.py``) with version, length and checksum. Whatever a peer sends, decoding gives a
description or a ``MetadataError``; nothing is unpickled.
"""

from __future__ import annotations

import math
import struct
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from penstock.errors import MetadataError
from penstock.execution.framing import CHECKSUM, frame, read_length, unframe
from penstock.execution.trees import DEEPEST, TENSOR, Branch, Constant, Structure, TensorLeaf, branch
from penstock.execution.value_spec import TensorSpec, ValueSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.execution.shared_memory import Groups


# The body of a frame, little endian: node · shared
#
#   node    tag u8, then by tag
#     0 None   1 False   2 True   3 int i64   4 float f64   5 str text
#     6 tensor   element type u8 · requires_grad u8 · dimensions u8 · sizes u64... · strides u64...
#     7 tuple count u32 · node...    8 list, the same    9 dict count u32 · (text · node)...
#   text    length u32 · UTF-8
#   shared  count u32 · (count u32 · number of a tensor u32...)...: which tensors share memory

MAX_NODES = 1 << 16
MOST_DIMENSIONS = 64
LARGEST_TENSOR = 1 << 62

COUNT = struct.Struct("<I")
INTEGER = struct.Struct("<q")
REAL = struct.Struct("<d")
TENSOR_FIELDS = struct.Struct("<BBB")

NONE, FALSE, TRUE, INT, FLOAT, STR, TENSOR_TAG, TUPLE, LIST, DICT = range(10)
BRANCHES: dict[int, type] = {TUPLE: tuple, LIST: list, DICT: dict}
BRANCH_TAGS = {kind: tag for tag, kind in BRANCHES.items()}

# By position: new ones go to the end, with a new version.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def encode(meta: ValueSpec) -> bytes:
    """Encode a description as bytes.

    >>> from penstock.execution.value_spec import describe
    >>> meta = describe([torch.ones(2, 3), None])
    >>> decode(encode(meta)) == meta
    True
    """
    body = bytearray()
    _write(meta.structure, iter(meta.tensors), body)
    _write_groups(meta.shared, body)
    return frame(body)


@lru_cache(maxsize=256)  # the same few shapes recur
def decode(data: bytes) -> ValueSpec:
    """Decode a description. Any other bytes raise a ``MetadataError``."""
    reader = _Reader(unframe(data))
    structure = reader.node(0)
    shared = reader.groups()
    if left := len(reader.data) - reader.at:
        raise MetadataError(f"{left} bytes follow the end of the description")
    return ValueSpec(structure, tuple(reader.tensors), shared)


def _write(structure: Structure, tensors: Iterator[TensorSpec], into: bytearray) -> None:
    if isinstance(structure, TensorLeaf):
        _write_tensor(next(tensors), into)
    elif isinstance(structure, Constant):
        _write_constant(structure.value, into)
    else:
        into.append(BRANCH_TAGS[structure.kind])
        into += COUNT.pack(len(structure.children))
        for key, child in zip(structure.keys, structure.children, strict=True):
            if isinstance(key, str):
                _write_text(key, into)
            _write(child, tensors, into)


def _write_tensor(meta: TensorSpec, into: bytearray) -> None:
    if meta.dtype not in CODES:
        raise MetadataError(f"{meta} cannot be sent between stages: its element type is not a plain number type")
    dimensions = len(meta.shape)
    if dimensions > MOST_DIMENSIONS:
        raise MetadataError(f"{meta} has {dimensions} dimensions; the limit is {MOST_DIMENSIONS}")
    into.append(TENSOR_TAG)
    into += TENSOR_FIELDS.pack(CODES[meta.dtype], meta.requires_grad, dimensions)
    into += struct.pack(f"<{2 * dimensions}Q", *meta.shape, *meta.stride)


def _write_constant(value: bool | int | float | str | None, into: bytearray) -> None:
    if value is None:
        into.append(NONE)
    elif isinstance(value, bool):
        into.append(TRUE if value else FALSE)
    elif isinstance(value, int):
        into.append(INT)
        into += INTEGER.pack(value)
    elif isinstance(value, float):
        into.append(FLOAT)
        into += REAL.pack(value)
    else:
        into.append(STR)
        _write_text(value, into)


def _write_text(text: str, into: bytearray) -> None:
    data = text.encode("utf-8", "surrogatepass")
    into += COUNT.pack(len(data))
    into += data


def _write_groups(groups: Groups, into: bytearray) -> None:
    into += COUNT.pack(len(groups))
    for group in groups:
        into += struct.pack(f"<{1 + len(group)}I", len(group), *group)


class _Reader:
    """Reads one description from the front to the back, and trusts nothing in it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.nodes = 0
        self.tensors: list[TensorSpec] = []

    def node(self, depth: int) -> Structure:
        self.nodes += 1
        if depth > DEEPEST or self.nodes > MAX_NODES:
            raise MetadataError(f"a description has at most {MAX_NODES} nodes in {DEEPEST} levels; this one has more")
        tag = self.take(1)[0]
        if tag in BRANCHES:
            return self.branch(BRANCHES[tag], depth)
        if tag == TENSOR_TAG:
            self.tensors.append(self.tensor())
            return TENSOR
        return Constant(self.constant(tag))

    def branch(self, kind: type, depth: int) -> Branch:
        count = self.count()
        keys: list[int | str] = []
        children: list[Structure] = []
        for index in range(count):
            keys.append(self.text() if kind is dict else index)
            children.append(self.node(depth + 1))
        if len(set(keys)) != count:
            raise MetadataError("a dict in the description has a duplicate key")
        return branch(kind, keys, children)

    def constant(self, tag: int) -> bool | int | float | str | None:
        if tag == NONE:
            return None
        if tag in (FALSE, TRUE):
            return tag == TRUE
        if tag == INT:
            return int(INTEGER.unpack(self.take(INTEGER.size))[0])
        if tag == FLOAT:
            return float(REAL.unpack(self.take(REAL.size))[0])
        if tag == STR:
            return self.text()
        raise MetadataError(f"the description has the unknown tag {tag}")

    def tensor(self) -> TensorSpec:
        code, requires_grad, dimensions = TENSOR_FIELDS.unpack(self.take(TENSOR_FIELDS.size))
        if code >= len(DTYPES) or requires_grad > 1 or dimensions > MOST_DIMENSIONS:
            raise MetadataError(
                f"no tensor has element type {code}, requires_grad {requires_grad}, {dimensions} dimensions"
            )
        numbers = struct.unpack(f"<{2 * dimensions}Q", self.take(16 * dimensions))
        meta = TensorSpec(numbers[:dimensions], DTYPES[code], bool(requires_grad), numbers[dimensions:])
        if not _dense(meta):
            raise MetadataError(f"{meta} with strides {list(meta.stride)} is not a dense tensor that could be received")
        return meta

    def groups(self) -> Groups:
        groups = tuple([self.group() for _ in range(self.count())])
        numbers = [number for group in groups for number in group]
        if len(set(numbers)) < len(numbers) or max(numbers, default=-1) >= len(self.tensors):
            raise MetadataError(f"tensors {numbers} of {len(self.tensors)} cannot share memory")
        return groups

    def group(self) -> tuple[int, ...]:
        count = self.count()
        return struct.unpack(f"<{count}I", self.take(COUNT.size * count))

    def text(self) -> str:
        data = self.take(self.count())
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise MetadataError(f"the description has text that is not UTF-8: {error.reason}") from None

    def count(self) -> int:
        return int(COUNT.unpack(self.take(COUNT.size))[0])

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise MetadataError("the description ends too early")
        taken = self.data[self.at : end]
        self.at = end
        return taken


def _dense(meta: TensorSpec) -> bool:
    """Whether the elements fill their memory, each place once, and could be addressed at all."""
    if (
        math.prod(meta.shape) * meta.dtype.itemsize > LARGEST_TENSOR
        or max((*meta.shape, *meta.stride), default=0) > LARGEST_TENSOR
    ):
        return False
    if 0 in meta.shape:
        return True
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(meta.shape, meta.stride, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


HEADER_BYTES = 512
"""The size of the header before every microbatch when shapes vary: enough for about ten tensors and a checksum."""
HEADER_CAPACITY = HEADER_BYTES - CHECKSUM.size


def header_tensor(meta: ValueSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode a description as a tensor of ``HEADER_BYTES`` bytes, and a second one with the rest if it is longer.

    >>> from penstock.execution.value_spec import describe
    >>> meta = describe(torch.ones(2, 3))
    >>> header, overflow = header_tensor(meta)
    >>> header.shape, overflow, read_header(header) == meta
    (torch.Size([512]), None, True)
    """
    data = encode(meta)
    begin = data[:HEADER_CAPACITY].ljust(HEADER_CAPACITY, b"\0")
    header = torch.frombuffer(bytearray(begin + CHECKSUM.pack(zlib.crc32(begin))), dtype=torch.uint8)
    if len(data) <= HEADER_CAPACITY:
        return header, None
    return header, torch.frombuffer(bytearray(data[HEADER_CAPACITY:]), dtype=torch.uint8)


def read_header(header: torch.Tensor, overflow: torch.Tensor | None = None) -> ValueSpec | int:
    """Decode the description in a header; or, if it is longer, return how many bytes of overflow to receive."""
    data = _bytes(header)
    begin, checksum = data[:HEADER_CAPACITY], data[HEADER_CAPACITY:]
    length = read_length(begin)
    # A wrong length must not get through: receiving less than was sent would end the process.
    if checksum != CHECKSUM.pack(zlib.crc32(begin)):
        raise MetadataError("checksum mismatch in the header")
    if length > HEADER_CAPACITY and overflow is None:
        return length - HEADER_CAPACITY
    return decode((begin if overflow is None else begin + _bytes(overflow))[:length])


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
