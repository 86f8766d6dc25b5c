"""Trains a split in one process, stage after stage, and compares with the unsplit model."""

import torch
from torch import nn


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def train_unsplit(model, microbatches, loss_fn, seed=0, **options):
    """Return the losses and gradients of the unsplit model, which is called with some options."""
    model.zero_grad()
    torch.manual_seed(seed)
    losses = []
    for args, kwargs in microbatches:
        loss = loss_fn(model(*args, **kwargs, **options))
        loss.backward()
        losses.append(loss.detach())
    found = gradients(model)
    model.zero_grad()
    return losses, found


def train_in_turn(split, model, microbatches, loss_fn, seed=0):
    """Return the losses and gradients of the stages: each has a graph of its own, cut at the edges."""
    model.zero_grad()
    stages = split.stages()
    torch.manual_seed(seed)
    losses = []
    for args, kwargs in microbatches:
        losses.append(_train_one(stages, split.edges, args, kwargs, loss_fn))
    found = gradients(model)
    model.zero_grad()
    return losses, found


def _train_one(stages, edges, args, kwargs, loss_fn):
    values, received, result = {}, {}, None
    for stage, module in sorted(stages.items()):
        incoming = [number for number, edge in enumerate(edges) if stage in edge.targets]
        for number in incoming:
            wants_gradient = edges[number].gradient and values[number].is_floating_point()
            received[stage, number] = values[number].detach().requires_grad_(wants_gradient)
        result = module(*([received[stage, number] for number in incoming] if stage else args), **kwargs)
        outgoing = [number for number, edge in enumerate(edges) if edge.source == stage]
        if len(outgoing) == 1:
            result = (result,)
        if outgoing:
            assert isinstance(result, tuple)
            values.update(zip(outgoing, result, strict=True))
    loss = loss_fn(result)
    loss.backward()
    for stage in sorted(stages, reverse=True)[1:]:
        ends, seeds = [], []
        for number, edge in enumerate(edges):
            if edge.source == stage and edge.gradient:
                found = [received[target, number].grad for target in edge.targets]
                found = [gradient for gradient in found if gradient is not None]
                if found:
                    ends.append(values[number])
                    seeds.append(torch.stack(found).sum(0))
        torch.autograd.backward(ends, seeds)
    return loss.detach()


def assert_equal(split, model, microbatches, loss_fn, *, tolerance=1e-10, seed=0, **options):
    """Losses are bitwise equal, and every gradient within the tolerance.

    The unsplit model gets the options, too: with ``use_cache=False`` it computes in the same order as stages, which
    never keep keys and values.
    """
    losses, expected = train_unsplit(model, microbatches, loss_fn, seed, **options)
    ours, found = train_in_turn(split, model, microbatches, loss_fn, seed)
    assert all(map(torch.equal, ours, losses)), (ours, losses)
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None or not found[name].any(), name
        elif gradient.numel():
            assert found[name] is not None, f"{name} has no gradient"
            difference = float((found[name] - gradient).abs().max())
            assert difference <= tolerance, f"the gradient of {name} differs by {difference}"


def assert_complete(split, model):
    """Every parameter is on exactly one stage, or in a tie."""
    holders = {}
    for stage, module in split.stages().items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            assert dict(model.named_parameters(remove_duplicate=False))[name] is parameter
            holders.setdefault(id(parameter), set()).add(stage)
    tied = {frozenset(stage for stage, _ in tie.members) for tie in split.ties}
    for name, parameter in model.named_parameters():
        stages = holders.get(id(parameter))
        assert stages, f"{name} is on no stage"
        assert len(stages) == 1 or frozenset(stages) in tied, (name, stages)


class Tied(nn.Module):
    """A small transformer-like model whose head reads the embedding in the parent's code."""

    def __init__(self, layers=4, width=8, words=16, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens, mask=None):
        hidden = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * self.scale
        if mask is not None:
            hidden = hidden * mask
        return hidden @ self.embedding.weight.T
