"""Batches are split and merged: by default along the first dimension, or as a specification says."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pipelining.contracts import WIDTH, numbers, wrong_upstream


@pytest.fixture
def m(package):
    return package.microbatch


def rows(*counts):
    return tuple(numbers(count, count, WIDTH) for count in counts)


def test_along_the_first_dimension(m):
    args, (k,) = rows(4, 8, 12), rows(6)
    split_args, split_kwargs = m.split_args_kwargs_into_chunks(args, {"k": k, "flag": True, "name": None}, 2)
    assert [tuple(len(x) for x in chunk) for chunk in split_args] == [(2, 4, 6), (2, 4, 6)]
    assert [(len(chunk["k"]), chunk["flag"], chunk["name"]) for chunk in split_kwargs] == [(3, True, None)] * 2
    assert all(isinstance(chunk, tuple) for chunk in split_args)
    assert all(isinstance(chunk, dict) for chunk in split_kwargs)
    merged = m.merge_chunks(split_args, (m.TensorChunkSpec(0),) * 3)
    torch.testing.assert_close(merged, args)
    torch.testing.assert_close(m.merge_chunks(split_args, None), args)


def test_without_keywords(m):
    split_args, split_kwargs = m.split_args_kwargs_into_chunks(rows(4), None, 2)
    assert len(split_args) == 2
    assert split_kwargs == [{}, {}]


def test_uneven(m):
    split_args, _ = m.split_args_kwargs_into_chunks(rows(10), {}, 4)
    assert [len(x) for (x,) in split_args] == [3, 3, 2, 2]


def test_fewer_rows_than_microbatches(m):
    """As many as there are rows come out, of all."""
    split_args, split_kwargs = m.split_args_kwargs_into_chunks(rows(4), {"k": rows(3)[0], "n": 1}, 8)
    assert len(split_args) == len(split_kwargs) == 3
    with pytest.raises(AssertionError, match="3"):
        m._split_tensor(*rows(3), m.TensorChunkSpec(0), 4)


def test_nested(m):
    x, y = rows(4, 4)
    split_args, _ = m.split_args_kwargs_into_chunks(({"a": [x, (y, 5)]},), {}, 2)
    assert [chunk[0]["a"][1][1] for chunk in split_args] == [5, 5]
    torch.testing.assert_close(torch.cat([chunk[0]["a"][1][0] for chunk in split_args]), y)


def test_specifications(m):
    spec = m.TensorChunkSpec.from_tuple((1, 0))
    assert [each.split_dim for each in spec] == [1, 0]
    named = {**m.TensorChunkSpec.from_dict({"y": 1}), "whole": m._Replicate()}
    x, y, z = rows(4, 6, 4)
    split_args, split_kwargs = m.split_args_kwargs_into_chunks((x, y), {"y": z, "whole": z}, 2, spec, named)
    assert [(tuple(a.shape), tuple(b.shape)) for a, b in split_args] == [((4, 2), (3, 4))] * 2
    assert [tuple(chunk["y"].shape) for chunk in split_kwargs] == [(4, 2)] * 2
    assert all(chunk["whole"] is z for chunk in split_kwargs)
    assert str(spec[0]) == "TensorChunkSpec(1)"


@pytest.mark.parametrize("kind", [lambda m: m._Replicate, lambda m: m._Replicate()])
def test_the_class_means_what_an_instance_means(m, kind):
    (x,) = rows(4)
    split_args, _ = m.split_args_kwargs_into_chunks((x,), {}, 2, (kind(m),))
    assert [chunk[0] is x for chunk in split_args] == [True, True]


def test_specifications_that_do_not_fit(m):
    (x,) = rows(4)
    with pytest.raises(AssertionError):
        m.split_args_kwargs_into_chunks((x,), {}, 2, (0,))
    with pytest.raises(AssertionError):
        m.split_args_kwargs_into_chunks((x,), {"k": x}, 2, None, m.TensorChunkSpec.from_dict({"k": 0, "other": 0}))
    with pytest.raises(ValueError, match="5"):
        m.split_args_kwargs_into_chunks((5,), {}, 2, (m.TensorChunkSpec(0),))
    with pytest.raises(ValueError):  # noqa: PT011
        m.merge_chunks([(x, x), (x, x)], (m.TensorChunkSpec(0),))


def test_gradients_come_to_the_parts_and_to_the_whole(m):
    (x,) = rows(4)
    x.requires_grad_()
    parts, _ = m.split_args_kwargs_into_chunks((x,), {}, 2)
    for (part,) in parts:
        (part * part).sum().backward()
        torch.testing.assert_close(part.grad, 2 * part.detach())
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_reducers_and_values_that_agree(m):
    chunks = [(torch.ones(()), "same"), (torch.full((), 2.0), "same")]
    total, value = m.merge_chunks(chunks, (m._CustomReducer(torch.zeros(()), lambda a, b: a + b), None))
    assert (total.item(), value) == (3.0, "same")
    assert m.merge_chunks([(torch.ones(()),)] * 3, (m.sum_reducer,))[0].item() == 3.0
    assert isinstance(m.sum_reducer, m._LossReducer)
    with pytest.raises(AssertionError, match="other"):
        m.merge_chunks([("same",), ("other",)], (None,))


def test_merging_keeps_the_form(m):
    chunks = [{"a": x, "b": [x]} for (x,) in ((each,) for each in rows(2, 3))]
    merged = m.merge_chunks(chunks, None)
    assert set(merged) == {"a", "b"}
    assert len(merged["a"]) == len(merged["b"][0]) == 5
    assert m.merge_chunks([rows(2)[0], rows(3)[0]], None).shape == (5, WIDTH)


# Block masks ----------------------------------------------------------------------------------------------------------


def documents(batch, length):
    """A mask of its own for every row: causal within documents of different lengths."""
    document = torch.stack([torch.arange(length) // (7 + 5 * row) for row in range(batch)])

    def mask(b, h, q, k):
        return (document[b, q] == document[b, k]) & (q >= k)

    return create_block_mask(mask, B=batch, H=1, Q_LEN=length, KV_LEN=length, device="cpu", BLOCK_SIZE=16)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_masks_are_split_with_the_batch(m):
    batch, length = 5, 48
    query = numbers(1, batch, 1, length, 16)
    whole = documents(batch, length)
    expected = flex_attention(query, query, query, block_mask=whole)
    parts, _ = m.split_args_kwargs_into_chunks((query, {"block_mask": whole}), {}, 3)
    found = [flex_attention(q, q, q, block_mask=options["block_mask"]) for q, options in parts]
    torch.testing.assert_close(torch.cat(found), expected)
    masks = [options["block_mask"] for _, options in parts]
    torch.testing.assert_close(torch.cat([mask.kv_indices for mask in masks]), whole.kv_indices)
    torch.testing.assert_close(torch.cat([mask.kv_num_blocks for mask in masks]), whole.kv_num_blocks)
    torch.testing.assert_close(torch.cat([mask.full_kv_indices for mask in masks]), whole.full_kv_indices)
    torch.testing.assert_close(torch.cat([mask.full_kv_num_blocks for mask in masks]), whole.full_kv_num_blocks)


def test_a_block_mask_for_all_rows_is_for_all_microbatches(m):
    mask = documents(1, 32)
    assert m._split_block_mask(mask, 3) == [mask] * 3
    _, kwargs = m.split_args_kwargs_into_chunks(rows(6), {"mask": mask}, 3)
    assert [chunk["mask"] is mask for chunk in kwargs] == [True] * 3
    with pytest.raises(AssertionError):
        m._split_block_mask(documents(2, 32), 3)


# DTensors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("count", [8, 7])
def test_dtensors_keep_their_placements(m, mesh, placement, count):
    whole = distribute_tensor(numbers(1, count, 6), mesh, [placement])
    chunks = list(m._split_tensor(whole, m.TensorChunkSpec(0), 3))
    assert all(isinstance(chunk, DTensor) for chunk in chunks)
    assert {chunk.placements for chunk in chunks} == {(placement,)}
    assert all(chunk.device_mesh is mesh for chunk in chunks)
    assert sum(len(chunk) for chunk in chunks) == count
    torch.testing.assert_close(torch.cat([chunk.to_local() for chunk in chunks]), whole.to_local())
    (merged,) = m.merge_chunks([(chunk,) for chunk in chunks], (m.TensorChunkSpec(0),))
    assert merged.placements == (placement,)
    assert merged.shape == whole.shape
    torch.testing.assert_close(merged.to_local(), whole.to_local())


def test_dtensors_that_do_not_go_together(m, mesh):
    sharded, replicated = (distribute_tensor(numbers(1, 4, 4), mesh, [each]) for each in (Shard(0), Replicate()))
    with pytest.raises(AssertionError, match="placement mismatch"):
        m.merge_chunks([(sharded,), (replicated,)], (m.TensorChunkSpec(0),))
    with pytest.raises(AssertionError, match="mix"):
        m.merge_chunks([(sharded,), (numbers(1, 4, 4),)], (m.TensorChunkSpec(0),))


def test_targets_are_split_by_the_same_function(package, mesh):
    target = distribute_tensor(numbers(1, 7), mesh, [Shard(0)])
    chunks = package.microbatch._split_tensor(target, package.schedules._TARGET_CHUNK_SPEC, 3)
    assert [chunk.placements for chunk in chunks] == [(Shard(0),)] * 3


def test_masked_batches_for_tests_of_numbers(package, m, monkeypatch):
    monkeypatch.setattr(f"{package.name}.microbatch._debug_mask_minibatches", True)
    (x,) = rows(4)
    with wrong_upstream(package, "it indexes with a list, which is not a tuple any more", UserWarning):
        chunks, _ = m.split_args_kwargs_into_chunks((x,), {}, 2)
        assert [tuple(chunk.shape) for (chunk,) in chunks] == [(4, WIDTH)] * 2
        torch.testing.assert_close(chunks[0][0] + chunks[1][0], x)
        torch.testing.assert_close(m.merge_chunks(chunks, None)[0], x)
