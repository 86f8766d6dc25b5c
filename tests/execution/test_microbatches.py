import math
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import microbatch as oracle
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.utils import _pytree as pytree

from penstock.errors import MicrobatchError
from penstock.execution.microbatches.merge import merge
from penstock.execution.microbatches.specs import (
    Microbatches,
    Replicate,
    TensorChunkSpec,
    register_splitter,
    unregister_splitter,
)
from penstock.execution.microbatches.split import samples, sizes, split, split_call

Pair = namedtuple("Pair", "left right")


@dataclass
class Known:
    x: torch.Tensor
    y: object


pytree.register_dataclass(Known)


@dataclass
class Unknown:
    x: torch.Tensor


class Ragged:
    """Rows of any length."""

    def __init__(self, rows):
        self.rows = rows


class MoreRagged(Ragged):
    pass


@pytest.fixture
def ragged_splitter():
    def cut(value, microbatches):
        return [Ragged(part) for part in split(Microbatches(value.rows), None, len(value.rows))][:microbatches]

    register_splitter(
        Ragged,
        cut,
        lambda values: Ragged([value.rows for value in values]),
        size=lambda value: len(value.rows),
    )
    yield
    unregister_splitter(Ragged)


def equal(one, other):
    """Equal trees with equal tensors."""
    left, left_spec = pytree.tree_flatten(one)
    right, right_spec = pytree.tree_flatten(other)
    return left_spec == right_spec and all(map(equal_leaf, left, right))


def equal_leaf(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


# --- splitting


def test_the_first_microbatches_have_one_more():
    assert [len(part) for part in split(torch.arange(11), None, 4)] == sizes(11, 4) == [3, 3, 3, 2]
    assert equal(split(torch.arange(11), None, 4), list(torch.arange(11).tensor_split(4)))


def test_every_container_that_torch_knows_is_split():
    x = torch.arange(4)
    value = (
        x,
        [x, "text", None],
        {"b": x, "a": {"deep": x}},
        Pair(x, 2),
        OrderedDict(x=x),
        defaultdict(list, x=x),
        deque([x]),
        Known(x, 3.0),
        (),
    )
    first, second = split(value, None, 2)
    for half, part in ((x[:2], first), (x[2:], second)):
        expected = pytree.tree_map(lambda leaf: half if isinstance(leaf, torch.Tensor) else leaf, value)  # noqa: B023
        assert equal(part, expected)
        assert type(part[3]) is Pair
        assert type(part[7]) is Known


def test_a_call_is_split():
    x, y, mask = torch.arange(6.0).view(3, 2), torch.arange(3), torch.arange(6).view(2, 3)
    args, kwargs, targets = split_call(
        (x, "text"), {"mask": mask, "rate": 0.5}, y, 2, kwargs_spec={"mask": TensorChunkSpec(1)}
    )
    assert equal(args, [(x[:2], "text"), (x[2:], "text")])
    assert equal(kwargs, [{"mask": mask[:, :2], "rate": 0.5}, {"mask": mask[:, 2:], "rate": 0.5}])
    assert equal(targets, [y[:2], y[2:]])


def test_a_call_without_anything():
    assert split_call((), None, None, 3) == ([()] * 3, [{}] * 3, [None] * 3)
    assert split_call((), {}, None, 1) == ([()], [{}], [None])


def test_a_spec_holds_for_all_below_it():
    x = torch.arange(12).view(3, 4)
    value = {"a": [x, (x, 7)], "b": x.T}
    parts = split(value, {"a": TensorChunkSpec(-1)}, 2)
    assert equal(
        parts, [{"a": [x[:, :2], (x[:, :2], 7)], "b": x.T[:2]}, {"a": [x[:, 2:], (x[:, 2:], 7)], "b": x.T[2:]}]
    )


def test_replicate_gives_the_whole():
    x, table = torch.arange(4), torch.arange(7)
    for replicate in (Replicate, Replicate()):
        parts = split((x, {"table": table, "scalar": torch.tensor(1.0)}), (None, replicate), 2)
        assert all(part[1]["table"] is table for part in parts)


def test_already_split_values_may_stand_anywhere():
    x = torch.arange(4)
    parts = [torch.ones(1), torch.ones(3)]
    args, kwargs, target = split_call((x, [Microbatches(parts)]), {"k": Microbatches([1, 2])}, Microbatches("ab"), 2)
    assert equal(args, [(x[:2], [parts[0]]), (x[2:], [parts[1]])])
    assert kwargs == [{"k": 1}, {"k": 2}]
    assert target == ["a", "b"]
    assert split_call(Microbatches([(1,), (2,)]), {}, None, 2)[0] == [(1,), (2,)]
    assert len(Microbatches("ab")) == 2
    assert list(Microbatches("ab")) == ["a", "b"]
    assert Microbatches("ab")[1] == "b"


def test_a_tensor_that_requires_grad_splits_with_its_history():
    x = torch.ones(5, requires_grad=True)
    first, second = split(x, None, 2)
    (2 * first.sum() + 3 * second.sum()).backward()
    assert x.grad.tolist() == [2, 2, 2, 3, 3]


def test_a_microbatch_may_be_changed_in_place():
    x = torch.ones(4, requires_grad=True)
    for part in split(x * 1, None, 2):
        part *= 2
        part.sum().backward(retain_graph=True)
    assert x.grad.tolist() == [2] * 4
    weight = torch.ones(2, requires_grad=True)
    for part in split(torch.ones(4), None, 2):
        part += weight
        part.sum().backward()
    assert weight.grad.tolist() == [2] * 2


def test_parts_are_views():
    x = torch.zeros(4, 2)
    assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in split(x, None, 3))


