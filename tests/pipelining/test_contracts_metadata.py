"""What stages know of tensors: descriptions, the checks on them, and how a stage comes to them."""

import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pipelining.contracts import CPU, WIDTH, averaged, fake_group, layers, numbers, summed


def sharded(mesh, placement=None, *, grad=False, shape=(8, 4)):
    return distribute_tensor(numbers(1, *shape), mesh, [placement or Shard(0)]).requires_grad_(grad)


def meta(u, shape=(4, 8), dtype=torch.float32, grad=True):
    return u._TensorMeta(torch.Size(shape), (shape[1], 1), dtype, grad)


# Descriptions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [True, False])
def test_a_tensor_is_described_and_made_again(u, shape, dtype, grad):
    tensor = torch.randn(shape, dtype=dtype, requires_grad=grad)
    found = u._TensorMeta.from_tensor(tensor)
    assert (found.shape, found.stride, found.dtype, found.requires_grad) == (tensor.shape, tensor.stride(), dtype, grad)
    again = found.to_tensor("cpu")
    assert found.get_diff(u._TensorMeta.from_tensor(again)) == []
    assert u.extract_tensor_meta(tensor) == found
    assert hash(found) == hash(u._TensorMeta.from_tensor(again))
    assert pickle.loads(pickle.dumps(found)) == found


def test_strides_are_kept(u):
    tensor = numbers(1, 4, 6).t()
    assert u._TensorMeta.from_tensor(tensor).to_tensor("cpu").stride() == tensor.stride() == (1, 6)


def test_differences_are_reported_by_name(u):
    assert meta(u).get_diff(meta(u)) == []
    assert any("shape" in line for line in meta(u).get_diff(meta(u, (4, 16))))
    assert any("dtype" in line for line in meta(u).get_diff(meta(u, dtype=torch.float16)))


def test_a_dtensor_is_described_and_made_again(u, mesh):
    for placement in (Shard(0), Shard(1), Replicate()):
        tensor = sharded(mesh, placement)
        found = u._DTensorMeta.from_dtensor(tensor)
        assert isinstance(found, u._TensorMeta)
        assert found.global_shape == tensor.shape
        assert found.shape == tensor.to_local().shape
        assert found.placements == (placement,)
        assert found.mesh_dim_names == ("tp",)
        assert found.mesh_cache_key == (("tp",), mesh._layout)
        again = found.to_dtensor(CPU, mesh)
        assert isinstance(again, DTensor)
        assert found.get_diff(u._DTensorMeta.from_dtensor(again)) == []
        assert u.extract_tensor_meta(tensor) == found


def test_dtensors_and_tensors_are_reported_apart(u, mesh):
    one, other = (u._DTensorMeta.from_dtensor(sharded(mesh, each)) for each in (Shard(0), Replicate()))
    assert any("placements" in line for line in one.get_diff(other))
    assert any("type" in line.lower() or "_TensorMeta" in line for line in one.get_diff(meta(u)))
    with pytest.raises(u.PipeliningMetadataError, match="DTensor"):
        u._TensorMeta.from_tensor(sharded(mesh))
    assert issubclass(u.PipeliningMetadataError, RuntimeError)


def test_a_dtensor_meta_is_made_by_hand(u):
    found = u._DTensorMeta(
        shape=torch.Size([4, 8]),
        stride=(8, 1),
        dtype=torch.float32,
        requires_grad=True,
        global_shape=torch.Size([8, 8]),
        global_stride=(8, 1),
        placements=(Shard(0),),
        mesh_dim_names=("tp",),
        mesh_layout=None,
    )
    assert found.mesh_cache_key == (("tp",), None)


def test_meshes_are_found_again(u, mesh):
    key = (("tp",), mesh._layout)
    asked = []

    def get_mesh(names, layout):
        asked.append((names, layout))
        return mesh

    cache = u._MeshCache()
    assert key not in cache
    with pytest.raises(u.PipeliningMetadataError, match="get_mesh"):
        cache.get_mesh(key)
    cache.put(key, mesh)
    assert key in cache
    assert cache.get_mesh(key) is mesh
    asking = u._MeshCache(get_mesh_cb=get_mesh)
    assert asking.get_mesh(key) is mesh
    assert asking.get_mesh(key) is mesh
    assert asked == [key]
    learning = u._MeshCache()
    learning.update_from_tensors((sharded(mesh), numbers(1, 2), None))
    assert len(learning) == 1
    assert learning.get_mesh(key) is mesh


