"""What crosses an edge between stages, described; and the description in bytes, for the stage at the other end.

The bytes are a small format of our own, with version, length and checksum. Whatever a peer sends, reading it gives a
description or a ``MetadataError``.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.errors import MetadataError
from penstock.runtime.trees import (
    DEEPEST,
    SLOT,
    Branch,
    Constant,
    Path,
    Slot,
    Structure,
    branch,
    flat,
    gather,
    paths,
    rebuild,
    structure_of,
    written,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """All that a receiver must know of a tensor before it comes.

    >>> print(TensorMeta.of(torch.zeros(4, 128, 32)))
    float32[4, 128, 32]

    Attributes:
        shape: its sizes.
        dtype: its element type.
        requires_grad: whether a gradient comes back for it.
        stride: the layout in which it is sent: dense, in the order of dimensions that the sender's tensor has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Describe a tensor. One with holes or overlaps is described as its dense copy will be.

        >>> TensorMeta.of(torch.zeros(2, 3).T).stride, TensorMeta.of(torch.zeros(2, 6)[:, ::2]).stride
        ((1, 3), (3, 1))
        """
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            _refuse_unplain(tensor)
        stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, stride)

    def empty(self, device: torch.device | str | None = None) -> torch.Tensor:
        """A tensor to receive into."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def fits(self, tensor: torch.Tensor, *, gradients: bool = True) -> bool:
        """Whether shape and element type are these; requires_grad too, if ``gradients``. Layout does not count."""
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and (not gradients or tensor.requires_grad is self.requires_grad)
        )

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the layout that was agreed: itself where it has it, else a copy (without history)."""
        if tensor.stride() == self.stride and not (tensor.is_conj() or tensor.is_neg()):
            return tensor
        return self.empty(tensor.device).copy_(tensor.detach())

    def __str__(self) -> str:
        return f"{_name(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class EdgeMeta:
    """What one stage gives to the next: where its tensors are, how each looks, and all else by value.

    >>> leaves, meta = flatten((torch.ones(2), {"scale": 0.5, "mask": None}))
    >>> meta.unflatten(leaves)
    (tensor([1., 1.]), {'scale': 0.5, 'mask': None})
    """

    structure: Structure
    tensors: tuple[TensorMeta, ...]

    @property
    def is_single(self) -> bool:
        """Whether the value is one tensor, and no container around it."""
        return self.structure is SLOT

    def matches(self, value: Any, *, gradients: bool = True) -> bool:
        """Whether a value is as described, by shape and element type; ``gradients`` compares requires_grad as well.

        The layout of tensors does not count, because the sender can arrange it.
        """
        return self.accept(value, gradients=gradients) is not None

    def accept(self, value: Any, *, gradients: bool = True) -> Sequence[torch.Tensor] | None:
        """The tensors of a value that ``matches``, in order; None if it does not."""
        if self.structure is SLOT:
            fits = isinstance(value, torch.Tensor) and self.tensors[0].fits(value, gradients=gradients)
            return (value,) if fits else None
        leaves = self._leaves(value)
        if leaves is None:
            return None
        for meta, tensor in zip(self.tensors, leaves, strict=True):
            if not meta.fits(tensor, gradients=gradients):
                return None
        return leaves

    def _leaves(self, value: Any) -> Sequence[torch.Tensor] | None:
        """The tensors of a value of this structure; None if it has another."""
        if type(value) is tuple and self.structure is flat(len(value)):
            return value if all(map(torch.is_tensor, value)) else None
        found: list[torch.Tensor] = []
        return found if gather(self.structure, value, found) else None

    def unflatten(self, leaves: Sequence[torch.Tensor]) -> Any:
        """The value again, with these tensors in it."""
        if len(leaves) != len(self.tensors):
            raise MetadataError(f"{len(leaves)} tensors for a value that has {len(self.tensors)}")
        if self.structure is SLOT:
            return leaves[0]
        return rebuild(self.structure, iter(leaves))


def flatten(value: Any) -> tuple[tuple[torch.Tensor, ...], EdgeMeta]:
    """The tensors of a value in order, and the description from which it can be built again."""
    if isinstance(value, torch.Tensor):
        return (value,), EdgeMeta(SLOT, (TensorMeta.of(value),))
    found: list[torch.Tensor] = []
    structure = structure_of(value, found)
    return tuple(found), EdgeMeta(structure, tuple([TensorMeta.of(tensor) for tensor in found]))


def describe(value: Any) -> EdgeMeta:
    """The description of a value."""
    return flatten(value)[1]


def leaves_of(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a value, in order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if type(value) is tuple and all(map(torch.is_tensor, value)):
        return value
    found: list[torch.Tensor] = []
    structure_of(value, found)
    return tuple(found)


def wire(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor in its own order, as a contiguous tensor: what a transport sends, or receives into.

    >>> tensor = torch.tensor([[1, 2], [3, 4]]).T
    >>> tensor.flatten(), wire(tensor)
    (tensor([1, 3, 2, 4]), tensor([1, 2, 3, 4]))
    """
    if tensor.is_contiguous():
        return tensor
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def mismatch(
    agreed: EdgeMeta, found: EdgeMeta, *, sender: str, receiver: str, gradients: bool = True
) -> MetadataError | None:
    r"""What differs between a value and what was agreed for its edge, as an error to raise; None if nothing does.

    >>> agreed, found = describe(torch.ones(4, 128)), describe(torch.ones(4, 96))
    >>> error = mismatch(agreed, found, sender="stage 0 on rank 0", receiver="stage 1 on rank 1")
    >>> print(str(error).replace("; ", ";\n"))
    stage 0 on rank 0 gives stage 1 on rank 1 not what was agreed: output is float32[4, 96], agreed was float32[4, 128];
    if shapes vary between microbatches, pass shapes="per_microbatch"

    Args:
        agreed: what the receiver expects.
        found: what the sender has.
        sender: the sending stage, in words.
        receiver: the receiving stage, in words.
        gradients: compare requires_grad as well.
    """
    difference = _difference(agreed, found, gradients)
    if difference is None:
        return None
    fact, advice = difference
    return MetadataError(f"{sender} gives {receiver} not what was agreed: {fact}; {advice}")