@pytest.mark.parametrize(
    ("value", "spec", "name", "message"),
    [
        (
            torch.tensor(1.0),
            None,
            "value",
            "value is a single number and cannot be split into 4 microbatches; write Repl",
        ),
        (
            [torch.ones(3, 9)],
            None,
            "value[0]",
            "value[0] of shape [3, 9] cannot be split into 4 microbatches: it has 3 along dimension 0; pass at least 4",
        ),
        ([torch.ones(3, 9)], [TensorChunkSpec(2)], "value[0]", "value[0] of shape [3, 9] has no dimension 2 to split"),
        (
            {"x": torch.ones(8, 2), "mask": {"m": torch.ones(1, 2)}},
            None,
            "value['mask']['m']",
            "value['x'] of shape [8, 2] and value['mask']['m'] of shape [1, 2] have 8 and 1 samples; write Replicate "
            "in the spec of value['mask']['m'] if every microbatch needs all of it",
        ),
        (
            Pair(torch.ones(8), torch.ones(6)),
            None,
            "value.right",
            "value.left of shape [8] and value.right of shape [6] have 8 and 6 samples; write TensorChunkSpec(dim)",
        ),
        ([Microbatches([1, 2])], None, "value[0]", "value[0] is given as 2 microbatches, but the schedule has 4"),
        (torch.ones(8), 0, "value", "the spec of value is 0; write TensorChunkSpec(dim), Replicate, or containers"),
        ({"a": 1}, {"b": None}, "value", "the spec of value has 'b', which is not in value"),
        ([[1, 2]], [[None]], "value[0]", "the spec of value[0] is for 1 values, but value[0] holds 2"),
        ([1], [(Replicate,)], "value[0]", "the spec of value[0] is for 1 values, but value[0] is not a container"),
        (
            {"u": Unknown(torch.ones(8))},
            None,
            "value['u']",
            "value['u'] is a Unknown that contains tensors, and it has no splitter; call register_splitter(Unk",
        ),
    ],
)
def test_what_cannot_be_split_is_named(value, spec, name, message):
    with pytest.raises(MicrobatchError) as caught:
        split(value, spec, 4)
    assert message in str(caught.value)
    assert caught.value.name == name


def test_an_object_with_tensors_may_be_replicated():
    value = Unknown(torch.ones(8))
    assert split(value, Replicate, 2) == [value, value]