def test_lists_of_descriptions(u, mesh):
    tensor, plain = sharded(mesh), numbers(1, 2)
    assert u.extract_tensor_metas(None) is None
    found = u.extract_tensor_metas((tensor, plain))
    assert [type(each) for each in found] == [u._DTensorMeta, u._TensorMeta]
    assert u.extract_tensor_metas((plain, None), allow_none=True)[1] is None
    with pytest.raises(u.PipeliningMetadataError):
        u.extract_tensor_metas((plain, None))


def test_local_tensors(u, mesh):
    tensor, plain = sharded(mesh, grad=True), numbers(1, 2).requires_grad_()
    local = u.to_local_if_dtensor(tensor)
    assert not isinstance(local, DTensor)
    assert local.shape == (4, 4)
    assert u.to_local_if_dtensor(plain) is plain
    assert not u.to_local_if_dtensor(tensor, detach=True).requires_grad
    assert not u.to_local_if_dtensor(plain, detach=True).requires_grad


def test_arguments_become_a_tuple(u):
    x = numbers(1, 2)
    assert u.validate_and_normalize_to_tuple(None) is None
    assert u.validate_and_normalize_to_tuple(x) == (x,)
    assert u.validate_and_normalize_to_tuple([x, x]) == (x, x)
    assert u.validate_and_normalize_to_tuple((x, None), allow_none=True) == (x, None)
    for wrong in ((x, "text"), (x, None), 42, {"x": x}):
        with pytest.raises(u.PipeliningMetadataError):
            u.validate_and_normalize_to_tuple(wrong)


def test_arguments_are_flattened(u):
    x, y = numbers(1, 2).requires_grad_(), numbers(2, 2)
    assert u.flatten_args((x, {"k": [y, 3]})) == [x, y, 3]
    (first, *_rest), flat = u.flatten_args_detach((x, y))
    assert first.grad_fn is None
    assert first.requires_grad
    assert len(flat) == 2
    assert flat[0] is first
    assert first is not x


# Checks ---------------------------------------------------------------------------------------------------------------


def test_one_description_is_checked(u, mesh):
    tensor, other = sharded(mesh), sharded(mesh, Replicate())
    expected = u._DTensorMeta.from_dtensor(tensor)
    assert u.validate_metadata("here", expected, tensor) == []
    assert u.validate_metadata("here", expected, other) != []
    assert any("type" in line for line in u.validate_metadata("here", expected, numbers(1, 2)))
    with pytest.raises(u.PipeliningMetadataError, match="here"):
        u.validate_metadata("here", expected, other, raise_on_mismatch=True)
    with pytest.warns(UserWarning, match="Metadata mismatch"):
        u.validate_metadata("here", expected, other, warn_on_mismatch=True)
    with pytest.raises(u.PipeliningMetadataError, match="shape mismatch"):
        u.validate_metadata("here", meta(u), torch.zeros(4, 9), raise_on_mismatch=True)
    with pytest.raises(u.PipeliningMetadataError, match="dtype mismatch"):
        u.validate_metadata("here", meta(u), torch.zeros(4, 8, dtype=torch.int32), raise_on_mismatch=True)


def test_many_descriptions_are_checked(u):
    x = numbers(1, 4, 8).requires_grad_()
    assert u.validate_tensors_metadata("here", (meta(u), None), (x, None)) == []
    for expected, actual in (((meta(u), meta(u)), (x,)), ((meta(u),), (None,)), ((None,), (x,))):
        with pytest.raises(u.PipeliningMetadataError, match="here"):
            u.validate_tensors_metadata("here", expected, actual)
        with pytest.warns(UserWarning, match="here"):
            u.validate_tensors_metadata("here", expected, actual, raise_on_mismatch=False, warn_on_mismatch=True)


def test_gradients_go_with_their_tensors(u, mesh):
    with_grad, without, plain = sharded(mesh, grad=True), sharded(mesh), numbers(1, 8, 4)
    check = u.validate_static_arg_grad_correspondence
    check(0, (with_grad,), (sharded(mesh, Replicate()),), is_input=True)
    check(0, (without, plain), (None, None), is_input=True)
    with pytest.warns(UserWarning, match="None"):
        check(0, (with_grad,), (None,), is_input=True)
    for tensors, grads in (
        ((with_grad,), (plain,)),
        ((without,), (sharded(mesh),)),
        ((with_grad, with_grad), (sharded(mesh),)),
    ):
        with pytest.raises(u.PipeliningMetadataError, match="output_grads"):
            check(3, tensors, grads, is_input=False)