VARIES = 'if shapes vary between microbatches, pass shapes="per_microbatch"'
STRUCTURE_VARIES = 'if what a stage returns varies between microbatches, pass shapes="per_microbatch"'
GRADIENT = "a stage must need the gradient of its input for every microbatch, or for none"


def _difference(agreed: EdgeMeta, found: EdgeMeta, gradients: bool) -> tuple[str, str] | None:
    if agreed.structure != found.structure:
        return _structural(agreed, found), STRUCTURE_VARIES
    places = [path for path, leaf in paths(agreed.structure) if isinstance(leaf, Slot)]
    for path, want, have in zip(places, agreed.tensors, found.tensors, strict=True):
        name = written("output", path)
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            return f"{name} is {have}, agreed was {want}", VARIES
        if gradients and want.requires_grad != have.requires_grad:
            return f"{name} has requires_grad={have.requires_grad}, agreed was {want.requires_grad}", GRADIENT
    return None


def _structural(agreed: EdgeMeta, found: EdgeMeta) -> str:
    """The first place where one has something else than the other."""
    return _first_difference(agreed.structure, found.structure, ()) or "the order of keys differs"


def _first_difference(want: Structure, have: Structure, path: Path) -> str | None:
    if isinstance(want, Branch) and isinstance(have, Branch) and (want.kind, want.keys) == (have.kind, have.keys):
        inner = zip(want.keys, want.children, have.children, strict=True)
        found = (_first_difference(wanted, had, (*path, key)) for key, wanted, had in inner)
        return next((difference for difference in found if difference), None)
    return None if want == have else f"{written('output', path)} is {_told(have)}, agreed was {_told(want)}"


