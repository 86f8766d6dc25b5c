"""Stages under DDP, FSDP2 and activation checkpoints evaluate and generate as the unsplit model does."""

import copy
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.runtime import Pipeline
from runtime.generation.unsplit import decoder, draw_prompts, generate

pytestmark = pytest.mark.processes


@cache
def mesh():
    """Replicas by ranks of the pipeline; made once in a process."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))


def with_fsdp(module):
    for block in module.model.layers:
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh()["replica"])
    return fully_shard(module, mesh=mesh()["replica"])


def with_ddp(module):
    return DistributedDataParallel(module, process_group=mesh()["replica"].get_group())


def with_checkpoints(wrap, module):
    for number, block in enumerate(module.model.layers):
        if any(True for _ in block.parameters()):
            module.model.layers[number] = checkpoint_wrapper(block)
    return wrap(module)


WRAPPERS = {"fsdp": with_fsdp, "ddp": with_ddp, "checkpoints and fsdp": partial(with_checkpoints, with_fsdp)}


def compare(rank, ranks, wrappers):
    """Evaluate and generate between training steps; returns what differs from the unsplit model, by wrapper."""
    found = {}
    replica = mesh().get_local_rank("replica")
    ids, mask = (one[replica::2] for one in draw_prompts(9))  # replicas have different numbers of sequences
    for wrapper in wrappers:
        torch.manual_seed(3)
        model = decoder("llama")
        unsplit = copy.deepcopy(model)
        schedule = ps.build("ZBVZeroBubble", ranks=2, microbatches=2)
        split = ps.split(model, stages=4)
        group = mesh().get_group("pipeline")
        with Pipeline(split, schedule, group=group, wrap=WRAPPERS[wrapper], share_losses=True) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
            for _ in range(2):
                found |= {f"{wrapper}: {what}": rank for what in differences(pipe, unsplit, ids, mask, replica)}
                pipe.step(input_ids=ids[:4], attention_mask=mask[:4], labels=ids[:4])
                optimizer.step()
                optimizer.zero_grad()
                update(unsplit)
    return found


def update(unsplit):
    """Train the unsplit model on the batches of both replicas."""
    ids, mask = draw_prompts(9)
    unsplit.train()
    for replica in range(2):
        mine, marked = ids[replica::2][:4], mask[replica::2][:4]
        for part, other in zip(mine.chunk(2), marked.chunk(2), strict=True):
            (unsplit(input_ids=part, attention_mask=other, labels=part, use_cache=False).loss / 4).backward()
    with torch.no_grad():
        for parameter in unsplit.parameters():
            parameter -= 0.05 * parameter.grad
            parameter.grad = None


def differences(pipe, unsplit, ids, mask, replica):
    for mode in ("training", "eval"):
        for module in [unsplit, *[stage.module for stage in pipe.stages.values()]]:
            module.train(mode == "training")
        with torch.no_grad():
            wanted = unsplit(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False)
        for inference in (False, True):
            with torch.inference_mode() if inference else nullcontext():
                output = pipe.eval(input_ids=ids, attention_mask=mask, labels=ids)
            if not torch.allclose(pipe.loss, wanted.loss, atol=1e-6):
                yield f"loss of {mode}"
            if pipe.has_last and not torch.allclose(output.logits, wanted.logits, atol=1e-9):
                yield f"logits of {mode}"
    for module in [stage.module for stage in pipe.stages.values()]:
        module.train()
    new = 3 + 2 * replica  # and end at different times
    tokens = pipe.generate(ids, attention_mask=mask, max_new_tokens=new, eos_token_id=())
    if not torch.equal(tokens, generate(unsplit, ids, mask, max_new_tokens=new, eos_token_id=None)):
        yield "tokens"
    if not all(part.training for stage in pipe.stages.values() for part in stage.module.modules()):
        yield "modes"


def test_evaluation_and_generation_between_steps(workers):
    assert workers.run(compare, list(WRAPPERS), limit=120) == [{}] * 4
