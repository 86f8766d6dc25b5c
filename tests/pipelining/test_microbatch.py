"""Splitting and merging beside the installed torch."""

import operator
import warnings
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.pipelining.microbatch as upstream
from hypothesis import given, settings
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree

import penstock.runtime
from penstock.errors import MicrobatchError
from penstock.execution.microbatches.specs import unregister_splitter
from penstock.pipelining import microbatch as ours

BOTH = pytest.mark.parametrize("module", [ours, upstream], ids=["ours", "upstream"])


def equal(one, other):
    """Whether two values have the same structure, and equal leaves."""
    leaves, structure = pytree.tree_flatten(one)
    others, other_structure = pytree.tree_flatten(other)
    return structure == other_structure and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a is b or a == b
        for a, b in zip(leaves, others, strict=True)
    )


tensors = st.builds(
    lambda shape: torch.arange(torch.Size(shape).numel()).reshape(shape),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
)
values = st.one_of(
    tensors, st.integers(0, 3), st.none(), st.lists(tensors, min_size=1, max_size=2), st.tuples(tensors, st.text())
)


@given(st.lists(values, max_size=3), st.dictionaries(st.sampled_from("abc"), values, max_size=3), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_what_is_split_by_default_is_what_torch_splits(args, kwargs, chunks):
    found = ours.split_args_kwargs_into_chunks(tuple(args), kwargs, chunks)
    assert equal(found, upstream.split_args_kwargs_into_chunks(tuple(args), kwargs, chunks))
    assert len(found[0]) == len(found[1])


@BOTH
def test_specs_choose_dimensions(module):
    args = (torch.arange(24).reshape(4, 6), [torch.ones(2, 5)], "text")
    spec = (module.TensorChunkSpec(1), [module.TensorChunkSpec(-1)], module._Replicate())
    kwargs = {"y": torch.ones(7, 3), "table": torch.ones(2)}
    split_args, split_kwargs = module.split_args_kwargs_into_chunks(
        args, kwargs, 3, spec, {"y": module.TensorChunkSpec(0), "table": module._Replicate}
    )
    assert [tuple(one[0].shape) for one in split_args] == [(4, 2)] * 3
    assert [tuple(one[1][0].shape) for one in split_args] == [(2, 2), (2, 2), (2, 1)]
    assert [tuple(one["y"].shape) for one in split_kwargs] == [(3, 3), (2, 3), (2, 3)]
    assert all(one["table"] is kwargs["table"] for one in split_kwargs)


def test_specs_of_keyword_arguments_are_found_by_name():
    kwargs = {"a": torch.ones(2, 3), "b": torch.ones(3, 2)}
    spec = {"b": ours.TensorChunkSpec(1), "a": ours.TensorChunkSpec(0)}
    _, parts = ours.split_args_kwargs_into_chunks((), kwargs, 2, None, spec)
    assert [(tuple(one["a"].shape), tuple(one["b"].shape)) for one in parts] == [((1, 3), (3, 1))] * 2


@BOTH
def test_fewer_samples_make_fewer_microbatches(module):
    for args, kwargs in [((torch.ones(3),), {"a": torch.ones(8)}), ((torch.ones(8), 5), {"a": torch.ones(3)})]:
        found = module.split_args_kwargs_into_chunks(args, kwargs, 4)
        assert [len(part) for part in found] == [3, 3]
    assert module.split_args_kwargs_into_chunks((5,), None, 2) == ([(5,), (5,)], [{}, {}])
    assert module.split_args_kwargs_into_chunks([5, "a"], None, 2, [module._Replicate(), module._Replicate]) == (
        [(5, "a"), (5, "a")],
        [{}, {}],
    )
    assert module.split_args_kwargs_into_chunks((), {}, 2) == ([(), ()], [{}, {}])
    with pytest.raises(RuntimeError):
        module.split_args_kwargs_into_chunks((torch.ones(0, 2),), {}, 2)


@BOTH
def test_specs_from_dimensions(module):
    one, (two, three) = module.TensorChunkSpec.from_tuple((0, [1, 2]))
    assert [spec.split_dim for spec in (one, two, three)] == [0, 1, 2]
    assert module.TensorChunkSpec.from_dict({"a": 1})["a"].split_dim == 1
    assert isinstance(one, module.TensorChunkSpec)
    assert str(one) == "TensorChunkSpec(0)"
    assert repr(one).endswith("TensorChunkSpec(0)")


def test_there_is_one_class_of_specs():
    assert ours.TensorChunkSpec is penstock.runtime.TensorChunkSpec
    assert ours._Replicate is penstock.runtime.Replicate


MISTAKES = {
    "a spec too few": (AssertionError, lambda m: ((torch.ones(2), 1), {}, 2, (m.TensorChunkSpec(0),))),
    "another nesting": (ValueError, lambda m: (([torch.ones(2)] * 2,), {}, 2, ([m.TensorChunkSpec(0)],))),
    "no spec for a tensor": (AssertionError, lambda m: ((torch.ones(2),), {}, 2, (None,))),
    "a spec that is none": (AssertionError, lambda m: ((torch.ones(2),), {}, 2, ("text",))),
    "a number to split": (ValueError, lambda m: ((3,), {}, 2, (m.TensorChunkSpec(0),))),
    "a number without a spec": (ValueError, lambda m: ((3,), {}, 2, (None,))),
    "a single number": (IndexError, lambda m: ((torch.tensor(3.0),), {}, 2)),
    "no such dimension": (IndexError, lambda m: ((torch.ones(2),), {}, 2, (m.TensorChunkSpec(1),))),
}


@BOTH
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_the_same_errors(module, name):
    kind, arguments = MISTAKES[name]
    if module is ours and name == "a spec that is none":
        kind = ValueError  # ours says what to write instead
    with pytest.raises(kind) as raised:
        module.split_args_kwargs_into_chunks(*arguments(module))
    assert module is upstream or isinstance(raised.value, MicrobatchError)


@BOTH
def test_a_tensor_with_too_few_samples_cannot_be_split(module):
    with pytest.raises(AssertionError):
        module._split_tensor(torch.ones(3), module.TensorChunkSpec(0), 4)


@BOTH
def test_parts_of_a_leaf_keep_their_gradients(module):
    x = torch.ones(4, requires_grad=True)
    parts = module._split_tensor(x, module.TensorChunkSpec(0), 2)
    sum((part * 2).sum() for part in parts).backward()
    assert [part.grad.tolist() for part in parts] == [[2, 2], [2, 2]]
    assert x.grad.tolist() == [2] * 4
    assert not module._split_tensor(x * 2, module.TensorChunkSpec(0), 2)[0].retains_grad


class Holder:
    """An object of a user's own."""

    def __init__(self):
        self.mask = torch.ones(4)


@BOTH
def test_an_object_is_given_whole_and_ours_warns_if_it_holds_tensors(module, recwarn):
    holder = Holder()
    parts, _ = module.split_args_kwargs_into_chunks((torch.ones(4), holder), None, 2)
    assert all(part[1] is holder for part in parts)
    assert ["Holder" in str(warning.message) for warning in recwarn] == ([True] if module is ours else [])
    recwarn.clear()
    spec = (module.TensorChunkSpec(0), module._Replicate())
    module.split_args_kwargs_into_chunks((torch.ones(4), holder), None, 2, spec)
    assert not recwarn


def test_a_splitter_says_how_values_of_a_type_are_split():
    @dataclass
    class Pair:
        value: torch.Tensor

    penstock.runtime.register_splitter(Pair, lambda pair, count: [Pair(one) for one in pair.value.chunk(count)])
    try:
        parts, _ = ours.split_args_kwargs_into_chunks((Pair(torch.arange(4)),), None, 2)
    finally:
        unregister_splitter(Pair)
    assert [part[0].value.tolist() for part in parts] == [[0, 1], [2, 3]]


def mask(samples, *, full=True):
    def allowed(batch, head, query, key):
        return (query >= key) & (key % (batch + 2) > 0)

    made = create_block_mask(allowed, samples, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    if not full:
        made.full_kv_num_blocks = made.full_kv_indices = None
    return made


@pytest.mark.parametrize("samples", [1, 4, 5])
@pytest.mark.parametrize("full", [True, False])
def test_masks_are_split_as_torch_does(samples, full):
    whole = mask(samples, full=full)
    parts = ours._split_block_mask(whole, 4)
    expected = upstream._split_block_mask(whole, 4)
    assert len(parts) == len(expected) == 4
    grid = torch.arange(64)
    for part, other in zip(parts, expected, strict=True):
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_indices"):
            one, another = getattr(part, name), getattr(other, name)
            assert one is another if one is None else torch.equal(one, another)
        assert (part.BLOCK_SIZE, part.seq_lengths, part.shape) == (other.BLOCK_SIZE, other.seq_lengths, other.shape)
        for batch in range(part.shape[0]):
            asked = (torch.tensor(batch), torch.tensor(0), grid[:, None], grid[None])
            assert torch.equal(part.mask_mod(*asked), other.mask_mod(*asked))


@BOTH
def test_masks_among_arguments(module):
    args, kwargs = (torch.ones(4, 2), {"mask": mask(4)}), {"wide": mask(1)}
    split_args, split_kwargs = module.split_args_kwargs_into_chunks(args, kwargs, 2)
    assert [one[1]["mask"].shape[0] for one in split_args] == [2, 2]
    assert all(one["wide"] is kwargs["wide"] for one in split_kwargs)
    assert len(module.split_args_kwargs_into_chunks(args, {"few": mask(3)}, 4)[0]) == 3
    with pytest.raises(AssertionError):
        module._split_block_mask(mask(3), 4)
    with pytest.raises(AssertionError):
        module.split_args_kwargs_into_chunks((), {"m": mask(4)}, 2, None, {"m": module.TensorChunkSpec(1)})


@BOTH
def test_outputs_are_merged_in_the_structure_of_the_spec(module):
    chunks = [[torch.ones(2, 1), {"loss": 1.0}, "same"], [torch.ones(2, 2), {"loss": 2.0}, "same"]]
    spec = (module.TensorChunkSpec(1), {"loss": module._CustomReducer(0.5, operator.add)}, None)
    merged = module.merge_chunks(chunks, spec)
    assert equal(merged, (torch.ones(2, 3), {"loss": 3.5}, "same"))


@BOTH
def test_outputs_are_merged_along_the_first_dimension(module):
    chunks = [(torch.zeros(2, 3), [torch.zeros(1)]), (torch.ones(1, 3), [torch.ones(2)])]
    merged = module.merge_chunks(chunks, None)
    assert equal(merged, (torch.cat([torch.zeros(2, 3), torch.ones(1, 3)]), [torch.tensor([0.0, 1.0, 1.0])]))
    assert equal(module.merge_chunks([torch.ones(1), torch.ones(1).double()], None), torch.ones(2).double())
    assert equal(module.merge_chunks(torch.arange(6).view(2, 3), None), torch.arange(6))
    assert module.merge_chunks([torch.tensor(1.0), torch.tensor(2.0)], module.sum_reducer) == 3.0


@given(tensors, st.integers(1, 7), st.integers(0, 2))
@settings(deadline=None, max_examples=40)
def test_what_is_split_is_merged_again(tensor, chunks, dim):
    spec = ours.TensorChunkSpec(min(dim, tensor.ndim - 1))
    parts = ours._split_tensor(tensor, spec, min(chunks, tensor.shape[spec.split_dim]))
    assert torch.equal(ours.merge_chunks(list(parts), spec), tensor)


@BOTH
@pytest.mark.parametrize(
    ("kind", "chunks", "spec"),
    [
        (ValueError, [(torch.ones(1),), (torch.ones(1), 2)], None),
        (ValueError, [(torch.ones(1), 1)], ("same",)),
        (AssertionError, [1, 2], "same"),
        (RuntimeError, [torch.ones(1, 2), torch.ones(1, 3)], None),
        (IndexError, [], None),
    ],
)
def test_outputs_that_cannot_be_merged(module, kind, chunks, spec):
    with pytest.raises(kind):
        module.merge_chunks(chunks, spec)


def test_ours_splits_what_holds_nothing():
    assert ours.split_args_kwargs_into_chunks(([], {}), {"a": ()}, 2) == ([([], {})] * 2, [{"a": ()}] * 2)


def test_ours_merges_what_torch_cannot():
    assert ours.merge_chunks([torch.tensor(1.0), torch.tensor(2.0)], None).tolist() == [1, 2]
    assert ours.merge_chunks([(torch.ones(1), 5, None)] * 2, None)[1:] == (5, None)
    table = torch.arange(3)
    assert ours.merge_chunks([table, table.clone()], "same") is table
    with pytest.raises(MicrobatchError, match="microbatch 1"):
        ours.merge_chunks([table, table + 1], "same")


@BOTH
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_masked_microbatches_are_as_large_as_the_batch(module, monkeypatch):
    monkeypatch.setattr(module, "_debug_mask_minibatches", True)
    parts = module._split_tensor(torch.arange(1, 4), module.TensorChunkSpec(0), 2)
    assert [part.tolist() for part in parts] == [[1, 2, 0], [0, 0, 3]]
    assert module.merge_chunks(parts, module.TensorChunkSpec(0)).tolist() == [1, 2, 3]
    with pytest.raises(AssertionError):
        module.merge_chunks([torch.ones(2), torch.ones(3)], module.TensorChunkSpec(0))


def distributed(rank, ranks, group):
    """Both modules on the same distributed tensors: (what is equal, what was raised)."""
    warnings.filterwarnings("ignore", message="Using a non-tuple sequence")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    found = []
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        for masked in (False, True):
            whole = distribute_tensor(torch.arange(42.0).reshape(7, 6), mesh, placements)
            pairs = []
            for module in (ours, upstream):
                module._debug_mask_minibatches = masked
                spec = module.TensorChunkSpec(0)
                parts = list(module._split_tensor(whole, spec, 3))
                merged = None if masked and placements == [Shard(0)] else module.merge_chunks(parts, spec)
                module._debug_mask_minibatches = False
                pairs.append([*parts, *([] if merged is None else [merged])])
            found += [
                isinstance(one, DTensor)
                and one.shape == two.shape
                and one.stride() == two.stride()
                and one.placements == two.placements
                and torch.equal(one.to_local(), two.to_local())
                for one, two in zip(*pairs, strict=True)
            ]
    messages = []
    shards, copies = (distribute_tensor(torch.ones(4, 4), mesh, [one]) for one in (Shard(0), Replicate()))
    for chunks in ([shards, copies], [shards, torch.ones(4, 4)]):
        try:
            ours.merge_chunks([(one,) for one in chunks], None)
        except AssertionError as error:
            messages.append(str(error))
    return found, messages


def test_distributed_tensors_stay_distributed(workers):
    for found, messages in workers.run(distributed, ranks=2):
        assert all(found)
        assert len(found) == 3 * 3 * 2 + 5
        assert ["placement mismatch" in messages[0], "mix" in messages[1]] == [True, True]
