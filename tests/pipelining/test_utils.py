"""Descriptions, checks and mappings beside those of the installed torch."""

import warnings

import pytest
import torch
import torch.distributed.pipelining._debug as upstream_debug
import torch.distributed.pipelining._utils as upstream
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from penstock.errors import MetadataError
from penstock.pipelining import _debug as our_debug
from penstock.pipelining import _utils as ours

BOTH = pytest.mark.parametrize("module", [ours, upstream], ids=["ours", "upstream"])
PAIR = (ours, upstream)


def outcome(function, *args, **settings):
    """What a call returns, or the kind of its error, and the kinds of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = function(*args, **settings)
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            found = next(name for name in names if name in {"PipeliningMetadataError", "ValueError", "TypeError"})
    return found, [warning.category for warning in caught]


@pytest.mark.parametrize("style", ["loop", "v", "spiral"])
def test_mappings_are_those_of_torch(style):
    for ranks in range(1, 6):
        for stages in range(13):
            for name in ("generate_stage_to_rank_mapping", "generate_rank_to_stage_mapping"):
                found, expected = (outcome(getattr(module, name), ranks, stages, style) for module in PAIR)
                assert found == expected


def test_arguments_are_flattened():
    x = torch.ones(2, requires_grad=True)
    args = (x * 2, {"a": [torch.ones(1), 3]}, None)
    for module in PAIR:
        flat = module.flatten_args(args)
        assert len(flat) == 4
        assert flat[0] is args[0]
        for again, leaves in (module.flatten_args(args, detach=True), module.flatten_args_detach(args)):
            assert again[0] is leaves[0]
            assert leaves[0].is_leaf
            assert leaves[0].requires_grad
            assert not leaves[1].requires_grad
            assert again[1]["a"][1] == 3
            assert again[2] is None


TENSORS = {
    "plain": torch.ones(2, 3),
    "half": torch.ones(2, 3).half(),
    "turned": torch.ones(3, 2).T,
    "with a gradient": torch.ones(2, 3, requires_grad=True),
    "numbers": torch.ones(2, 3, dtype=torch.long),
    "smaller": torch.ones(2, 2),
    "single": torch.tensor(1.0),
}


@BOTH
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_described(module, name):
    tensor = TENSORS[name]
    meta = module._TensorMeta.from_tensor(tensor)
    assert (meta.shape, meta.stride, meta.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert meta == module.extract_tensor_meta(tensor)
    made = meta.to_tensor("meta")
    assert made.device.type == "meta"
    assert module._TensorMeta.from_tensor(made) == meta
    assert hash(meta) == hash(module._TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad))


def test_what_differs_is_said_as_torch_says_it():
    for one in TENSORS.values():
        for other in TENSORS.values():
            found = [module.extract_tensor_meta(one).get_diff(module.extract_tensor_meta(other)) for module in PAIR]
            assert found[0] == found[1]


@BOTH
def test_a_number_has_no_gradient_whatever_its_description_says(module):
    meta = module._TensorMeta(torch.Size([2]), (1,), torch.long, requires_grad=True)
    assert not meta.to_tensor("cpu").requires_grad


@BOTH
def test_gradients_look_like_their_tensors(module):
    metas = tuple(map(module.extract_tensor_meta, (TENSORS["with a gradient"], TENSORS["plain"])))
    gradient, none = module._derive_grad_metas((*metas[:1], metas[1]))
    assert none is None
    assert gradient == module._TensorMeta(torch.Size([2, 3]), (3, 1), torch.float32, requires_grad=False)
    assert module._derive_grad_metas((module._DTensorMeta(torch.Size([2]), (1,), torch.float32, True),)) == (None,)


def metas(module):
    plain = module._TensorMeta(torch.Size([4]), (1,), torch.float32, True)
    spread = module._DTensorMeta(
        torch.Size([4]), (1,), torch.float32, True, torch.Size([8]), (1,), (Shard(0),), ("tp",)
    )
    return plain, spread


@BOTH
def test_when_a_run_is_needed(module):
    plain, spread = metas(module)
    cases = [
        (module._StageMeta(), True, True),
        (module._StageMeta(inputs=(plain,)), True, True),
        (module._StageMeta((plain,), (plain,)), True, False),
        (module._StageMeta((spread,), (plain,)), False, False),
        (module._StageMeta((spread,), (spread,)), True, True),
        (module._StageMeta((spread,), (spread,), (spread,)), True, True),
        (module._StageMeta((spread,), (spread,), None, (spread,)), True, True),
        (module._StageMeta((spread,), (spread,), (None,), (spread,)), True, False),
    ]
    found = [module.InferenceMode.needs_dynamic(meta, backward) for meta, backward, _ in cases]
    assert found == [expected for _, _, expected in cases]
    assert [meta.has_any() for meta, _, _ in cases] == [False] + [True] * 7
    assert [meta.has_dtensors() for meta, _, _ in cases] == [False] * 3 + [True] * 5


@BOTH
def test_metadata_between_stages_is_a_value(module):
    plain, _ = metas(module)
    assert module._StageForwardMeta((plain,)) == module._StageForwardMeta((plain,))
    assert module._StageBackwardMeta((plain, None)).backward_metas[1] is None
    with pytest.raises(AttributeError):
        module._StageForwardMeta((plain,)).forward_metas = ()


@BOTH
def test_a_description_of_several_tensors(module):
    assert module.extract_tensor_metas(None) is None
    assert module.extract_tensor_metas((TENSORS["plain"], None), allow_none=True)[1] is None
    assert len(module.extract_tensor_metas((TENSORS["plain"],) * 2)) == 2
    with pytest.raises(module.PipeliningMetadataError):
        module.extract_tensor_metas((TENSORS["plain"], None))


@BOTH
def test_arguments_become_a_tuple_of_tensors(module):
    x = TENSORS["plain"]
    normal = module.validate_and_normalize_to_tuple
    assert normal(None) is None
    assert normal(x)[0] is x
    assert normal([x, x]) == normal((x, x))
    assert normal((x, None), allow_none=True)[1] is None
    for wrong in ((x, None), (x, "text"), 42, {"a": x}):
        with pytest.raises(module.PipeliningMetadataError):
            normal(wrong)


def test_errors_are_of_both_families():
    assert issubclass(ours.PipeliningMetadataError, (MetadataError, RuntimeError))
    assert issubclass(upstream.PipeliningMetadataError, RuntimeError)


CHECKS = [{}, {"raise_on_mismatch": True}, {"warn_on_mismatch": True}, {"raise_on_mismatch": False}]


@pytest.mark.parametrize("settings", CHECKS)
def test_checks_find_what_torch_finds(settings):
    pairs = []
    for module in PAIR:
        plain, spread = metas(module)
        good, other = torch.ones(4, requires_grad=True), torch.ones(5)
        pairs.append(
            [
                outcome(module.validate_metadata, "it", plain, good, **settings),
                outcome(module.validate_metadata, "it", plain, other, **settings),
                outcome(module.validate_metadata, "it", spread, good, **settings),
                outcome(module.validate_metadata, "it", plain, module.extract_tensor_meta(other), **settings),
                outcome(module.validate_tensors_metadata, "it", (plain, None), (good, None), **settings),
                outcome(module.validate_tensors_metadata, "it", (plain, plain), (good, other), **settings),
                outcome(module.validate_tensors_metadata, "it", (plain,), (), **settings),
                outcome(module.validate_tensors_metadata, "it", (plain, None), (None, good), **settings),
            ]
        )
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize("is_input", [True, False])
def test_gradients_are_compared_with_their_tensors(is_input):
    needing, fixed = TENSORS["with a gradient"], TENSORS["plain"]
    for args, grads in [((needing,), (fixed,)), ((fixed,), (fixed,)), ((needing,), (None,)), ((needing,), ())]:
        found = [outcome(one.validate_static_arg_grad_correspondence, 3, args, grads, is_input) for one in PAIR]
        assert found[0] == found[1]


def test_messages_say_which_stage_and_which_value():
    with pytest.raises(ours.PipeliningMetadataError, match=r"stage 3: output_args\[0\] has requires_grad=False"):
        ours.validate_static_arg_grad_correspondence(3, (TENSORS["plain"],), (TENSORS["plain"],), False)
    with pytest.raises(ours.PipeliningMetadataError, match="argument 1 of a stage is of type str"):
        ours.validate_and_normalize_to_tuple((TENSORS["plain"], "text"))


def test_values_in_a_few_words():
    value = (torch.ones(2), [3, {"a": torch.ones(1, requires_grad=True)}], None)
    assert our_debug.map_debug_info(value) == upstream_debug.map_debug_info(value)


@BOTH
def test_meshes_are_asked_for_once(module):
    asked = []

    def find(mesh_dim_names, mesh_layout):
        asked.append(mesh_dim_names)
        return None if mesh_dim_names == ("none",) else "mesh"

    cache = module._MeshCache(find)
    key = (("tp",), None)
    assert key not in cache
    assert [cache.get_mesh(key), cache.get_mesh(key)] == ["mesh", "mesh"]
    cache.put((("dp",), None), "other")
    assert cache.get_mesh((("dp",), None)) == "other"
    assert len(cache) == 2
    assert asked == [("tp",)]
    for unknown, kept in ((("none",), cache), (("tp",), module._MeshCache())):
        with pytest.raises(module.PipeliningMetadataError, match=r"get_mesh|callback"):
            kept.get_mesh((unknown, None))


def distributed(rank, ranks, group):
    """All that is said of distributed tensors, by each module."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    shard, copy = (
        distribute_tensor(torch.ones(5, 2), mesh, [placement]).requires_grad_() for placement in (Shard(0), Replicate())
    )
    answers = []
    for module in PAIR:
        one, other = module.extract_tensor_metas((shard, copy))
        cache = module._MeshCache()
        cache.update_from_tensors((None, torch.ones(1), shard))
        again = one.to_dtensor("cpu", cache.get_mesh(one.mesh_cache_key))
        numbers = distribute_tensor(torch.ones(5, dtype=torch.long), mesh, [Shard(0)])
        answers.append(
            {
                "found": one.mesh_cache_key in cache and len(cache) == 1,
                "fields": [getattr(one, name) for name in ("shape", "stride", "global_shape", "global_stride")],
                "placements": (one.placements, one.mesh_dim_names),
                "same": one.get_diff(module.extract_tensor_meta(again)),
                "leaf": (again.is_leaf, again.requires_grad, isinstance(again, DTensor)),
                "different": one.get_diff(other),
                "plain": one.get_diff(module.extract_tensor_meta(torch.ones(5, 2))),
                "local": [
                    (type(local).__name__, local.requires_grad)
                    for local in (module.to_local_if_dtensor(shard), module.to_local_if_dtensor(shard, detach=True))
                ],
                "numbers": module.extract_tensor_meta(numbers).to_dtensor("cpu", mesh).requires_grad,
                "refused": outcome(module._TensorMeta.from_tensor, shard),
                "plain gradient": outcome(
                    module.validate_static_arg_grad_correspondence, 0, (shard,), (torch.ones(5, 2),), True
                ),
                "checks": [
                    outcome(module.validate_metadata, "it", one, actual, **settings)
                    for actual in (shard, copy, torch.ones(5, 2))
                    for settings in CHECKS
                ],
            }
        )
    return answers


def test_distributed_tensors_are_described_as_torch_does(workers):
    for found, expected in workers.run(distributed, ranks=2):
        assert found == expected
        assert found["found"]
        assert found["same"] == []
        assert any("placements" in difference for difference in found["different"])
