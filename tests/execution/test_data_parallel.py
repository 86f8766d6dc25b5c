"""What the adapters rely on in torch's DDP and FSDP: these tests fail when torch renames or changes it."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from penstock.execution.data_parallel import adapter_for
from penstock.execution.data_parallel.ddp import DdpAdapter, DdpReducerAdapter
from penstock.execution.data_parallel.fsdp import FsdpAdapter, FsdpPartsAdapter

X = torch.ones(3, 4)
DDP_NAMES = (
    "_comm_hooks",
    "_delay_all_reduce_params",
    "gradient_as_bucket_view",
    "parameters_to_ignore",
    "process_group",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "static_graph",
)
WIDER = MixedPrecisionPolicy(reduce_dtype=torch.float64)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def names_of_ddp(rank, ranks):
    module = DistributedDataParallel(model())
    missing = [name for name in DDP_NAMES if name not in vars(module)]
    with module.no_sync():
        output = module(X)
    silent = not module.require_forward_param_sync  # torch's own forward sets it
    module.reducer.prepare_for_backward(list(_find_tensors(output)))
    output.sum().backward()  # raises if the reducer was not prepared for it
    composable = replicate(model())
    composable(X)
    return missing, silent, type(replicate.state(composable)._ddp) is DistributedDataParallel


def test_private_names_of_ddp(workers):
    assert workers.run(names_of_ddp) == [([], True, True)] * 4


def names_of_fsdp(rank, ranks):
    module = fully_shard(model(), mesh=init_device_mesh("cpu", (ranks,)), mp_policy=WIDER)
    module.set_requires_gradient_sync(False)
    module(X).sum().backward()
    state = module._get_fsdp_state()
    parameters = [one for group in state._fsdp_param_groups for one in group.fsdp_params]
    gathered = [type(one._unsharded_param) is nn.Parameter for one in parameters]
    added_up = [one.unsharded_accumulated_grad.dtype for one in parameters]
    module.set_requires_gradient_sync(True)
    state._root_post_backward_final_callback()
    return (
        state._is_root,
        state._mp_policy.reduce_dtype,
        gathered,
        added_up,
        [one.grad is not None for one in module.parameters()],
    )


def test_private_names_of_fsdp(workers):
    wide = torch.float64
    assert workers.run(names_of_fsdp) == [(True, wide, [True] * 4, [wide] * 4, [True] * 4)] * 4


def drop(rank, ranks, policy):
    """A step that fails between its backwards and its reduction, then a whole one."""
    whole = model()
    module = fully_shard(copy.deepcopy(whole), mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy)
    adapter = adapter_for(module, reduce_in="last_backward")
    loss = module(X).sum()
    adapter.run_backward("full", loss.backward)
    adapter.drop_gradients()
    adapter.end_step()
    module.zero_grad()
    whole(X).sum().backward()
    adapter.run_backward("full", module(X).sum().backward)
    adapter.reduce()
    adapter.finish_step()
    adapter.end_step()
    for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), WIDER], ids=["same type", "reduced in another type"])
def test_gradients_of_a_failed_step_are_dropped(workers, policy):
    workers.run(drop, policy)


def choose(rank, ranks):
    """The adapters of each front door for the same modules, by name."""
    mesh = init_device_mesh("cpu", (ranks,))
    parts = model()
    fully_shard(parts[0], mesh=mesh)
    modules = [
        model(),
        DistributedDataParallel(model()),
        nn.Sequential(DistributedDataParallel(model())),
        replicate(model()),
        fully_shard(model(), mesh=mesh),
        parts,
    ]
    return [
        [type(adapter_for(module, reduce_in=door)) for module in modules] for door in ("reduce_action", "last_backward")
    ]


def test_adapters_of_both_front_doors(workers):
    nothing = type(None)
    by_actions = [nothing, DdpAdapter, DdpAdapter, DdpAdapter, FsdpAdapter, FsdpAdapter]
    by_backwards = [nothing, DdpReducerAdapter, DdpAdapter, DdpAdapter, FsdpAdapter, FsdpPartsAdapter]
    assert workers.run(choose) == [[by_actions, by_backwards]] * 4


def test_a_stand_in_is_not_shared():
    assert adapter_for(lambda x: x, reduce_in="last_backward") is None
