"""Generating between steps leaves training as it is: modes, gradients, buffers and random numbers."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime import Pipeline, run_in_threads
from runtime.generation.unsplit import decoder, draw_prompts, generate

SCHEDULE = ps.build("Interleaved1F1B", ranks=2, microbatches=2)


def dropping():
    """A model with dropout, and one layer that is kept in eval mode."""
    model = decoder("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    model.transformer.h[2].eval()
    return model


def train(generates, transport):
    """Train on one rank of a process of its own, or generate in between; returns what the training depends on."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    ids, mask = draw_prompts(4)
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=2, stages_per_rank=2)
    model = dropping()
    found = []
    with Pipeline(ps.split(model, stages=2), schedule, transport=transport) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(2):  # gradients are accumulated
                pipe.step(input_ids=ids, attention_mask=mask, labels=ids)
                found += [pipe.loss, *[one.grad.clone() for one in pipe.parameters()]]
                if generates:
                    pipe.generate(ids, attention_mask=mask, max_new_tokens=3, temperature=1.0)
                    pipe.generate(ids, attention_mask=mask, max_new_tokens=3)
            optimizer.step()
            optimizer.zero_grad()
        modes = [part.training for stage in pipe.stages.values() for part in stage.module.modules()]
    return found, modes, (torch.rand(1), random.random(), np.random.rand())


def test_training_is_as_without():
    (plain, modes, drawn), (between, modes_there, drawn_there) = (
        run_in_threads(lambda transport, one=one: train(one, transport), 1, timeout=60)[0] for one in (False, True)
    )
    assert all(torch.equal(one, other) for one, other in zip(plain, between, strict=True))
    assert modes == modes_there
    assert True in modes
    assert False in modes
    assert drawn == drawn_there


def test_what_has_been_trained_generates():
    ids, mask = draw_prompts()
    model = decoder("llama")
    split = ps.split(model, stages=4)  # the stages share the parameters of the model

    def call(transport):
        with Pipeline(split, SCHEDULE, transport=transport) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
            before = pipe.generate(ids, attention_mask=mask, max_new_tokens=9)
            pipe.step(input_ids=ids, attention_mask=mask, labels=ids)
            optimizer.step()
            pipe.eval(input_ids=ids, attention_mask=mask)
            return before, pipe.generate(ids, attention_mask=mask, max_new_tokens=9)

    (before, after), (_, there) = run_in_threads(call, 2, timeout=60)
    assert torch.equal(after, generate(model, ids, mask))
    assert torch.equal(after, there)
    assert not torch.equal(after, before)


def test_in_a_recording_and_under_another_schedule():
    ids, mask = draw_prompts()
    wanted = generate(decoder("llama"), ids, mask)
    split = ps.split(decoder("llama"), stages=4)

    def call(transport):
        with Pipeline(split, SCHEDULE, transport=transport) as pipe, pipe.recording():
            pipe.step(input_ids=ids, attention_mask=mask, labels=ids)
            found = [pipe.generate(ids, attention_mask=mask, max_new_tokens=9)]
            pipe.use(ps.build("LoopedBFS", ranks=2, microbatches=3, stages_per_rank=2))
            return [*found, pipe.generate(ids, attention_mask=mask, max_new_tokens=9)]

    for found in run_in_threads(call, 2, timeout=60):
        assert all(torch.equal(tokens, wanted) for tokens in found)


@pytest.mark.parametrize("by_position", [False, True])
def test_the_kind_of_example(by_position):
    """Tokens may be a positional argument of the model; only the first stage gets them then."""
    ids, mask = draw_prompts()
    model = decoder("llama")
    example = ((ids,), {}) if by_position else ((), {"input_ids": ids, "attention_mask": mask, "use_cache": False})
    split = ps.split(model, stages=4, example=example)
    options = {"attention_mask": mask, "max_new_tokens": 9}
    schedule = ps.build("GPipe", ranks=4, microbatches=2)

    def call(transport):
        with Pipeline(split, schedule, transport=transport, loss_fn=lambda out, _: out.logits.sum()) as pipe:
            return pipe.generate(ids, **options)

    wanted = generate(decoder("llama"), ids, mask)
    assert all(torch.equal(tokens, wanted) for tokens in run_in_threads(call, 4, timeout=60))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_element_types(dtype):
    ids, mask = draw_prompts()
    wanted = generate(decoder("llama").to(dtype), ids, mask)
    split = ps.split(decoder("llama").to(dtype), stages=4)

    def call(transport):
        with Pipeline(split, SCHEDULE, transport=transport) as pipe:
            return pipe.generate(ids.int(), attention_mask=mask.bool(), max_new_tokens=9, microbatches=1)

    assert all(torch.equal(tokens, wanted) for tokens in run_in_threads(call, 2, timeout=60))


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_compiled_and_checkpointed_stages():
    ids, mask = draw_prompts()
    model = decoder("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = []

    def wrap(module):
        return torch.compile(module, backend=lambda graph, _: compiled.append(graph) or graph.forward)

    schedule = ps.build("LoopedBFS", ranks=1, microbatches=2, stages_per_rank=2)
    with Pipeline(ps.split(model, stages=2), schedule, wrap=wrap) as pipe:
        tokens = pipe.generate(ids, attention_mask=mask, max_new_tokens=9)
        assert torch.equal(tokens, generate(decoder("llama"), ids, mask))
        assert not compiled  # each new token would compile the stages again
        assert all(part.training for stage in pipe.stages.values() for part in stage.module.modules())