def _told(structure: Structure) -> str:
    if isinstance(structure, Slot):
        return "a tensor"
    if isinstance(structure, Constant):
        return repr(structure.value)
    if structure.kind is dict:
        return f"a dict with the keys {', '.join(map(repr, structure.keys)) or '(none)'}"
    return f"a {structure.kind.__name__} of {len(structure.children)}"


def _refuse_unplain(tensor: torch.Tensor) -> None:
    """Raise for a tensor whose memory is not simply its elements."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise MetadataError(f"a {kind} tensor cannot go from stage to stage; pass dense tensors that make it up")
    if is_traceable_wrapper_subclass(tensor):
        raise MetadataError(f"a {type(tensor).__qualname__} cannot go from stage to stage; pass the tensors in it")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The format, version 1, little endian:
#
#   magic "PENS" · version u16 · length of all u32 · crc32 of all but itself u32 · node
#
#   node    tag u8, then by tag
#     0 None   1 False   2 True   3 int i64   4 float f64   5 str text
#     6 tensor   element type u8 · requires_grad u8 · dimensions u8 · sizes u64... · strides u64...
#     7 tuple count u32 · node...    8 list, the same    9 dict count u32 · (text · node)...
#   text    length u32 · UTF-8

MAGIC = b"PENS"
VERSION = 1
LONGEST = 1 << 24
MOST_NODES = 1 << 16
MOST_DIMENSIONS = 64
LARGEST_TENSOR = 1 << 62

START = struct.Struct("<4sHI")
CHECKSUM = struct.Struct("<I")
START_BYTES = START.size + CHECKSUM.size
COUNT = struct.Struct("<I")
INTEGER = struct.Struct("<q")
REAL = struct.Struct("<d")
TENSOR = struct.Struct("<BBB")

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


def encode(meta: EdgeMeta) -> bytes:
    """A description in bytes.

    >>> meta = describe([torch.ones(2, 3), None])
    >>> decode(encode(meta)) == meta
    True
    """
    body = bytearray()
    _write(meta.structure, iter(meta.tensors), body)
    length = START_BYTES + len(body)
    if length > LONGEST:
        raise MetadataError(f"a description of {length} bytes is too long to send; {LONGEST} are the most")
    start = START.pack(MAGIC, VERSION, length)
    return start + CHECKSUM.pack(zlib.crc32(body, zlib.crc32(start))) + body


@lru_cache(maxsize=256)  # the same few shapes come again and again
def decode(data: bytes) -> EdgeMeta:
    """The description in these bytes. Bytes that are anything else raise a ``MetadataError``."""
    length = _announced(data)
    if length != len(data):
        raise MetadataError(f"the description should have {length} bytes and has {len(data)}")
    (checksum,) = CHECKSUM.unpack_from(data, START.size)
    if checksum != zlib.crc32(data[START_BYTES:], zlib.crc32(data[: START.size])):
        raise MetadataError("the checksum of the description is wrong")
    reader = _Reader(data, START_BYTES)
    structure = reader.node(0)
    if reader.at != len(data):
        raise MetadataError(f"{len(data) - reader.at} bytes follow the end of the description")
    return EdgeMeta(structure, tuple(reader.tensors))


def _announced(data: bytes) -> int:
    """The length of all that these bytes begin."""
    if len(data) < START_BYTES:
        raise MetadataError(f"{len(data)} bytes are too few for a description")
    magic, version, length = START.unpack_from(data)
    if magic != MAGIC:
        raise MetadataError(f"a description begins with {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        raise MetadataError(
            f"the description has version {version}, this penstock reads {VERSION}; use one on all ranks"
        )
    if not START_BYTES < length <= LONGEST:
        raise MetadataError(f"a description cannot have {length} bytes")
    return int(length)


def _write(structure: Structure, tensors: Iterator[TensorMeta], into: bytearray) -> None:
    if isinstance(structure, Slot):
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


def _write_tensor(meta: TensorMeta, into: bytearray) -> None:
    if meta.dtype not in CODES:
        raise MetadataError(f"{meta} cannot go from stage to stage: its element type is not one of plain numbers")
    dimensions = len(meta.shape)
    if dimensions > MOST_DIMENSIONS:
        raise MetadataError(f"{meta} has {dimensions} dimensions; {MOST_DIMENSIONS} are the most")
    into.append(TENSOR_TAG)
    into += TENSOR.pack(CODES[meta.dtype], meta.requires_grad, dimensions)
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


class _Reader:
    """Reads one description from the front to the back, and trusts nothing in it."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self.at = at
        self.nodes = 0
        self.tensors: list[TensorMeta] = []

    def node(self, depth: int) -> Structure:
        self.nodes += 1
        if depth > DEEPEST or self.nodes > MOST_NODES:
            raise MetadataError(f"a description has at most {MOST_NODES} nodes in {DEEPEST} levels; this one has more")
        tag = self.take(1)[0]
        if tag in BRANCHES:
            return self.branch(BRANCHES[tag], depth)
        if tag == TENSOR_TAG:
            self.tensors.append(self.tensor())
            return SLOT
        return Constant(self.constant(tag))

    def branch(self, kind: type, depth: int) -> Branch:
        count = self.count()
        keys: list[int | str] = []
        children: list[Structure] = []
        for index in range(count):
            keys.append(self.text() if kind is dict else index)
            children.append(self.node(depth + 1))
        if len(set(keys)) != count:
            raise MetadataError("a dict in the description has a key twice")
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
        raise MetadataError(f"the description has the tag {tag}, which means nothing")

    def tensor(self) -> TensorMeta:
        code, requires_grad, dimensions = TENSOR.unpack(self.take(TENSOR.size))
        if code >= len(DTYPES) or requires_grad > 1 or dimensions > MOST_DIMENSIONS:
            raise MetadataError(
                f"no tensor has element type {code}, requires_grad {requires_grad}, {dimensions} dimensions"
            )
        numbers = struct.unpack(f"<{2 * dimensions}Q", self.take(16 * dimensions))
        meta = TensorMeta(numbers[:dimensions], DTYPES[code], bool(requires_grad), numbers[dimensions:])
        if not _dense(meta):
            raise MetadataError(f"{meta} with strides {list(meta.stride)} is not a dense tensor that could be received")
        return meta

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