def test_when_shapes_have_to_be_found(u, mesh):
    plain, split = meta(u), u._DTensorMeta.from_dtensor(sharded(mesh))
    needs, known = u.InferenceMode.needs_dynamic, u._StageMeta
    assert needs(known(), True)
    assert needs(known(inputs=(plain,)), True)
    assert not needs(known(inputs=(plain,), outputs=(plain,)), True)
    assert not needs(known(inputs=(split,), outputs=(split,)), False)
    assert needs(known(inputs=(split,), outputs=(split,)), True)
    assert needs(known(inputs=(split,), outputs=(split,), input_grads=(split,)), True)
    assert needs(known(inputs=(split,), outputs=(split,), output_grads=(split,)), True)
    complete = known(inputs=(split,), outputs=(split,), input_grads=(split,), output_grads=(split,))
    assert not needs(complete, True)
    assert (complete.has_any(), complete.has_dtensors(), complete.is_complete_for_forward()) == (True, True, True)
    assert (known().has_any(), known().has_dtensors(), known().is_complete_for_forward()) == (False, False, False)
    assert {mode.name for mode in u.InferenceMode} == {"STATIC", "DYNAMIC"}


# A stage ------------------------------------------------------------------------------------------------------------


def test_what_a_stage_is_given_is_described(package, u):
    with fake_group(1, 2):
        x, y = numbers(1, 2, WIDTH).requires_grad_(), numbers(2, 2, 3)
        stage = package.stage.PipelineStage(nn.Identity(), 1, 2, CPU, input_args=x, output_args=[x, y])
        assert stage._user_meta.inputs == (u._TensorMeta.from_tensor(x),)
        assert stage._user_meta.outputs == u.extract_tensor_metas((x, y))
        assert stage._user_meta.input_grads is None
        assert stage._inference_mode is None
        assert stage._is_same_rank(1)
        assert not stage._is_same_rank(0)
        with pytest.raises(u.PipeliningMetadataError):
            package.stage.PipelineStage(nn.Identity(), 1, 2, CPU, input_args="x")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_cannot_talk(package, u, rank):
    """With a fake group all shapes must be given; torch 2.13 reads a vote that nobody has sent."""
    module = layers(2)[rank]
    given = numbers(1, 2, WIDTH).requires_grad_(rank == 1)
    x, target = numbers(2, 4, WIDTH), numbers(3, 4, WIDTH)
    args, kwargs = ((x,), {}) if rank == 0 else ((), {"target": target})
    with fake_group(rank, 2):
        stage = package.stage.PipelineStage(module, rank, 2, CPU, input_args=given, output_args=module(given))
        schedule = package.schedules.ScheduleGPipe(stage, 2, loss_fn=summed)
        if not package.ours:
            with pytest.raises(Exception):  # noqa: B017, PT011 (a vote of zeros is taken for one)
                schedule.step(*args, **kwargs)
            return
        schedule.step(*args, **kwargs)
        assert stage._inference_mode is u.InferenceMode.STATIC
        assert all(parameter.grad is not None for parameter in module.parameters())
        unknown = package.schedules.ScheduleGPipe(package.stage.PipelineStage(module, rank, 2, CPU), 2, loss_fn=summed)
        with pytest.raises(RuntimeError, match="fake process group"):
            unknown.step(*args, **kwargs)