def test_target_and_arguments_must_agree():
    with pytest.raises(
        MicrobatchError, match=r"args\[0\] of shape \[8\] and target of shape \[16\] have 8 and 16 samples"
    ):
        split_call((torch.ones(8),), {}, torch.ones(16), 2)


def test_the_number_of_microbatches_must_be_one_at_least():
    with pytest.raises(MicrobatchError, match="must be at least 1, got 0"):
        split(torch.ones(8), None, 0)


def test_a_type_without_names_for_its_children():
    class Box:
        def __init__(self, inner):
            self.inner = inner

    pytree.register_pytree_node(Box, lambda box: ([box.inner], None), lambda inner, _: Box(*inner))
    first, _ = split(Box(torch.arange(4)), None, 2)
    assert first.inner.tolist() == [0, 1]
    with pytest.raises(MicrobatchError, match=r"value \(leaf 0\)"):
        split(Box(torch.tensor(1)), None, 2)


# --- samples


def test_samples_weigh_a_mean():
    value = (torch.ones(7, 2), 3)
    assert samples(value, split(value, None, 3)) == [3, 2, 2]
    assert samples(["text"], split(["text"], None, 3)) is None
    value, spec = [torch.ones(9), torch.ones(2, 7)], [Replicate, TensorChunkSpec(1)]
    assert samples(value, split(value, spec, 3), spec) == [3, 2, 2]
    parts = [torch.ones(4), torch.ones(1)]
    assert samples(Microbatches(parts), parts) == [4, 1]
    assert samples(Microbatches(["text", "more"]), ["text", "more"]) is None


# --- merging


def test_outputs_are_merged():
    parts = [
        {"y": torch.ones(2, 3), "loss": torch.tensor(1.0), "name": "a", "s": (torch.zeros(1, 2),)},
        {"y": torch.zeros(1, 3), "loss": torch.tensor(2.0), "name": "a", "s": (torch.zeros(1, 3),)},
    ]
    merged = merge(parts, {"s": TensorChunkSpec(1)})
    assert equal(
        merged,
        {
            "y": torch.cat([torch.ones(2, 3), torch.zeros(1, 3)]),
            "loss": torch.tensor([1.0, 2.0]),
            "name": "a",
            "s": (torch.zeros(1, 5),),
        },
    )


def test_one_microbatch_is_not_copied():
    x = torch.ones(3)
    assert merge([(x,)])[0] is x
    assert merge([torch.tensor(1.0)]).shape == (1,)


def test_merging_keeps_the_history():
    x = torch.ones(4, requires_grad=True)
    merge(split(x, None, 3)).mul(torch.arange(4)).sum().backward()
    assert x.grad.tolist() == [0, 1, 2, 3]


def test_what_differs_can_be_kept():
    parts = [(torch.ones(1, 2), 0.5), (torch.ones(1, 3), 0.7)]
    kept = merge(parts, Microbatches)
    assert [part.shape for part in kept[0]] == [(1, 2), (1, 3)]
    assert list(kept[1]) == [0.5, 0.7]
    assert equal(split(kept, None, 2), parts)


def test_replicated_outputs_are_compared():
    nan = torch.tensor([1.0, math.nan])
    assert merge([nan, nan.clone()], Replicate).shape == (2,)
    assert merge([torch.tensor([True]), torch.tensor([True])], Replicate).tolist() == [True]
    assert math.isnan(merge([math.nan, float("nan")]))
    with pytest.raises(MicrobatchError, match=r"output differs between microbatches \(float32\[2\] and float32\[2\]\)"):
        merge([torch.ones(2), torch.zeros(2)], Replicate)


@pytest.mark.parametrize(
    ("parts", "spec", "message"),
    [
        ([], None, "output has no microbatches"),
        ([(1, "a"), (1, "b")], None, "output[1] differs between microbatches ('a' and 'b')"),
        ([1, 1.0], None, "output differs between microbatches (1 and 1.0)"),
        ([torch.ones(1), None], None, "output differs between microbatches (float32[1] and None)"),
        ([(1,), [1]], None, "microbatch 1 returned output with a different structure from microbatch 0"),
        (
            [{"y": torch.ones(1, 2)}, {"y": torch.ones(1, 3)}],
            None,
            "output['y'] is float32[1, 2] and float32[1, 3] in the microbatches, which cannot be concatenated along",
        ),
        ([torch.ones(1), torch.ones(1).double()], None, "output is float32[1] and float64[1]"),
        ([torch.ones(1), torch.ones(1)], TensorChunkSpec(1), "cannot be concatenated along dimension 1"),
    ],
)
def test_what_cannot_be_merged_is_named(parts, spec, message):
    with pytest.raises(MicrobatchError) as caught:
        merge(parts, spec)
    assert message in str(caught.value)