def _dense(meta: TensorMeta) -> bool:
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
"""What precedes every microbatch when shapes vary: enough for about ten tensors, and a checksum of that."""
ROOM = HEADER_BYTES - CHECKSUM.size


def header_tensor(meta: EdgeMeta) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A description as a tensor of ``HEADER_BYTES`` bytes, and a second one with the rest if it is longer.

    >>> meta = describe(torch.ones(2, 3))
    >>> header, overflow = header_tensor(meta)
    >>> header.shape, overflow, read_header(header) == meta
    (torch.Size([512]), None, True)
    """
    data = encode(meta)
    begin = data[:ROOM].ljust(ROOM, b"\0")
    header = torch.frombuffer(bytearray(begin + CHECKSUM.pack(zlib.crc32(begin))), dtype=torch.uint8)
    if len(data) <= ROOM:
        return header, None
    return header, torch.frombuffer(bytearray(data[ROOM:]), dtype=torch.uint8)


def read_header(header: torch.Tensor, overflow: torch.Tensor | None = None) -> EdgeMeta | int:
    """The description in a header; or, if it does not end there, how many bytes of overflow there are to receive."""
    data = _bytes(header)
    begin, checksum = data[:ROOM], data[ROOM:]
    length = _announced(begin)
    # A wrong length must not get through: receiving less than what comes would end the process.
    if checksum != CHECKSUM.pack(zlib.crc32(begin)):
        raise MetadataError("the checksum of the header is wrong")
    if length > ROOM and overflow is None:
        return length - ROOM
    return decode((begin if overflow is None else begin + _bytes(overflow))[:length])


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
