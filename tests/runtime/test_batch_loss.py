"""The loss of the batch is what the unsplit model computes for the whole batch, and what the gradients are of."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import penstock as ps
from penstock.models.split import Split
from penstock.runtime import Microbatches, Pipeline, run_in_threads

IGNORED = -100
SAMPLES, TOKENS, MICROBATCHES = 7, 6, 3

LLAMA = LlamaConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, eos_token_id=31
)
T5 = T5Config(
    d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=32, dropout_rate=0.0, decoder_start_token_id=0
)
FAMILIES = {
    "a causal model": lambda: LlamaForCausalLM(LLAMA),
    "an encoder and a decoder": lambda: T5ForConditionalGeneration(T5),
}


def batch_with_padding():
    """Draw tokens whose labels are ignored except for 1 to 6 of each sample, so microbatches count very differently."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 32, (SAMPLES, TOKENS), generator=generator)
    labels = tokens.clone()
    for sample, length in enumerate([6, 5, 6, 2, 2, 2, 2]):
        labels[sample, length:] = IGNORED
    return tokens, labels


def each_rank(stages, call, **options):
    """Call a function with the pipeline of each of two ranks; ``stages`` is a split, or the modules of both ranks."""
    schedule = ps.build("1F1B", ranks=2, microbatches=MICROBATCHES)

    def worker(transport):
        mine = stages if isinstance(stages, Split) else {transport.rank: stages[transport.rank]}
        with Pipeline(mine, schedule, transport=transport, **options) as pipe:
            return call(pipe)

    return run_in_threads(worker, 2, timeout=60)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_counts_for_nothing(family):
    torch.manual_seed(0)
    model = FAMILIES[family]().double()
    tokens, labels = batch_with_padding()
    whole = model(input_ids=tokens, labels=labels, use_cache=False)
    whole.loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    losses = []

    def train(pipe):
        out = pipe.step(input_ids=tokens, labels=labels, losses=losses if pipe.has_last else None)
        return pipe.loss, out

    (elsewhere, _), (loss, out) = each_rank(ps.split(model, stages=2), train)
    assert elsewhere is None
    torch.testing.assert_close(loss, whole.loss.detach(), check_dtype=False)
    assert type(out) is type(whole)
    assert out.loss is out["loss"] is loss
    torch.testing.assert_close(out.logits, whole.logits.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-7, rtol=1e-5)
    assert abs(float(torch.stack(losses).mean()) - float(loss)) > 1e-3  # the mean of the losses is another number


@pytest.mark.parametrize("return_dict", [True, False])
def test_evaluation(return_dict):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA)
    tokens, labels = batch_with_padding()

    def evaluate(pipe):
        out = pipe.eval(input_ids=tokens, labels=labels, return_dict=return_dict)
        with_labels = pipe.loss
        pipe.eval(input_ids=tokens)
        without = pipe.loss
        pipe.eval(input_ids=tokens, labels=torch.full_like(labels, IGNORED))
        return with_labels, without, pipe.loss, out

    first, last = each_rank(ps.split(model, stages=2), evaluate, share_losses=True)
    with torch.no_grad():
        expected = model(input_ids=tokens, labels=labels).loss
    for loss, without, of_nothing, _ in (first, last):
        torch.testing.assert_close(loss, expected)
        assert without is None
        assert of_nothing.isnan()  # as the unsplit model returns
    out = last[-1]
    torch.testing.assert_close(out.loss if return_dict else out[0], expected)


def mean_over_ones(output, target):
    return (output[target > 0] ** 2).mean()


REDUCTIONS = {
    "mean": (nn.functional.mse_loss, {}),
    "sum": (nn.MSELoss(reduction="sum"), {"loss_reduction": "sum"}),
    "weighted": (
        mean_over_ones,
        {"loss_reduction": "weighted", "loss_weight": lambda target: (target > 0).sum()},
    ),
}


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("has_scaler", [False, True])
def test_every_reduction(kind, has_scaler):
    loss_fn, options = REDUCTIONS[kind]
    torch.manual_seed(0)
    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    x, target = torch.randn(SAMPLES, 3), torch.randn(SAMPLES, 3)
    target[:3] = target[:3].abs()  # the first microbatch counts more

    def train(pipe):
        assert pipe.loss is None
        pipe.step(x, target=target)
        trained = pipe.loss
        pipe.eval(x, target=target)
        return trained, pipe.loss

    def with_scaler(transport):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if has_scaler else None
        schedule = ps.build("1F1B", ranks=2, microbatches=MICROBATCHES)
        mine = {transport.rank: modules[transport.rank]}
        with Pipeline(mine, schedule, transport=transport, loss_fn=loss_fn, scaler=scaler, **options) as pipe:
            return train(pipe)

    (first, _), (trained, evaluated) = run_in_threads(with_scaler, 2, timeout=60)
    expected = loss_fn(modules[1](modules[0](x)), target).detach()
    assert first is None
    torch.testing.assert_close(trained, expected)
    torch.testing.assert_close(evaluated, expected)


def test_a_microbatch_in_which_nothing_counts():
    modules = [nn.Linear(3, 3), nn.Linear(3, 5)]
    x, target = torch.randn(SAMPLES, 3), torch.randint(5, (SAMPLES,))
    target[:3] = IGNORED
    options = {"loss_reduction": "weighted", "loss_weight": lambda one: (one != IGNORED).sum()}

    def train(pipe):
        pipe.step(x, target=target)
        return pipe.loss

    _, loss = each_rank(modules, train, loss_fn=nn.functional.cross_entropy, **options)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(modules[1](modules[0](x)), target).detach())


def test_an_output_spec_may_keep_the_losses():
    torch.manual_seed(0)
    tokens, labels = batch_with_padding()
    split = ps.split(LlamaForCausalLM(LLAMA), stages=2)

    def train(pipe):
        return pipe.step(input_ids=tokens, labels=labels)

    _, kept = each_rank(split, train, output_spec=Microbatches)
    assert [loss.shape for loss in kept.loss.values] == [torch.Size([])] * MICROBATCHES