# --- any value


@st.composite
def batches(draw):
    """A value, its spec, and a number of microbatches that it can be split into."""
    samples = draw(st.integers(1, 9))
    microbatches = draw(st.integers(1, samples))

    def tensor(dim, ndim):
        shape = [2] * ndim
        shape[dim] = samples
        value = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
        return value, TensorChunkSpec(dim) if dim else draw(st.sampled_from([None, TensorChunkSpec(0)]))

    tensors = st.integers(1, 3).flatmap(lambda ndim: st.integers(-ndim, ndim - 1).map(lambda dim: tensor(dim, ndim)))
    replicated = st.sampled_from([(torch.arange(3), Replicate), (torch.tensor(2.0), Replicate)])
    others = st.sampled_from([1, 2.5, "text", None, True]).map(lambda value: (value, None))
    leaves = tensors | replicated | others

    def containers(inner):
        rows = st.lists(inner, max_size=3)
        return (
            rows.map(lambda items: ([item[0] for item in items], [item[1] for item in items]))
            | rows.map(lambda items: (tuple(item[0] for item in items), tuple(item[1] for item in items)))
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
                lambda items: ({k: v[0] for k, v in items.items()}, {k: v[1] for k, v in items.items()})
            )
            | st.tuples(inner, inner).map(lambda pair: (Pair(pair[0][0], pair[1][0]), Pair(pair[0][1], pair[1][1])))
            | st.tuples(inner, inner).map(lambda pair: (Known(pair[0][0], pair[1][0]), Known(pair[0][1], pair[1][1])))
        )

    value, spec = draw(st.recursive(leaves, containers, max_leaves=8))
    return value, spec, microbatches


@settings(deadline=None)
@given(batches())
def test_merging_undoes_splitting(batch):
    value, spec, microbatches = batch
    parts = split(value, spec, microbatches)
    assert len(parts) == microbatches
    assert equal(merge(parts, spec), value)


# --- the installed torch


def torch_spec(spec):
    return pytree.tree_map(lambda leaf: oracle.TensorChunkSpec(leaf.split_dim), spec)


@pytest.mark.parametrize("rows", [4, 5, 7, 12])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_torch_splits_and_merges_the_same(rows, microbatches):
    args = (torch.randn(rows, 3), torch.randn(2, rows))
    kwargs = {"mask": torch.randn(3, 2, rows), "more": torch.randn(rows)}
    args_spec, kwargs_spec = TensorChunkSpec.from_tuple((0, 1)), TensorChunkSpec.from_dict({"mask": 2, "more": 0})
    ours = split_call(args, kwargs, None, microbatches, args_spec, kwargs_spec)
    theirs = oracle.split_args_kwargs_into_chunks(
        args, kwargs, microbatches, torch_spec(args_spec), torch_spec(kwargs_spec)
    )
    assert equal(ours[0], theirs[0])
    assert equal(ours[1], theirs[1])
    for parts, spec in zip(ours[:2], (args_spec, kwargs_spec), strict=True):
        assert equal(merge(parts, spec), oracle.merge_chunks(parts, torch_spec(spec)))


def test_torch_splits_the_same_by_default():
    args, kwargs = (torch.randn(5, 3), "text", None), {"nested": {"x": torch.randn(5)}, "flag": True}
    ours = split_call(args, kwargs, None, 2)
    assert equal(list(ours[:2]), list(oracle.split_args_kwargs_into_chunks(args, kwargs, 2)))


# --- types with a splitter of their own