def test_the_agreement_of_ranks_is_replaced(package, u):
    """As a trainer does for ranks that cannot talk: with this, shapes that are given are enough."""
    module = layers(2)[1]
    given = numbers(1, 2, WIDTH).requires_grad_()
    seen = []

    def warm_up(self, stages, has_backward, p2p_done):
        seen.append((len(stages), has_backward, p2p_done))
        for stage in stages:
            assert not u.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
            stage._inference_mode = u.InferenceMode.STATIC

    with fake_group(1, 2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(package.schedules._PipelineSchedule, "_warmup_p2p", warm_up)
        stage = package.stage.PipelineStage(module, 1, 2, CPU, input_args=given, output_args=module(given))
        schedule = package.schedules.ScheduleGPipe(stage, 2, loss_fn=summed)
        schedule.step(target=numbers(3, 4, WIDTH))
        schedule.step(target=numbers(3, 4, WIDTH))
        schedule.eval(target=numbers(3, 4, WIDTH))
    assert seen == [(1, True, False), (1, False, True)]


def test_shapes_are_found_in_the_first_step(package, u):
    with fake_group():
        stage = package.stage.PipelineStage(layers(1)[0], 0, 1, CPU)
        schedule = package.schedules.ScheduleGPipe(stage, 2, loss_fn=summed)
        schedule.step(numbers(1, 4, WIDTH), target=numbers(2, 4, WIDTH))
        assert stage._inference_mode is u.InferenceMode.DYNAMIC
        assert [tuple(each.shape) for each in stage._stage_meta.inputs] == [(2, WIDTH)]
        assert [tuple(each.shape) for each in stage._stage_meta.outputs] == [(2, WIDTH)]
        assert stage.chunks == 2
        assert set(stage.args_recv_info) == {0, 1}
        assert stage.args_recv_info[0][0].is_root_arg


def test_shapes_that_are_given_and_not_so_are_warned_of(package):
    with fake_group():
        wrong = numbers(1, 3, WIDTH)
        stage = package.stage.PipelineStage(layers(1)[0], 0, 1, CPU, input_args=wrong)
        schedule = package.schedules.ScheduleGPipe(stage, 2)
        with pytest.raises(package._utils.PipeliningMetadataError, match="shape mismatch"):
            schedule.step(numbers(1, 4, WIDTH))


def step(schedule, x, target=None):
    return schedule.step(x) if target is None else schedule.step(x, target=target)


@pytest.mark.parametrize("mistake", ["rows", "dtype", "output shape", "output dtype"])
def test_a_later_step_with_other_tensors_is_refused_on_demand(package, mistake):
    """With the check of every microbatch, which is off but for debugging."""
    with fake_group(0, 2), pytest.MonkeyPatch.context() as patch:
        module, u = layers(1)[0], package._utils
        patch.setattr(package.schedules._PipelineSchedule, "_warmup_p2p", as_static(u))
        given = numbers(1, 2, WIDTH)
        stage = package.stage.PipelineStage(module, 0, 2, CPU, input_args=given, output_args=module(given))
        stage._runtime_validate = True
        schedule = package.schedules.ScheduleGPipe(stage, 2)
        x = numbers(2, 4, WIDTH)
        schedule.step(x)
        hooks = {"output shape": lambda *a: a[-1].flatten(), "output dtype": lambda *a: a[-1].to(torch.bfloat16)}
        if mistake in hooks:
            module.register_forward_hook(hooks[mistake])
        wrong = {"rows": numbers(2, 6, WIDTH), "dtype": x.to(torch.int32)}.get(mistake, x)
        message = "dtype mismatch" if "dtype" in mistake else "shape mismatch"
        with pytest.raises(u.PipeliningMetadataError, match=message):
            schedule.step(wrong)


def as_static(u):
    def warm_up(self, stages, has_backward, p2p_done):
        for stage in stages:
            stage._inference_mode = u.InferenceMode.STATIC

    return warm_up


def test_a_stage_that_is_not_there(package):
    with fake_group(0, 2):
        with pytest.raises(ValueError, match="2"):
            package.stage.PipelineStage(nn.Identity(), 2, 2, CPU)
        with pytest.raises(RuntimeError, match="2"):
            package.stage.PipelineStage(nn.Identity(), 0, 1, CPU)
        stage = package.stage.PipelineStage(nn.Identity(), 0, 2, CPU)
        with pytest.raises(RuntimeError):
            stage._check_chunk_id(0)
        stage.chunks = 2
        stage._check_chunk_id(1)
        with pytest.raises(RuntimeError, match="2"):
            stage._check_chunk_id(2)


def test_finding_shapes_leaves_gradients_and_warns_of_nothing(package):
    with fake_group(), warnings.catch_warnings():
        warnings.simplefilter("error")
        module = layers(1)[0]
        stage = package.stage.PipelineStage(module, 0, 1, CPU)
        schedule = package.schedules.ScheduleGPipe(stage, 2, loss_fn=averaged)
        schedule._initialize_stage((numbers(1, 2, WIDTH),), {}, numbers(2, 2, WIDTH))
        assert all(parameter.grad is None for parameter in module.parameters())


def test_buffers_are_as_they_were_after_finding_shapes(package):
    """torch 2.13 counts the batch that was made up; later versions do not."""
    with fake_group():
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        stage = package.stage.PipelineStage(module, 0, 1, CPU)
        schedule = package.schedules.ScheduleGPipe(stage, 2, loss_fn=summed)
        schedule.step(numbers(1, 4, WIDTH), target=numbers(2, 4, WIDTH))
        assert module[1].num_batches_tracked == (2 if package.ours else 3)


def test_normal_outputs(package):
    normal = package.stage._normalize_model_output_as_tuple
    x = numbers(1, 2)
    assert normal(x) == (x,)
    assert normal([x, x]) == (x, x)
    assert normal((x,)) == (x,)
    assert normal({"a": x}) == ({"a": x},)
    assert normal(None) == (None,)
