import math
import re
import struct
import zlib
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from enum import IntEnum

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from penstock.errors import MetadataError
from penstock.execution.framing import MAX_BYTES, VERSION
from penstock.execution.trees import TENSOR
from penstock.execution.value_spec import TensorSpec, ValueSpec, as_wire, describe, flatten, mismatch
from penstock.execution.wire_format import (
    CODES,
    DTYPES,
    HEADER_BYTES,
    decode,
    encode,
    header_tensor,
    read_header,
)

Pair = namedtuple("Pair", "left right")


@dataclass
class Hidden:
    state: torch.Tensor


class Colour(IntEnum):
    RED = 1


class Subclass(torch.Tensor):
    """Plain memory under another name."""


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.zeros(shape, dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])))
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    if tensor.is_floating_point() and draw(st.booleans()):
        tensor = tensor.requires_grad_()
    return tensor


constants = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=8),
)
values = st.recursive(
    tensors() | constants,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=()), max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def the_same(one, other):
    """Equal down to the types, with the very same tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(the_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(the_same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor):
        return one is other
    return repr(one) == repr(other)


# --- tensors


def test_a_tensor_is_described():
    tensor = torch.zeros(4, 128, 32, dtype=torch.bfloat16, requires_grad=True)
    meta = TensorSpec.of(tensor)
    assert meta == TensorSpec((4, 128, 32), torch.bfloat16, True, (4096, 32, 1))
    assert str(meta) == "bfloat16[4, 128, 32]"
    assert type(meta.shape) is tuple
    assert str(TensorSpec.of(torch.tensor(1.0))) == "float32[]"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_survives(memory_format):
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=memory_format)
    received = TensorSpec.of(tensor).empty("cpu")
    assert received.is_contiguous(memory_format=memory_format)
    assert received.stride() == tensor.stride()


def cross(rank, ranks, *, group):
    tensor = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)[1:]
    meta = TensorSpec.of(tensor)
    if rank == 0:
        dist.send(as_wire(meta.to_layout(tensor)), 1, group=group)
        return True
    received = meta.empty("cpu").requires_grad_()
    dist.recv(as_wire(received), 0, group=group)
    return torch.equal(received, tensor) and received.stride() == tensor.stride()


def test_the_memory_format_survives_the_wire(workers):
    assert workers.run(cross, ranks=2) == [True, True]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6)[:, ::2],
        torch.randn(1, 6).expand(4, 6),
        torch.randn(2, 3, 4).permute(2, 0, 1)[1:],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(0, 3),
        torch.randn(4, 6).T,
    ],
)
def test_a_tensor_with_holes_is_sent_dense(tensor):
    meta = TensorSpec.of(tensor)
    sent = meta.to_layout(tensor)
    assert torch.equal(sent, tensor)
    assert sent.stride() == meta.stride == meta.empty().stride()
    assert not sent.is_conj()
    assert not sent.is_neg()
    assert sent.untyped_storage().nbytes() == sent.numel() * sent.element_size() or sent is tensor


def test_a_tensor_in_the_agreed_layout_is_not_copied():
    tensor = torch.randn(4, 6)
    assert TensorSpec.of(tensor).to_layout(tensor) is tensor


def test_an_agreed_layout_is_arranged():
    agreed = TensorSpec.of(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    tensor = torch.randn(2, 3, 4, 5, requires_grad=True)
    sent = agreed.to_layout(tensor)
    assert sent.is_contiguous(memory_format=torch.channels_last)
    assert not sent.requires_grad
    assert torch.equal(sent, tensor)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(3).to_sparse(), "a sparse_coo tensor cannot be sent"),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "a nested tensor cannot be sent",
        ),
        (TwoTensor(torch.ones(1), torch.ones(1)), "a TwoTensor cannot be sent between stages; pass the tensors in it"),
    ],
)
def test_only_plain_tensors_go_from_stage_to_stage(tensor, message):
    with pytest.raises(MetadataError, match=message):
        describe((1, tensor))


def test_subclasses_with_plain_memory_may_go():
    assert describe(torch.nn.Parameter(torch.ones(3))).tensors[0].requires_grad
    assert describe(torch.ones(3).as_subclass(Subclass)).is_single


# --- values


@settings(deadline=None)
@given(values)
def test_a_value_is_built_again(value):
    leaves, meta = flatten(value)
    assert the_same(meta.unflatten(leaves), value)
    assert meta == describe(value)
    assert hash(meta) == hash(describe(value))
    assert meta.matches(value)
    assert all(one is other for one, other in zip(meta.match(value), leaves, strict=True))
    assert meta.is_single == isinstance(value, torch.Tensor)


@settings(deadline=None)
@given(values, values)
def test_matching_is_what_mismatch_says(one, other):
    agreed, found = describe(one), describe(other)
    same = mismatch(agreed, found, sender="a", receiver="b") is None
    assert agreed.matches(other) == same
    if agreed == found:
        assert same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        (None, False),
        ((), []),
        ((), {}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((torch.ones(1), torch.ones(1)), (torch.ones(1),)),
        ((torch.ones(1),), [torch.ones(1)]),
        ((torch.ones(1),), torch.ones(1)),
        ((torch.ones(1), 1), (torch.ones(1), 2)),
        ((torch.ones(1),), (None,)),
    ],
)
def test_what_looks_alike_is_reported_apart(one, other):
    assert describe(one) != describe(other)
    assert not describe(one).matches(other)
    assert not describe(other).matches(one)
    assert mismatch(describe(one), describe(other), sender="a", receiver="b") is not None


def test_nan_equals_itself():
    assert describe(math.nan) == describe(float("nan"))
    assert describe([math.nan]).matches([float("nan")])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, {"pair": Pair(1, 2)}), r"output\[1\]\['pair'\] is a Pair, which cannot be sent"),
        (Hidden(torch.ones(1)), "output is a Hidden"),
        ([OrderedDict(a=1)], r"output\[0\] is a OrderedDict"),
        ([Colour.RED], r"output\[0\] is a Colour"),
        ({"sizes": torch.Size([1])}, r"output\['sizes'\] is a Size"),
        ({1: torch.ones(1)}, "output has the key 1; between stages, keys must be strings"),
        ([2**63], r"output\[0\] is an integer of more than 64 bits"),
        ({1, 2}, "output is a set"),
        (b"bytes", "output is a bytes"),
    ],
)
def test_what_cannot_go_is_named(value, message):
    for refuse in (describe, flatten):
        with pytest.raises(MetadataError, match=message):
            refuse(value)
    assert not describe(1).matches(value)


def test_a_list_that_holds_itself_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(MetadataError, match="does it contain itself"):
        describe(endless)


def test_the_wrong_number_of_tensors_is_refused():
    with pytest.raises(MetadataError, match="2 tensors for a value that has 1"):
        describe(torch.ones(1)).unflatten([torch.ones(1), torch.ones(1)])


# --- mismatches


@pytest.mark.parametrize(
    ("agreed", "found", "message"),
    [
        (
            (1, {"h": torch.ones(4, 128)}),
            (1, {"h": torch.ones(4, 96)}),
            "the output of stage 1 is not what stage 2 expects: "
            "output[1]['h'] is float32[4, 96], but float32[4, 128] was agreed; "
            'if shapes vary between microbatches, pass shapes="per_microbatch"',
        ),
        (
            torch.ones(2),
            torch.ones(2, dtype=torch.float64),
            "output is float64[2], but float32[2] was agreed",
        ),
        (
            [torch.ones(2, requires_grad=True)],
            [torch.ones(2)],
            "output[0] has requires_grad=False, but True was agreed; a stage must need the gradient",
        ),
        (
            (torch.ones(2), 0.5),
            (torch.ones(2), 0.7),
            "output[1] is 0.7, but 0.5 was agreed; if what a stage returns varies",
        ),
        ((torch.ones(2), None), (torch.ones(2), torch.ones(2)), "output[1] is a tensor, but None was agreed"),
        ((torch.ones(2),), (torch.ones(2),) * 2, "output is a tuple of 2, but a tuple of 1 was agreed"),
        ({"a": 1}, {"b": 1}, "output is a dict with the keys 'b', but a dict with the keys 'a' was agreed"),
    ],
)
def test_a_mismatch_names_both_sides(agreed, found, message):
    error = mismatch(describe(agreed), describe(found), sender="stage 1", receiver="stage 2")
    assert isinstance(error, MetadataError)
    assert message in str(error)


def test_gradients_count_only_in_training():
    agreed, found = torch.ones(2, requires_grad=True), torch.ones(2)
    assert mismatch(describe(agreed), describe(found), sender="", receiver="", gradients=False) is None
    assert describe(agreed).matches(found, gradients=False)
    assert not describe(agreed).matches(found)


def test_layout_is_no_mismatch():
    agreed = describe(torch.ones(3, 4))
    assert agreed.matches(torch.ones(4, 3).T)
    assert mismatch(agreed, describe(torch.ones(4, 3).T), sender="", receiver="") is None


# --- bytes


@settings(deadline=None)
@given(values)
def test_a_description_survives_the_bytes(value):
    meta = describe(value)
    again = decode(encode(meta))
    assert again == meta
    assert again.is_single == meta.is_single
    for tensor in again.tensors:
        assert tensor.empty("meta").shape == tensor.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_type_survives(dtype):
    meta = ValueSpec(TENSOR, (TensorSpec((3,), dtype, False, (1,)),))
    assert decode(encode(meta)) == meta


def test_the_bytes_do_not_change():
    """What one penstock writes, another of the same version must read."""
    data = encode(describe({"h": torch.ones(2, 3, requires_grad=True), "n": [None, True, -2, 0.5, "é"]}))
    assert data.hex() == (
        "50454e530300"  # PENS, version 3
        "65000000"  # 101 bytes
        "5e23d985"  # checksum
        "0902000000"  # a dict of two
        "0100000068"  # 'h'
        "06000102"  # tensor: float32, requires_grad, two dimensions
        "02000000000000000300000000000000"  # sizes
        "03000000000000000100000000000000"  # strides
        "010000006e"  # 'n'
        "0805000000"  # a list of five
        "00"
        "02"
        "03feffffffffffffff"
        "04000000000000e03f"
        "0502000000c3a9"
        "00000000"  # no tensors share memory
    )


def test_what_shares_memory_survives():
    tensor, other = torch.ones(2, 3), torch.ones(2)
    meta = describe([tensor, other, {"again": tensor, "column": tensor[:, 0]}, other])
    assert meta.shared == ((0, 2, 3), (1, 4))
    assert decode(encode(meta)) == meta
    assert encode(meta)[-32:].hex() == (
        "02000000"  # two memories
        "03000000000000000200000003000000"  # of three tensors
        "020000000100000004000000"  # of two
    )


def only_metadata_errors(data):
    """The description in the bytes, or None; anything else is a failure of the test."""
    try:
        return decode(data)
    except MetadataError:
        return None


def sealed(body, *, magic=b"PENS", version=VERSION):
    """A body with a right beginning around it, so that reading gets to it."""
    start = struct.pack("<4sHI", magic, version, 14 + len(body))
    return start + struct.pack("<I", zlib.crc32(body, zlib.crc32(start))) + body


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    assert only_metadata_errors(data) is None


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60) | st.lists(st.integers(0, 9), max_size=60).map(bytes))
def test_random_bytes_with_a_right_checksum_give_a_description_or_an_error(body):
    meta = only_metadata_errors(sealed(body))
    if meta is not None:
        assert decode(encode(meta)) == meta
        assert meta.unflatten([tensor.empty("meta") for tensor in meta.tensors]) is not meta


@settings(deadline=None)
@given(values, st.data())
def test_damage_is_always_found(value, data):
    whole = encode(describe(value))
    assert only_metadata_errors(whole[: data.draw(st.integers(0, len(whole) - 1))]) is None
    assert only_metadata_errors(whole + data.draw(st.binary(min_size=1, max_size=4))) is None
    flipped = bytearray(whole)
    at = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped[at // 8] ^= 1 << at % 8
    assert only_metadata_errors(bytes(flipped)) is None


@settings(max_examples=300, deadline=None)
@given(values, st.data())
def test_damage_under_a_right_checksum_never_breaks_the_reader(value, data):
    body = bytearray(encode(describe(value))[14:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    meta = only_metadata_errors(sealed(bytes(body)))
    assert meta is None or decode(encode(meta)) == meta


def tensor_body(shape, stride, *, code=CODES[torch.float32], requires_grad=0):
    numbers = struct.pack(f"<{len(shape) + len(stride)}Q", *shape, *stride)
    return bytes([6, code, requires_grad, len(shape)]) + numbers


def groups(*found):
    return struct.pack("<I", len(found)) + b"".join(struct.pack(f"<{1 + len(one)}I", len(one), *one) for one in found)


TWO_TENSORS = b"\x07\2\0\0\0" + 2 * tensor_body([2], [1])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are too few"),
        (sealed(b"\0", magic=b"NOPE"), "starts with b'PENS', not b'NOPE'"),
        (sealed(b"\0", version=1), "version 1, but this penstock reads 3"),
        (sealed(b""), "cannot have 14 bytes"),
        (struct.pack("<4sHII", b"PENS", VERSION, MAX_BYTES + 1, 0), f"cannot have {MAX_BYTES + 1} bytes"),
        (sealed(b"\0")[:-1] + b"\1", "checksum"),
        (sealed(b"\0" + groups() + b"\0"), "1 bytes follow the end"),
        (sealed(b"\0"), "ends too early"),
        (sealed(b"\0" + groups((0, 1))), "tensors [0, 1] of 0 cannot share memory"),
        (sealed(TWO_TENSORS + groups((0, 1), (1,))), "tensors [0, 1, 1] of 2 cannot share memory"),
        (sealed(TWO_TENSORS + groups((0, 2))), "tensors [0, 2] of 2 cannot share memory"),
        (sealed(b"\x0b"), "the unknown tag 11"),
        (sealed(b"\5\xff\xff\xff\xff"), "ends too early"),
        (sealed(b"\x07\xff\xff\xff\xff"), "ends too early"),
        (sealed(b"\5\1\0\0\0\xff"), "not UTF-8"),
        (sealed(b"\x09\2\0\0\0" + b"\1\0\0\0a\0" * 2), "a duplicate key"),
        (sealed(b"\x08\1\0\0\0" * 40 + b"\0"), "32 levels"),
        (sealed(b"\x08\xff\xff\1\0" + b"\0" * 0x1FFFF), "at most 65536 nodes"),
        (sealed(tensor_body([2], [1], code=200)), "no tensor has element type 200"),
        (sealed(tensor_body([2], [1], requires_grad=2)), "requires_grad 2"),
        (sealed(tensor_body([2, 2], [4, 1])), "not a dense tensor"),
        (sealed(tensor_body([2, 2], [1, 1])), "not a dense tensor"),
        (sealed(tensor_body([2], [0])), "not a dense tensor"),
        (sealed(tensor_body([2**63], [1])), "not a dense tensor"),
        (sealed(tensor_body([2**40, 2**40], [2**40, 1])), "not a dense tensor"),
        (sealed(tensor_body([1], [2**63])), "not a dense tensor"),
    ],
)
def test_a_bad_description_says_why(data, message):
    with pytest.raises(MetadataError, match=re.escape(message)):
        decode(data)


def test_what_cannot_be_encoded_is_reported():
    with pytest.raises(MetadataError, match="is too long to send"):
        encode(describe("x" * MAX_BYTES))
    meta = ValueSpec(TENSOR, (TensorSpec((1,), torch.quint8, False, (1,)),))
    with pytest.raises(MetadataError, match=r"quint8\[1\] cannot be sent between stages"):
        encode(meta)


# --- headers


@settings(deadline=None)
@given(values)
def test_a_header_has_it_all(value):
    meta = describe(value)
    header, overflow = header_tensor(meta)
    assert header.shape == (HEADER_BYTES,)
    assert header.dtype is torch.uint8
    if overflow is None:
        assert read_header(header) == meta
    else:
        assert read_header(header) == overflow.numel()
        assert read_header(header, overflow) == meta


def test_a_long_description_overflows():
    meta = describe([torch.ones(2, 3, 4)] * 20)
    header, overflow = header_tensor(meta)
    needed = read_header(header)
    assert isinstance(needed, int)
    assert needed == overflow.numel() == len(encode(meta)) - (HEADER_BYTES - 4)  # the checksum of the header
    assert read_header(header, overflow) == meta
    with pytest.raises(MetadataError, match="should have"):
        read_header(header, overflow[:-1])
    with pytest.raises(MetadataError, match="checksum"):
        read_header(header, overflow.flip(0))


def test_about_ten_tensors_need_no_overflow():
    assert header_tensor(describe([torch.ones(2, 3, 4) for _ in range(9)]))[1] is None


@settings(deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_a_header_of_garbage_is_refused(data):
    with pytest.raises(MetadataError):
        read_header(torch.frombuffer(bytearray(data), dtype=torch.uint8))