def test_a_type_with_its_own_splitter(ragged_splitter):
    value = (torch.arange(2), MoreRagged([[1], [2, 3]]))
    parts = split(value, None, 2)
    assert [part[1].rows for part in parts] == [[1], [2, 3]]
    assert merge(parts)[1].rows == [[1], [2, 3]]
    whole = split(value, (None, Replicate), 2)
    assert whole[0][1] is whole[1][1] is value[1]


@pytest.mark.parametrize(
    ("value", "spec", "microbatches", "message"),
    [
        (
            (torch.arange(4), Ragged([[1], [2]])),
            None,
            2,
            r"value\[0\] of shape \[4\] and value\[1\] have 4 and 2 samples",
        ),
        ((Ragged([[1], [2]]),), TensorChunkSpec(1), 2, r"value\[0\] is a Ragged, which has a registered splitter"),
        ((Ragged([[1], [2]]),), None, 3, r"value\[0\] cannot be split into 3 microbatches"),
    ],
)
def test_a_type_with_its_own_splitter_must_fit(ragged_splitter, value, spec, microbatches, message):
    with pytest.raises(MicrobatchError, match=message):
        split(value, spec, microbatches)


def test_a_splitter_must_make_as_many_as_asked():
    register_splitter(Ragged, lambda value, microbatches: [value])
    try:
        with pytest.raises(MicrobatchError, match="the splitter of Ragged returned 1 microbatches of value, not 2"):
            split(Ragged([]), None, 2)
        with pytest.raises(MicrobatchError, match="output differs between microbatches"):
            merge([Ragged([]), Ragged([])])
    finally:
        unregister_splitter(Ragged)


@pytest.fixture
def documents():
    """Which document each token of five samples belongs to."""
    return torch.randint(0, 3, (5, 256), generator=torch.Generator().manual_seed(1)).sort(1).values


def within_documents(documents):
    def mask_mod(batch, head, query, key):
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return mask_mod


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_a_block_mask_counts_samples_from_the_start_of_its_microbatch(documents, microbatches):
    mask_mod = within_documents(documents)
    mask = create_block_mask(mask_mod, 5, None, 256, 256, device="cpu", BLOCK_SIZE=32)
    tokens = create_mask(mask_mod, 5, 1, 256, 256, device="cpu")
    start = 0
    for part, length in zip(split(mask, None, microbatches), sizes(5, microbatches), strict=True):
        rows = slice(start, start + length)
        assert torch.equal(part.to_dense(), mask.to_dense()[rows])
        assert torch.equal(create_mask(part.mask_mod, length, 1, 256, 256, device="cpu"), tokens[rows])
        again = create_block_mask(part.mask_mod, length, None, 256, 256, device="cpu", BLOCK_SIZE=32)
        assert torch.equal(again.to_dense(), part.to_dense())
        start += length
    assert mask.mask_mod is mask_mod


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_is_the_same_in_microbatches(documents):
    mask = create_block_mask(within_documents(documents), 5, None, 256, 256, device="cpu", BLOCK_SIZE=32)
    query, key, value = torch.randn(3, 5, 2, 256, 8, generator=torch.Generator().manual_seed(2))
    args, kwargs, _ = split_call((query, key, value), {"block_mask": mask}, None, 2)
    parts = [flex_attention(*arguments, **keywords) for arguments, keywords in zip(args, kwargs, strict=True)]
    torch.testing.assert_close(merge(parts), flex_attention(query, key, value, block_mask=mask))


def test_a_block_mask_for_all_samples_is_given_whole():
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu", BLOCK_SIZE=64)
    _, kwargs, _ = split_call((torch.ones(5),), {"mask": mask}, None, 2)
    assert all(part["mask"] is mask for part in kwargs)


def test_a_block_mask_must_have_as_many_samples(documents):
    mask = create_block_mask(within_documents(documents), 5, None, 256, 256, device="cpu", BLOCK_SIZE=32)
    with pytest.raises(MicrobatchError, match=r"args\[0\] of shape \[4\] and kwargs\['mask'\].* have 4 and 5 samples"):
        split_call((torch.ones(4),), {"mask": mask}, None, 2)
